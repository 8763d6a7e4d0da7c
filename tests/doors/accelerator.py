"""Habits of accelerate's users: a loop of their own around an Accelerator."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler

from ithaca.verify.small_models.features import small_model
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


def sampled(sp: int | None, *, by: str, prepared: bool = False) -> dict[str, Any]:
    """A share of the rows that the user takes by `num_processes` and `process_index`, or by accelerate's own split."""
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=config(sp))
    rows: Any = examples(16)
    count, index = accelerator.num_processes, accelerator.process_index
    order = DistributedSampler(rows, num_replicas=count, rank=index, shuffle=False) if by == "sampler" else None
    if by == "slice":
        rows = rows[index::count]
    if by == "ranks":
        rows = rows[accelerator.state.process_index :: accelerator.state.num_processes]
    with accelerator.split_between_processes(rows) if by == "split" else nullcontext(rows) as mine:
        # In the batches of one process rows stand in another order: the loss is a mean over tokens.
        loader: Any = DataLoader(list(mine), batch_size=4 // count, sampler=order, collate_fn=collate)
    model: Any = small_model("llama")
    model, steps = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    loader = accelerator.prepare(loader) if prepared else loader
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        steps.step()
        steps.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "weights": weights_of(model)}


def read_norms(sp: int | None) -> dict[str, Any]:
    """The norm of every gradient, logged as people log it."""
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=config(sp))
    model: Any = accelerator.prepare(small_model("llama"))
    accelerator.backward(model(**collate(examples(2))).loss)
    return {"norms": [p.grad.norm().item() for p in model.parameters()]}


def _of_groups(sp: int | None, **own: Any) -> dict[str, Any]:
    return sampled(sp and 2, **own)


def _exact(name: str, note: str = "", script: Any = loop, **own: Any) -> Habit:
    return exact(DOOR, name, partial(script, **own), note=note, slow=bool(own))


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
    _exact("a `DistributedSampler` over `num_processes` and `process_index`", script=sampled, by="sampler"),
    exact(
        DOOR, "the same in two groups of two", partial(_of_groups, by="sampler"), ranks=4, slow=True,
        note="`process_index` counts sequence groups, as `num_processes` does",
    ),
    _exact("a slice of the rows by `process_index`", script=sampled, by="slice"),
    _exact("`split_between_processes`", script=sampled, by="split", prepared=True),
    refused(
        DOOR, "a slice of the rows by the rank in the world", partial(sampled, by="ranks"),
        says="share one sequence but were handed different batches", error="BatchError", slow=True,
        note="slice by `accelerator.process_index`, or prepare the loader",
    ),
    refused(
        DOOR, "`weight.grad.norm().item()`", read_norms, says=r"call .full_tensor\(\) on it first, on every rank",
        note="use `weight.grad.norm().full_tensor().item()`",
    ),
    _exact("an average of weights, begun after `prepare`", average=True),
    _exact("`save_state` and `load_state`", resume=True),
]  # fmt: skip
