"""Habits of transformers' Trainer around a model that its user has changed: losses, forwards, modules and weights."""

from __future__ import annotations

import functools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from trl import BEMACallback

from ithaca.verify.small_models.features import small_model
from tests.doors import trainer_kinds as kinds
from tests.doors.habits import Habit, exact, refused
from tests.doors.trainer_scripts import peft_model, train

DOOR = "Trainer, a changed model"
_PUT = "make yours from outputs.logits in Trainer's compute_loss"


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **rest: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)


def with_loss_function() -> Any:
    model: Any = small_model("llama")
    model.loss_function = smoothed
    return model


def with_loss_type() -> Any:
    model: Any = small_model("llama")
    model.loss_type = "ForMaskedLM"
    return model


class Smoothed(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **rest: Any) -> Any:  # type: ignore[override]
        outputs: Any = super().forward(input_ids=input_ids, attention_mask=attention_mask, **rest)
        if labels is not None:
            outputs.loss = smoothed(outputs.logits, labels, 0)
        return outputs


def subclassed() -> Any:
    model: Any = small_model("llama")
    model.__class__ = Smoothed
    return model


def trebled(model: Any) -> Any:
    """The forward is wrapped, as people do who want a word in the loss."""
    before = model.forward

    @functools.wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = before(*args, **kwargs)
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = outputs.loss * 3
        return outputs

    model.forward = forward
    return model


def trebled_late(trainer: Trainer) -> None:
    trebled(trainer.model)


def wrapped() -> Any:
    return trebled(small_model("llama"))


def wrapped_adapter() -> Any:
    return trebled(adapted())


