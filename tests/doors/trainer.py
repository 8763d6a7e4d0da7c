"""Habits of transformers' Trainer."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer

from ithaca.verify.small_models.features import small_model
from tests.doors import trainer_kinds as kinds
from tests.doors.habits import Habit, absent, exact, refused
from tests.doors.trainer_scripts import peft_model, train, weights_of
from tests.integrations.runs import collate_left_masked
from tests.tolerances import BF16_LOSS

DOOR = "Trainer"
SPLIT = "take the whole weight with weight.full_tensor"


def sdpa() -> Any:
    model = small_model("llama")
    model.set_attn_implementation("sdpa")
    return model


def windowed() -> Any:
    return small_model("mistral")


def frozen() -> Any:
    model = small_model("llama")
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1" in name)
    return model


def adapted() -> Any:
    return peft_model(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def prompted() -> Any:
    return peft_model(PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def shows_hidden_states() -> Any:
    model = small_model("llama")
    model.config.output_hidden_states = True
    return model


def resized() -> Any:
    model = small_model("llama")
    model.resize_token_embeddings(70, mean_resizing=False)
    return model


def averaged(sp: int | None, *, early: bool = False) -> dict[str, Any]:
    average = kinds.Average()

    def before(trainer: Trainer) -> None:
        if early:
            average.begin(trainer.model)

    def after(trainer: Trainer) -> dict[str, Any]:
        return {"average": {name: kinds.whole(value) for name, value in average.kept.items()}}

    return train(sp, callbacks=[average], before=before, after=after)


def watched(sp: int | None) -> dict[str, Any]:
    watch = kinds.Watch()
    return train(sp, callbacks=[watch], after=lambda trainer: {"seen": watch.seen})


def predicted(sp: int | None, **own: Any) -> dict[str, Any]:
    def after(trainer: Trainer) -> dict[str, Any]:
        output = trainer.predict(trainer.eval_dataset)
        logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        return {"logits": torch.as_tensor(logits), "labels": torch.as_tensor(output.label_ids)}

    return train(sp, after=after, **own)


def saved(sp: int | None) -> dict[str, Any]:
    def after(trainer: Trainer) -> dict[str, Any]:
        folder = str(Path(trainer.args.output_dir) / "saved")
        trainer.save_model(folder)
        trainer.accelerator.wait_for_everyone()
        return _reloaded(trainer, folder)

    return train(sp, after=after)


def _reloaded(trainer: Trainer, folder: str) -> dict[str, Any]:
    """Read by the rank that wrote it; gathering the others' weights takes all ranks."""
    mine = weights_of(trainer.model)
    return {
        "saved": weights_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
        if trainer.is_world_process_zero()
        else mine
    }


def copied_before(sp: int | None) -> dict[str, Any]:
    held: dict[str, Any] = {}

    def before(trainer: Trainer) -> None:
        held["model"] = copy.deepcopy(trainer.model)

    return train(sp, before=before, after=lambda trainer: {"copy": weights_of(held["model"])})


def made_before(sp: int | None) -> dict[str, Any]:
    model = small_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return train(sp, model=lambda: model, optimizers=(optimizer, schedule))


def initial() -> Any:
    return small_model("llama")


def again(sp: int | None) -> dict[str, Any]:
    """A second `train()` of the same Trainer goes on with the weights of the first."""

    def after(trainer: Trainer) -> dict[str, Any]:
        trainer.train()
        return {f"again {key}": value for key, value in trainer.evaluate().items() if key == "eval_loss"}

    return train(sp, after=after)


def _exact(
    name: str, script: Any = train, note: str = "", within: float | None = None, slow: bool = True, **own: Any
) -> Habit:
    options: dict[str, Any] = {} if within is None else {"within": within}
    return exact(DOOR, name, partial(script, **own) if own else script, note=note, slow=slow, **options)


def _refused(
    name: str, says: str, note: str, script: Any = train, error: str = "UnsupportedError", slow: bool = True, **own: Any
) -> Habit:
    return refused(DOOR, name, partial(script, **own) if own else script, says=says, note=note, error=error, slow=slow)


