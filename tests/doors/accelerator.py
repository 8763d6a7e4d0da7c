"""Habits of accelerate's users: a loop of their own around an Accelerator."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ithaca.proof.small import small_model
from tests.doors.habits import Habit, exact, refused
from tests.doors.trainer_kinds import whole
from tests.doors.trainer_scripts import shared_folder, weights_of
from tests.integrations.runs import collate, config, examples, reset

DOOR = "Accelerator"
STEPS = 4


def loop(
    sp: int | None,
    *,
    optimizer: Any = torch.optim.SGD,
    after_prepare: bool = False,
    accumulate: int = 1,
    clip: float = 1e9,
    reads: bool = False,
    decays: bool = False,
    average: bool = False,
    resume: bool = False,
) -> dict[str, Any]:
    """prepare, forward, backward, clip, step, schedule, gather, save."""
    reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, parallelism_config=config(sp))
    model: Any = small_model("llama")
    loader = DataLoader(examples(16), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    if after_prepare:
        model, loader = accelerator.prepare(model, loader)
        steps = accelerator.prepare(optimizer(model.parameters(), lr=1e-2))
    else:
        model, steps, loader = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-2), loader)
    rate = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(steps, lambda step: 0.5**step))
    kept = {name: p.detach().clone() for name, p in model.named_parameters()} if average else {}
    numbers: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "right": []}
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            if reads:
                loss = loss + 1e-2 * torch.logsumexp(outputs.logits, -1).square().mean()
            if decays:
                loss = loss + 1e-2 * whole(model.get_input_embeddings().weight).square().sum()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                numbers["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            steps.step()
            rate.step()
            steps.zero_grad()
        for name, p in model.named_parameters() if average else ():
            kept[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        numbers["losses"].append(float(loss.detach()))
        numbers["rates"].append(rate.get_last_lr()[0])
        if reads:
            best, labels = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            numbers["right"].append(float((best == labels).sum()))
    if resume:
        folder = shared_folder(sp)
        accelerator.save_state(folder)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    numbers["average"] = {name: whole(value) for name, value in kept.items()}
    return numbers | {"weights": weights_of(model)}


def _exact(name: str, note: str = "", **own: Any) -> Habit:
    return exact(DOOR, name, partial(loop, **own), note=note, slow=bool(own))


def decays_as_it_stands(sp: int | None) -> dict[str, Any]:
    """An L2 term on a weight that is split, added to a plain loss."""
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=config(sp))
    model: Any = accelerator.prepare(small_model("llama"))
    loss = model(**collate(examples(2))).loss + 1e-2 * model.get_input_embeddings().weight.square().sum()
    accelerator.backward(loss)
    return {"loss": float(loss.detach())}


HABITS: list[Habit] = [
    _exact("prepare, train, schedule"),
    _exact("the optimizer made after `prepare`", after_prepare=True),
    _exact("Adafactor", optimizer=torch.optim.Adafactor),
    _exact("AdamW", optimizer=torch.optim.AdamW),
    _exact("gradients accumulated and clipped", accumulate=2, clip=0.5),
    _exact("logits read beside a loss, and gathered for metrics", reads=True),
    _exact("an L2 term on a whole weight", note="`weight.full_tensor()`", decays=True),
    refused(
        DOOR, "an L2 term on a weight as it stands", decays_as_it_stands, says="take the whole weight with weight.full_tensor",
        note="take `weight.full_tensor()`", slow=True,
    ),
    _exact("an average of weights, begun after `prepare`", average=True),
    _exact("`save_state` and `load_state`", resume=True),
]  # fmt: skip
