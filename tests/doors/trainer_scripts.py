"""A Trainer script as users write it, on rows of unequal lengths, with every number it logs and the weights it ends with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import collate, config, examples, reset

# What a run logs that is no number of the training.
CLOCKS = ("runtime", "per_second", "epoch", "total_flos", "mfu", "train_loss")
OWN = (
    "compute_loss_func", "compute_metrics", "callbacks", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
    "optimizers", "model_init",
)  # fmt: skip


def arguments(sp: int | None, folder: str, **own: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "max_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 3,
        "use_cpu": True, "dataloader_pin_memory": False, "optim": "sgd", "max_grad_norm": 1e9,
    }  # fmt: skip
    return TrainingArguments(**defaults | own, parallelism_config=config(sp))


def train(
    sp: int | None,
    *,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    after: Callable[[Trainer], dict[str, Any]] | None = None,
    before: Callable[[Trainer], None] | None = None,
    collator: Any = collate,
    rows: int = 12,
    **own: Any,
) -> dict[str, Any]:
    """Make a Trainer, train and evaluate; `before` and `after` are what else its user does with it."""
    reset()
    folder = shared_folder(sp)
    given = {name: own.pop(name) for name in OWN if name in own}
    try:
        trainer = kind(
            model=None if "model_init" in given else small_model("llama") if model is None else model(),
            args=arguments(sp, folder, **own),
            train_dataset=Dataset.from_list(examples(rows)),
            eval_dataset=Dataset.from_list(examples(8, seed=1)),
            data_collator=collator,
            **given,
        )
        if before is not None:
            before(trainer)
        trainer.train()
        numbers = logged(trainer)
        numbers |= {name: value for name, value in trainer.evaluate().items() if told(name)}
        if after is not None:
            numbers |= after(trainer)
        numbers["weights"] = weights_of(trainer.model)
        trainer.accelerator.wait_for_everyone()
        return numbers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shared_folder(sp: int | None) -> str:
    """One new folder, the same on all ranks."""
    box = [tempfile.mkdtemp()]
    if sp is not None:
        mine = box[0]
        dist.broadcast_object_list(box, src=0)
        if box[0] != mine:
            shutil.rmtree(mine)
    return box[0]


def logged(trainer: Trainer) -> dict[str, Any]:
    return {f"{name} {row['step']}": row[name] for row in trainer.state.log_history for name in row if told(name)}


def told(name: str) -> bool:
    return name != "step" and not any(clock in name for clock in CLOCKS)


def weights_of(model: Any) -> dict[str, Any]:
    """Every weight as a whole, by its name in the model that was handed over."""
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


def peft_model(adapter: Any, **overrides: Any) -> Any:
    """A small model with an adapter whose weights are all drawn: a new adapter adds nothing."""
    from peft import get_peft_model

    base = small_model("llama", **overrides)
    torch.manual_seed(5)
    made = get_peft_model(base, adapter)
    with torch.no_grad():
        for _, weight in sorted(made.named_parameters(), key=lambda entry: entry[0]):
            if weight.requires_grad and float(weight.abs().max()) == 0.0:
                weight.copy_(torch.randn_like(weight) * 0.1)
    return made.to(torch.float64)
