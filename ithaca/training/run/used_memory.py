"""Memory that a rank uses, by kind: weights, optimizer state, the peak of all the rest, and the process on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ithaca.constants import GIB
from ithaca.mesh import Mesh

# Above this share of the device's memory the next longer batch may not fit.
NEARLY_FULL = 0.75


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds between steps: weights and, after the first step, optimizer state."""
    state = [x for states in optimizer.state.values() for x in states.values() if torch.is_tensor(x)]
    return {"weights": sum(map(_local_bytes, model.parameters())), "optimizer": sum(map(_local_bytes, state))}


def _local_bytes(x: Tensor) -> int:
    local: Tensor = getattr(x, "_local_tensor", x)
    return local.nbytes


def memory_by_kind(held: Mapping[str, int], mesh: Mesh) -> dict[str, float]:
    """Return this rank's memory in GiB: `held`, and the device's peak since the last call beyond `held`."""
    kinds = dict(held)
    if mesh.device.type == "cuda":
        # One call for all figures, as this runs in every step.
        figures: Any = torch.cuda.memory_stats_as_nested_dict(mesh.device)
        peak, reserved = (figures[kind]["all"]["peak"] for kind in ("allocated_bytes", "reserved_bytes"))
        rest = max(0, peak - sum(kinds.values()))
        kinds |= {"gradients and activations": rest, "peak": peak, "reserved": reserved}
        torch.cuda.reset_peak_memory_stats(mesh.device)
    kinds["process"] = psutil.Process().memory_info().rss
    return {name: round(size / GIB, 3) for name, size in kinds.items()}


def full_share(memory: Mapping[str, float], mesh: Mesh) -> float:
    """Return the share of the device's memory that the peak took; on the CPU, of the host's memory."""
    if mesh.device.type == "cuda":
        return memory["reserved"] * GIB / torch.cuda.get_device_properties(mesh.device).total_memory
    return memory["process"] * GIB * mesh.local_ranks / psutil.virtual_memory().total
