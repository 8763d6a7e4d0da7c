"""Trainers, callbacks and functions as users write them: losses of their own, averages of weights, metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback


def whole(weight: Tensor) -> Tensor:
    """A weight as one process has it; what the documentation asks for where weights are split."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


class OwnLoss(Trainer):
    """`extra` is added to the loss; where it reads logits, the labels stay in the inputs."""

    keeps_labels = True

    def extra(self, model: Any, outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "labels" or self.keeps_labels}
        outputs = model(**inputs)
        loss = self.extra(model, outputs, inputs)
        loss = loss + outputs.loss if self.keeps_labels else loss
        return (loss, outputs) if return_outputs else loss


class ReadsLogits(OwnLoss):
    def extra(self, model: Any, outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
        return 1e-2 * torch.logsumexp(outputs.logits, -1).square().mean()


class ReadsEveryPosition(ReadsLogits):
    """Padding too, and without labels in the call."""

    keeps_labels = False


class ReadsSometimes(OwnLoss):
    """A term in every third step; in the next one a metric alone, without a gradient."""

    calls = 0

    def extra(self, model: Any, outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 1:
            with torch.no_grad():
                right = (outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]).double().mean()
            self.log({"accuracy": float(right)})
        return 1e-2 * outputs.logits.square().mean() if self.calls % 3 == 0 else outputs.loss * 0


class DecaysWhole(OwnLoss):
    def extra(self, model: Any, outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
        return 1e-2 * whole(model.get_input_embeddings().weight).square().sum()


class DecaysAsItStands(OwnLoss):
    def extra(self, model: Any, outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
        return 1e-2 * model.get_input_embeddings().weight.square().sum()


class TakesApart(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        logits = model.lm_head(hidden)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=-100)
        return (loss, {"logits": logits}) if return_outputs else loss


class OwnOptimizer(Trainer):
    """Two groups with rates of their own, and a scheduler of their own."""

    def create_optimizer(self, model: Any = None) -> Any:
        named = list((self.model if model is None else model).named_parameters())
        matrices, others = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        return self.lr_scheduler


class Muon(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        weights = (self.model if model is None else model).parameters()
        self.optimizer = torch.optim.Muon([p for p in weights if p.ndim == 2], lr=1e-1)
        return self.optimizer


class OwnLoader(Trainer):
    """A loader that never went through `accelerator.prepare`."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)  # type: ignore[arg-type]


class Average(TrainerCallback):
    """An exponential moving average of all weights, begun where training begins."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def begin(self, model: Any) -> None:
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.kept or self.begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        for name, p in model.named_parameters():
            self.kept[name].mul_(0.9).add_(p.detach(), alpha=0.1)


class Watch(TrainerCallback):
    """Norms of weights, and of gradients before the step, as people log them."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.seen += [float(whole(p.grad.norm())) for p in model.parameters() if p.grad is not None]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        for p in model.parameters():
            self.seen += [
                float(whole(value)) for value in (p.detach().norm(), p.detach().abs().max(), p.detach().sum())
            ]


def squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func`."""
    targets = labels[:, 1:].flatten()
    each = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="none")
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return each.square().sum() / 8 / count


def accuracy(prediction: Any) -> dict[str, float]:
    """A `compute_metrics` over whole logits, at padding too."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & (labels[:, 1:] != -100)
    return {"right": float(right.sum()), "size": float(logits.square().mean())}


def best_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """A `preprocess_logits_for_metrics`."""
    return logits.argmax(-1)


def share(prediction: Any) -> dict[str, float]:
    """A `compute_metrics` over what `best_tokens` leaves."""
    return {"share": float((prediction.predictions == prediction.label_ids).mean())}
