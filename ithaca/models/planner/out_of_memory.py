"""The account in an out-of-memory error: memory by kind, the largest term, and the smallest change that fits.

torch's own message names an allocation; the plan has the purpose of each. The change is not guessed: plans are made for
smaller and smaller budgets until one takes less than the plan in force.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ithaca.errors import IthacaError, MemoryPlanError
from ithaca.planning.memory_plan import UNDECIDED, Decided, Job, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.search.phrases import LIBRARY, Phrases
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.planning.terms.step_memory import StepMemory
from ithaca.planning.terms.terms_table import explain
from ithaca.quantities import bytes_setting, parse_bytes, show_bytes

# Shares of what the failed plan takes, tried from above.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


class DeviceMemoryError(IthacaError, torch.OutOfMemoryError):
    """Out of device memory in a step; the message has the terms of the plan in force and the smallest change."""


def out_of_memory(
    error: torch.OutOfMemoryError,
    model: nn.Module,
    sizes: ModelSizes,
    job: Job,
    plan: MemoryPlan,
    host: int,
    phrases: Phrases = LIBRARY,
    given: MemoryPlan | Decided = UNDECIDED,
) -> DeviceMemoryError:
    """Return the error with an account of its step; an error that has an account is returned as it is.

    `given`: the user's whole plan, or the user's decisions.
    """
    if isinstance(error, DeviceMemoryError):
        return error
    memory = memory_of(sizes, job, plan)
    blame = memory.largest()
    first = str(error).strip().splitlines()[0]
    return DeviceMemoryError(
        f"{first}\n{_by_kind(model)}\nThe plan in force ({plan.summary()}) counts on {show_bytes(memory.device_bytes)} "
        f"at the {memory.moment}:\n{explain(memory.terms, memory.device_bytes)}\n"
        f"The largest term is {blame.name!r}, {show_bytes(blame.device_bytes)} ({blame.formula}). "
        f"{_change(sizes, job, memory, host, phrases, given)}"
    )


def _by_kind(model: nn.Module) -> str:
    """Return the memory held now: weights and gradients by their tensors, the rest by the allocator's counts."""
    parameters = list(model.parameters())
    device = parameters[0].device
    weights = sum(_local_bytes(p) for p in parameters)
    gradients = sum(_local_bytes(p.grad) for p in parameters if p.grad is not None)
    kinds = {"weights": weights, "gradients": gradients}
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        kinds |= {
            "optimizer state and activations": max(0, allocated - weights - gradients),
            "gaps of the allocator": reserved - allocated,
            "others on this device": max(0, total - free - reserved),
        }
    return "Held now: " + ", ".join(f"{name} {show_bytes(size)}" for name, size in kinds.items()) + "."


def _local_bytes(x: torch.Tensor) -> int:
    local: torch.Tensor = getattr(x, "_local_tensor", x)
    return local.nbytes


def _change(
    sizes: ModelSizes, job: Job, memory: StepMemory, host: int, phrases: Phrases, given: MemoryPlan | Decided
) -> str:
    # All of this device was too little, whatever the plan counts on.
    phrases = phrases._replace(device=lambda _: "a larger device")
    # No budget changes a plan that the user gave whole.
    decided, first = (UNDECIDED, f"{phrases.free(())} and ") if isinstance(given, MemoryPlan) else (given, "")
    for share in SHARES:
        budget = bytes_setting(share * memory.device_bytes)
        limit = cast(int, parse_bytes(budget))
        try:
            smaller = plan_or_refuse(sizes, job, limit, host, decided, phrases=phrases)
        except MemoryPlanError as refused:
            return str(refused)
        saved = memory.device_bytes - memory_of(sizes, job, smaller).device_bytes
        if saved > 0:
            return f"The smallest change: {first}{phrases.budget(budget)} takes {show_bytes(saved)} less ({smaller.summary()})"
    return "Shorter sequences or a larger sp would take less"