def adapted() -> Any:
    return peft_model(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


class Beside(nn.Module):
    """An MLP with a branch of its user's beside it: of each token alone, or of the tokens before it too."""

    def __init__(self, mlp: nn.Module, width: int, *, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mlp, self.mixes = mlp, mixes
        self.branch = nn.Conv1d(width, width, 3, padding=2) if mixes else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.branch(x.transpose(1, 2))[..., :-2].transpose(1, 2) if self.mixes else self.branch(x)
        out: Tensor = self.mlp(x) + beside
        return out


def widened(*, mixes: bool) -> Any:
    model: Any = small_model("llama")
    layer = model.model.layers[0]
    layer.mlp = Beside(layer.mlp, model.config.hidden_size, mixes=mixes)
    return model.to(torch.float64)


def patched() -> Any:
    """A forward on one module that adds the mean of the row."""
    model: Any = small_model("llama")
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x) + x.mean(1, keepdim=True)
    return model


class Adversarial(Trainer):
    """Each step is taken twice, the second time with embeddings moved along their gradient, then put back."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        again = dict(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        backup = weight.data.clone()
        self.give(weight, weight.data + weight.grad * 0.5)
        super().training_step(model, again, num_items_in_batch)
        self.give(weight, backup)
        return loss

    def give(self, weight: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(value)


class AdversarialByData(Adversarial):
    def give(self, weight: Tensor, value: Tensor) -> None:
        weight.data = value


def averaged_evaluation(sp: int | None, *, by_data: bool) -> dict[str, Any]:
    """The average takes the weights' place for an evaluation, and gives it back."""
    average = kinds.Average()
    give = AdversarialByData.give if by_data else Adversarial.give

    def after(trainer: Trainer) -> dict[str, Any]:
        named = dict(trainer.model.named_parameters())  # type: ignore[union-attr]
        backup = {name: p.data.clone() for name, p in named.items()}
        for name, p in named.items():
            give(trainer, p, average.kept[name])  # type: ignore[arg-type]
        inside = trainer.evaluate()["eval_loss"]
        for name, p in named.items():
            give(trainer, p, backup[name])  # type: ignore[arg-type]
        return {"average": inside, "again": trainer.evaluate()["eval_loss"]}

    return train(sp, callbacks=[average], after=after)


class Fills(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        with torch.no_grad():
            model.get_input_embeddings().weight[3] = 0.5


class KeepsRows(TrainerCallback):
    """Trains the rows of some tokens alone, as after new ones were added."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        model.get_input_embeddings().weight.grad[:50].zero_()
        model.lm_head.weight.grad[:50] *= 0


def merged(sp: int | None) -> dict[str, Any]:
    def after(trainer: Trainer) -> dict[str, Any]:
        folder = Path(trainer.args.output_dir) / "merged"
        trainer.model.merge_and_unload().save_pretrained(folder)  # type: ignore[union-attr, operator]
        trainer.accelerator.wait_for_everyone()
        return {"merged": load_file(folder / "model.safetensors")}

    return train(sp, model=adapted, after=after)


def saved_inside(sp: int | None) -> dict[str, Any]:
    def after(trainer: Trainer) -> dict[str, Any]:
        trainer.model.get_base_model().save_pretrained(Path(trainer.args.output_dir) / "inside")  # type: ignore[union-attr, operator]
        return {}

    return train(sp, model=adapted, after=after)


def resumed_without_shards(sp: int | None) -> dict[str, Any]:
    """A checkpoint as one process writes it: without the state shard by shard."""

    def after(trainer: Trainer) -> dict[str, Any]:
        folder = Path(trainer.args.output_dir) / "checkpoint-2"
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            shutil.rmtree(folder / "pytorch_model_fsdp_0", ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer.train(resume_from_checkpoint=str(folder))
        return {}

    return train(sp, save_strategy="steps", save_steps=2, after=after)


def moved_average(sp: int | None) -> dict[str, Any]:
    return train(sp, callbacks=[BEMACallback(update_freq=1)])


def _exact(name: str, script: Any = train, note: str = "", slow: bool = True, **own: Any) -> Habit:
    return exact(DOOR, name, partial(script, **own) if own else script, note=note, slow=slow)


def _refused(name: str, says: str, note: str, script: Any = train, slow: bool = True, **own: Any) -> Habit:
    return refused(DOOR, name, partial(script, **own) if own else script, says=says, note=note, slow=slow)


_DATA, _COPY = "call weight.copy_", "use `weight.copy_(value)`: torch drops the assignment"
_LOSS = "compute the loss in `compute_loss`"
HABITS: list[Habit] = [
    _refused("`model.loss_function` of one's own", _PUT, _LOSS, slow=False, model=with_loss_function),
    _refused("`model.loss_type` of another loss", "model.loss_function may make a loss", _LOSS, model=with_loss_type),
    _refused("a subclass whose forward makes the loss", "Smoothed.forward may make a loss", _LOSS, model=subclassed),
    _refused("a forward put on the model", _PUT, _LOSS, model=wrapped),
    _refused("a forward put on a PEFT model", _PUT, _LOSS, model=wrapped_adapter),
    _refused("a forward put on the model after the Trainer was made", _PUT, _LOSS,
             before=trebled_late),
    _exact("a forward put on the model, the loss made in `compute_loss`", model=wrapped, kind=kinds.ReadsEveryPosition),
    _exact("a module put into a layer, of each token alone", model=partial(widened, mixes=False)),
    _refused("a module put into a layer, of several tokens", "is code of your own.*Beside.* reads tokens", "",
             slow=False, model=partial(widened, mixes=True)),
    _refused("a forward put on a layer's module, of several tokens", "is code of your own.*reads tokens", "",
             model=patched),
    _exact("weights changed and put back within a step, by `copy_`", kind=Adversarial),
    _refused("weights changed and put back within a step, by `weight.data = ...`", _DATA, _COPY, slow=False,
             kind=AdversarialByData),
    _exact("an average put in for an evaluation, by `copy_`", averaged_evaluation, by_data=False),
    _refused("an average put in for an evaluation, by `weight.data = ...`", _DATA, _COPY, averaged_evaluation,
             by_data=True),
    _exact("a row of a weight filled in place", callbacks=[Fills()]),
    _exact("rows of a gradient kept out of a step", slow=False, callbacks=[KeepsRows()]),
    _exact("an adapter merged and the model saved", merged),
    _refused("the model inside an adapter's saved", "save the PEFT model", "save the PEFT model, or merge", saved_inside),
    _refused("`save_only_model=True`", "save_only_model=True", "leave it out, and call `save_model`",
             save_only_model=True, save_strategy="steps", save_steps=2),
    _refused("`bf16_full_eval=True`", "bf16_full_eval=True casts the weights", "leave it out", bf16_full_eval=True),
    _refused("TRL's `BEMACallback`", "take the whole weight with weight.full_tensor",
             "keep the average in a callback of your own", moved_average),
    _refused("resume from a checkpoint of one process", "no state that was written shard by shard",
             "load its weights with `from_pretrained(checkpoint)`", resumed_without_shards),
]  # fmt: skip
