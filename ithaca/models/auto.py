"""`memory="auto"`: the plan that fits, made when the first batch shows how long sequences are, and again for longer ones.

The one model of memory is `planning/`'s; here it is told about this model, this mesh and this machine. All ranks see
the same numbers but for free host memory, so the smallest of those is taken and all ranks choose alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ithaca.mesh import Mesh
from ithaca.planning.advice import explain
from ithaca.planning.choose import choose_plan
from ithaca.planning.memory import memory_of
from ithaca.planning.plan import Job, MemoryPlan, Weights
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
    weights: Weights
    weight_bytes: int
    budget: int
    planned: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, base: PreTrainedModel, mesh: Mesh, weights: Weights, budget: int | None
    ) -> AutoMemory:
        sizes = ModelSizes.from_config(base.config.to_dict())
        width = next(p.element_size() for p in model.parameters() if p.is_floating_point())
        return cls(sizes, mesh, weights, width, _device_memory(mesh) if budget is None else budget)

    def plan_for(self, layout: SequenceLayout) -> MemoryPlan | None:
        """A plan if this batch is larger than any before, else None: the one in force will do."""
        tokens = layout.batch * layout.padded
        if tokens <= self.planned:
            return None
        job = Job(
            length=layout.padded,
            batch=layout.batch,
            sp=self.mesh.sp,
            dp=self.mesh.dp,
            weights=self.weights if self.mesh.world > 1 else "none",
            weight_bytes=self.weight_bytes,
            compute_bytes=self.weight_bytes,
            gradient_bytes=self.weight_bytes,
            # torch's AdamW keeps two states in the precision of the weights.
            optimizer="bf16_sr" if self.weight_bytes == 2 else "adamw",
            accumulate=True,
        )
        host = _host_memory(self.mesh)
        plan = choose_plan(self.sizes, job, self.budget, host)
        self.planned = tokens
        if self.mesh.rank == 0:
            memory = memory_of(self.sizes, job, plan)
            logger.info("memory: %s\n%s", plan.summary(), explain(memory.terms, self.budget, host))
        return plan


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
