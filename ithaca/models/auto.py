"""`memory="auto"`: the plan that fits, made when the first batch shows how long sequences are, and again for longer ones.

The one model of memory is `planning/`'s; here it is told about this model, this mesh and this machine. All ranks see
the same numbers but for free host memory, so the smallest of those is taken and all ranks choose alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ithaca.mesh import Mesh
from ithaca.planning.advice import explain
from ithaca.planning.choose import choose_plan
from ithaca.planning.memory import memory_of
from ithaca.planning.plan import Job, MemoryPlan, Optimizer, Weights
from ithaca.planning.sizes import ModelSizes
from ithaca.sequence.layout import SequenceLayout

# What is left free on the device, for fragmentation and whatever else runs there.
SHARE = 0.75

logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class AutoMemory:
    """Plans for one model on one mesh. `budget` is bytes of device memory a rank may use, weights and all."""

    sizes: ModelSizes
    mesh: Mesh
    job: Job
    budget: int
    parameters: list[nn.Parameter] = field(repr=False)
    planned: int = 0

    @classmethod
    def of(cls, model: nn.Module, base: PreTrainedModel, mesh: Mesh, job: Job, budget: int | None) -> AutoMemory:
        parameters = list(model.parameters())
        return cls(_sizes(base, parameters), mesh, job, _device_memory(mesh) if budget is None else budget, parameters)

    def plan_for(self, layout: SequenceLayout) -> MemoryPlan | None:
        """A plan if this batch needs more than any before, else None: the one in force will do."""
        tokens = layout.batch * layout.padded
        adds = not self.job.accumulate and any(p.grad is not None for p in self.parameters)
        if tokens <= self.planned and not adds:
            return None
        if tokens > self.planned:
            self.job = replace(self.job, length=layout.padded, batch=layout.batch)
        self.job = replace(self.job, accumulate=self.job.accumulate or adds)
        host = _host_memory(self.mesh)
        plan = choose_plan(self.sizes, self.job, self.budget, host)
        self.planned = max(tokens, self.planned)
        if self.mesh.rank == 0:
            memory = memory_of(self.sizes, self.job, plan)
            logger.info("memory: %s\n%s", plan.summary(), explain(memory.terms, self.budget, host))
        return plan


def job_of(
    model: nn.Module,
    mesh: Mesh,
    weights: Weights,
    optimizer: Optimizer,
    *,
    fused: bool,
    compute_dtype: torch.dtype | None,
) -> Job:
    """What is known of a step before its first batch."""
    width = next(p.element_size() for p in model.parameters() if p.is_floating_point())
    return Job(
        length=1,
        sp=mesh.sp,
        dp=mesh.dp,
        weights=weights if mesh.world > 1 or compute_dtype is not None else "none",
        weight_bytes=width,
        compute_bytes=width if compute_dtype is None else compute_dtype.itemsize,
        gradient_bytes=width,
        optimizer=optimizer,
        fused=fused,
    )


def _sizes(base: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> ModelSizes:
    """The model's sizes; what is trained beside frozen weights is counted as adapters are."""
    sizes = ModelSizes.from_config(base.config.to_dict())
    trained = {p.requires_grad: 0 for p in parameters}
    for p in parameters:
        trained[p.requires_grad] += p.numel()
    return replace(sizes, adapters=trained.get(True, 0)) if trained.get(False) else sizes


def _device_memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(mesh.device)[1])
    return int(SHARE * psutil.virtual_memory().total / mesh.local_ranks)


def _host_memory(mesh: Mesh) -> int:
    """This rank's share of the host's free memory; none where the host is the device."""
    if mesh.device.type != "cuda":
        return 0
    free = torch.tensor([int(SHARE * psutil.virtual_memory().available / mesh.local_ranks)], device=mesh.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=mesh.world_group)
    return int(free.item())
