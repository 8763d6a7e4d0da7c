"""What an out-of-memory error says here: memory by kind, the term to blame, and the smallest change that fits.

torch's own message names an allocation; the plan knows what the memory was for. The change is not guessed: smaller
budgets are planned for until a plan comes out that takes less than the one in force.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ithaca.errors import IthacaError, MemoryPlanError
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.plan import Decided, Job, MemoryPlan
from ithaca.planning.search.advice import LIBRARY, Words, explain
from ithaca.planning.search.choose import FREE, choose_plan
from ithaca.planning.terms.memory_terms import Memory, memory_of
from ithaca.quantities import bytes_setting, parse_bytes, show_bytes

# Shares of what the failed plan takes, tried from above.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


class DeviceMemoryError(IthacaError, torch.OutOfMemoryError):
    """The device ran out of memory in a step; the message says what held it and what to change."""


def out_of_memory(
    error: torch.OutOfMemoryError,
    model: nn.Module,
    sizes: ModelSizes,
    job: Job,
    plan: MemoryPlan,
    host: int,
    words: Words = LIBRARY,
    given: MemoryPlan | Decided = FREE,
) -> DeviceMemoryError:
    """The same error with an account of the step it happened in; one that has its account is given back. `given`: what was
    not left to the plan."""
    if isinstance(error, DeviceMemoryError):
        return error
    memory = memory_of(sizes, job, plan)
    blame = memory.largest()
    first = str(error).strip().splitlines()[0]
    return DeviceMemoryError(
        f"{first}\n{_by_kind(model)}\nThe plan in force ({plan.summary()}) counts on {show_bytes(memory.device_bytes)} "
        f"at the {memory.moment}:\n{explain(memory.terms, memory.device_bytes)}\n"
        f"The largest term is {blame.name!r}, {show_bytes(blame.device_bytes)} ({blame.formula}). "
        f"{_change(sizes, job, memory, host, words, given)}"
    )


def _by_kind(model: nn.Module) -> str:
    """What is held now: weights and gradients as they are, the rest as the allocator counts it."""
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


def _change(sizes: ModelSizes, job: Job, memory: Memory, host: int, words: Words, given: MemoryPlan | Decided) -> str:
    # What this device has did not do, whatever the plan counts on.
    words = words._replace(device=lambda _: "a larger device")
    # A plan that was given whole goes by no budget.
    decided, first = (FREE, f"{words.free(())} and ") if isinstance(given, MemoryPlan) else (given, "")
    for share in SHARES:
        budget = bytes_setting(share * memory.device_bytes)
        limit = cast(int, parse_bytes(budget))
        try:
            smaller = choose_plan(sizes, job, limit, host, decided, words=words)
        except MemoryPlanError as refused:
            return str(refused)
        saved = memory.device_bytes - memory_of(sizes, job, smaller).device_bytes
        if saved > 0:
            return f"The smallest change: {first}{words.budget(budget)} takes {show_bytes(saved)} less ({smaller.summary()})"
    return "Shorter sequences or a larger sp would take less"
