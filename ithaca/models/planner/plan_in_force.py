"""The plan in force: the user's, or one made at the first batch and again for longer batches.

The memory model is `planning/`'s; this file gives it the sizes of this model, this mesh and this machine. All ranks have
the same numbers but for free host memory: they take the least of those, so that all ranks choose the same plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ithaca.constants import GIB
from ithaca.handle import handle_of
from ithaca.memory.head_loss import LossSpec, in_place_kernel
from ithaca.memory.offload import HostStore
from ithaca.mesh import Mesh
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.out_of_memory import out_of_memory
from ithaca.models.support import ModelParts, base_model
from ithaca.planning.memory_plan import UNDECIDED, Decided, Job, MemoryPlan, Optimizer, Weights
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.search.phrases import LIBRARY, Phrases
from ithaca.planning.search.request import LEAST_HEADROOM
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.planning.terms.terms_table import explain
from ithaca.sequence.layout import SequenceLayout
from ithaca.state.optimizer.on_host import held_on_host

# Share of the memory that a plan may use; the rest is for fragmentation and for other processes.
SHARE = 0.75
# The largest share of a device or a host that advice names.
MOST = 1 - LEAST_HEADROOM
# More rows than a batch has: tokens and rows travel in one integer.
_ROWS = 2**20

logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class AutoMemory:
    """The plans of one model on one mesh. `budget`: bytes of device memory that a rank may use, weights included.

    `given`: the user's whole plan, or the user's decisions. `host_budget`: bytes that a rank may use on the host; None for
    a share of the free ones. `held` returns the bytes of the rank's state on the host, `store` takes saved tensors.
    """

    sizes: ModelSizes
    mesh: Mesh
    job: Job
    budget: int
    model: nn.Module = field(repr=False)
    given: MemoryPlan | Decided = UNDECIDED
    host_budget: int | None = None
    plan: MemoryPlan | None = None
    planned: int = 0
    phrases: Phrases = LIBRARY
    held: Callable[[], int] = int
    store: HostStore | None = None

    @classmethod
    def of(
        cls,
        parts: ModelParts,
        mesh: Mesh,
        job: Job,
        budget: int | None,
        given: MemoryPlan | Decided,
        host_budget: int | None = None,
    ) -> AutoMemory:
        budget = int(SHARE * _device_memory(mesh)) if budget is None else budget
        held = partial(held_on_host, parts.model)
        return cls(loaded_sizes(parts), mesh, job, budget, parts.model, given, host_budget, held=held)

    def plan_for(self, layout: SequenceLayout) -> MemoryPlan | None:
        """Return a new plan if this batch needs more memory than any before it; None if the plan in force remains."""
        adds = not self.job.accumulate and any(p.grad is not None for p in self.model.parameters())
        batch, tokens, adds = self._largest(layout, adds)
        if tokens <= self.planned and not adds:
            return None
        if tokens > self.planned:
            self.job = replace(self.job, length=tokens // batch, batch=batch)
        self.job = replace(self.job, accumulate=self.job.accumulate or adds)
        self.planned = max(tokens, self.planned)
        if isinstance(self.given, MemoryPlan):
            self.plan = self.given
            return None
        host, phrases = self._agree(), self._here(self.phrases)
        self.plan = plan = plan_or_refuse(self.sizes, self.job, self.budget, host, self.given, phrases=phrases)
        if self.mesh.rank == 0:
            memory = memory_of(self.sizes, self.job, plan)
            logger.info("memory: %s\n%s", plan.summary(), explain(memory.terms, self.budget, host))
        return plan

    def check_fits(self, length: int, *, sp: int, dp: int, accumulate: bool, phrases: Phrases) -> None:
        """Raise the error that a row of `length` tokens would raise with these degrees."""
        if isinstance(self.given, Decided):
            host = self._agree()
            job = replace(self.job, length=length, batch=1, sp=sp, dp=dp, accumulate=accumulate)
            plan_or_refuse(self.sizes, job, self.budget, host, self.given, phrases=self._here(phrases))

    @property
    def _group(self) -> dist.ProcessGroup:
        """The ranks that must choose the same plan: they gather weights together, or exchange heads."""
        return self.mesh.world_group if self.job.weights == "shard" else self.mesh.sp_group

    def _largest(self, layout: SequenceLayout, adds: bool) -> tuple[int, int, bool]:
        """Return the rows and tokens of the rank with most tokens, and True if any rank adds to gradients.

        Ranks of a sequence group have the same batch; other groups may have shorter rows.
        """
        batch, tokens = layout.batch, layout.batch * layout.padded
        if isinstance(self.given, MemoryPlan) or self.job.weights != "shard" or self.mesh.dp == 1:
            return batch, tokens, adds
        # All ranks take part where weights are sharded. The host group spares a wait for the device.
        most = torch.tensor([tokens * _ROWS + batch, int(adds)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.host_group)
        both, adding = most.tolist()
        return both % _ROWS, both // _ROWS, bool(adding)

    def _agree(self) -> int:
        """Return the host memory that every rank may use; the budget and the loss kernel become what all ranks have."""
        if self.mesh.device.type != "cuda":
            return 0
        least = torch.tensor([self._host(), self.budget, int(self.job.loss_in_place)], device=self.mesh.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        host, self.budget, in_place = least.tolist()
        self.job = replace(self.job, loss_in_place=bool(in_place))
        return int(host)

    def _host(self) -> int:
        """Return the host memory that this rank may use."""
        return host_share(self._host_there(), self.host_budget)

    def _host_there(self) -> int:
        """Return this rank's part of the host's memory."""
        # The rank's own state there is no longer free, but the plan counts it again.
        held = self.held() + (0 if self.store is None else self.store.pinned)
        return psutil.virtual_memory().available // self.mesh.local_ranks + held

    def _here(self, phrases: Phrases) -> Phrases:
        """Return `phrases` with the whole amounts that this machine needs: a plan uses a share of them."""
        there, device = self._host_there(), more_device(_device_memory(self.mesh), phrases.budget)

        def host(gib: int) -> str:
            if phrases.host is not None and gib * GIB <= MOST * there:
                return phrases.host(gib)
            return f"{math.ceil(gib * self.mesh.local_ranks / SHARE)} GiB of free host memory"

        return phrases._replace(host=host if self.mesh.device.type == "cuda" else None, device=device)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Return the error with an account of the plan in force."""
        if self.plan is None:
            return error
        host = self._host() if self.mesh.device.type == "cuda" else 0
        phrases, given = self._here(self.phrases), self.given
        return out_of_memory(error, self.model, self.sizes, self.job, self.plan, host, phrases, given)