_READ = "logits beside a loss are computed when they are read"
_STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
HABITS: list[Habit] = [
    _exact("train and evaluate", slow=False),
    _exact(
        "gradients accumulated and clipped",
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
    ),
    _exact("labels smoothed", label_smoothing_factor=0.1),
    _exact("`compute_loss_func`", compute_loss_func=kinds.squares),
    _exact(
        "`compute_loss` that keeps the labels and reads logits",
        note=_READ,
        slow=False,
        kind=kinds.ReadsLogits,
        max_steps=4,
    ),
    _exact(
        "`compute_loss` over logits at padding, rows padded on the right", slow=False, kind=kinds.ReadsEveryPosition
    ),
    _exact(
        "`compute_loss` over logits at padding, rows padded on the left",
        kind=kinds.ReadsEveryPosition,
        collator=collate_left_masked,
    ),
    _exact(
        "the same under sdpa, which gives zeros where a query sees nothing",
        kind=kinds.ReadsEveryPosition,
        collator=collate_left_masked,
        model=sdpa,
    ),
    _exact("the same with a sliding window", kind=kinds.ReadsLogits, model=windowed),
    _exact("logits read in some steps only", kind=kinds.ReadsSometimes, max_steps=6),
    _exact("an L2 term on a whole weight", note="`weight.full_tensor()`", kind=kinds.DecaysWhole),
    _refused(
        "an L2 term on a weight as it stands",
        SPLIT,
        "take `weight.full_tensor()`",
        slow=False,
        kind=kinds.DecaysAsItStands,
    ),
    _refused(
        "`model.model` and `model.lm_head` called apart",
        "was called by itself, and its weights are spread over ranks: call the whole model",
        "call the model",
        kind=kinds.TakesApart,
    ),
    _exact("`compute_metrics` over logits", compute_metrics=kinds.accuracy, note=_READ),
    _exact(
        "`preprocess_logits_for_metrics`", compute_metrics=kinds.share, preprocess_logits_for_metrics=kinds.best_tokens
    ),
    _exact("`predict`", predicted, slow=False),
    _refused(
        "hidden states in what `predict` and `evaluate` gather",
        "output_hidden_states=True in the model's config",
        "`ithaca.unsharded(model)`",
        predicted,
        model=shows_hidden_states,
    ),
    _exact(
        "evaluation in training, the best model at the end, early stopping",
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(2)],
        **_STEPS,
    ),
    _exact("an average of weights, begun in `on_train_begin`", averaged),
    _refused(
        "an average of weights, begun before `train`", SPLIT, "begin it in `on_train_begin`", averaged, early=True
    ),
    _exact(
        "a callback that logs norms, maxima and sums of weights and gradients",
        watched,
        note="use `weight.norm().full_tensor()`: torch's `float(weight.norm())` is the number of this rank's shard",
    ),
    _exact("AdamW", optim="adamw_torch", learning_rate=1e-3),
    _exact("Adafactor of transformers", optim="adafactor", slow=False),
    _exact("Adafactor of torch", optimizer_cls_and_kwargs=(torch.optim.Adafactor, {"lr": 1e-2})),
    _exact("Muon", kind=kinds.Muon),
    _exact("RMSprop", optim="rmsprop"),
    _exact("an optimizer and a scheduler of one's own, by `create_optimizer`", kind=kinds.OwnOptimizer),
    _refused(
        "an optimizer handed over as `optimizers=`",
        "Passing `optimizers` is not allowed",
        "`optimizer_cls_and_kwargs`, or `create_optimizer`",
        made_before,
        error="RuntimeError",
    ),
    _exact("a cosine schedule with warm-up", lr_scheduler_type="cosine", warmup_steps=2),
    _exact("frozen weights", model=frozen),
    _exact("LoRA", model=adapted),
    _refused("prompt tuning", "puts tokens of its own before every row", "use another kind of adapter", model=prompted),
    _exact("embeddings resized before", model=resized),
    _exact("the model copied before", copied_before),
    _exact("`model_init`", model_init=initial),
    _exact("saved and loaded again", saved),
    _exact("`train` called twice", again),
    _exact("`gradient_checkpointing=True`", gradient_checkpointing=True, note='becomes `memory="auto"`'),
    _exact("a loader of one's own", kind=kinds.OwnLoader, note="the ranks of a sequence group read the same rows"),
    _exact("rows sorted by length", train_sampling_strategy="group_by_length"),
    _exact("`bf16=True`", bf16=True, within=BF16_LOSS, learning_rate=1e-3),
    _refused("`torch_compile=True`", "Ithaca compiles token-wise work", "leave it out", torch_compile=True),
    _refused(
        "`neftune_noise_alpha`",
        "neftune_noise_alpha scales its noise by the length",
        "set it to None",
        neftune_noise_alpha=5.0,
    ),
    absent(DOOR, "`hyperparameter_search`", "starts runs of its own; each is a Trainer as above"),
]