def host_share(there: int, budget: int | None) -> int:
    """Return the bytes that a rank may use of `there` bytes of the host: the budget, but no more than `MOST` of them."""
    return int(SHARE * there) if budget is None else min(budget, int(MOST * there))


def more_device(there: int, budget: Callable[[str], str]) -> Callable[[int], str]:
    """Return a function that names a way to more GiB of device memory: a larger share of `there` bytes, or a device."""

    def device(gib: int) -> str:
        return budget(f"{gib}GiB") if gib * GIB <= MOST * there else f"a device of {math.ceil(gib / SHARE)} GiB"

    return device


def planner_of(model: nn.Module) -> AutoMemory | None:
    """Return the planner of a parallelized model; None if memory is left to autograd."""
    handle = handle_of(model)
    return None if handle is None else handle.part(AutoMemory)


def job_of(
    model: nn.Module,
    mesh: Mesh,
    weights: Weights,
    optimizer: Optimizer,
    *,
    fused: bool,
    compute_dtype: torch.dtype | None,
    replicas: int = 1,
    on_host: bool = False,
) -> Job:
    """Return the job as far as it is known before the first batch. `on_host`: weights, gradients and optimizer state."""
    width, trained = base_width(model), trained_width(model)
    return Job(
        length=1,
        sp=mesh.sp,
        dp=mesh.dp,
        weights=weights if mesh.world > 1 or compute_dtype is not None or on_host else "none",
        replicas=replicas,
        weight_bytes=width,
        compute_bytes=width if compute_dtype is None else compute_dtype.itemsize,
        gradient_bytes=trained,
        adapter_bytes=trained if compute_dtype is None else compute_dtype.itemsize,
        optimizer=optimizer,
        fused=fused,
        loss_in_place=fused and in_place_kernel(mesh.device, _expected_spec(base_model(model))) is not None,
        weights_on_host=on_host,
        gradients_on_host=on_host,
        optimizer_on_host=on_host,
    )


def _expected_spec(base: PreTrainedModel) -> LossSpec:
    """Return the logits' scale by the config's usual names, for an estimate of memory; `logits.py` reads the real one."""
    config: Any = base.config.get_text_config()
    named = [getattr(config, key, None) for key in ("logit_scale", "logits_scaling")]
    return LossSpec(scale=next((float(value) for value in named if value), 1.0))


def base_width(model: nn.Module) -> int:
    """Return the bytes of a value of the model's weights."""
    return next(p.element_size() for p in model.parameters() if p.is_floating_point())


def trained_width(model: nn.Module) -> int:
    """Return the bytes of a trained value: adapters are often in a wider dtype than the weights they adapt."""
    return next((p.element_size() for p in model.parameters() if p.requires_grad), base_width(model))


def _device_memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return torch.cuda.mem_get_info(mesh.device)[1]
    return psutil.virtual_memory().total // mesh.local_ranks
