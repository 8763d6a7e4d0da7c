"""The prediction of a rehearsal: the plan that training would choose, its memory and its time.

The plan is for the job's own device, as `ithaca plan` shows it. A rehearsal on the CPU runs the CPU's operators, which
keep more: `Predicted.memory` is of those operators, `Predicted.target` of the job's own device. Without a GPU nothing is
compiled, and kernels' workspace is left out, because a trace does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from ithaca.config.schema import RunSettings
from ithaca.constants import GIB
from ithaca.mesh import Mesh
from ithaca.models.files.pretrained import add_adapters, empty_model
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.plan_in_force import MOST, SHARE, host_share, job_of, more_device
from ithaca.models.support import ModelParts
from ithaca.planning.memory_plan import Decided, Job, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.search.phrases import RUN_FILE, Phrases
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.planning.terms.step_memory import StepMemory, Term
from ithaca.planning.terms.step_time import step_time
from ithaca.planning.terms.traffic import Machine
from ithaca.rehearse.cut_model import RankJob
from ithaca.rehearse.memory_trace import Kinds
from ithaca.training.degrees import TypedRanks, another_launcher

_WORKSPACE = "kernel workspace"
_KINDS = {"weights": "weights", "optimizer state": "optimizer", "gradients": "gradients"}


@dataclass(frozen=True, slots=True)
class RehearsalRequest:
    """A rehearsal to run: stage `stage` of `run` on `machine`, as rank `rank`.

    `layers`: how many more a later run has than the first; None for all in one run, 0 to choose. `cap`: bytes of the device
    that may be used. `fake`: without a GPU, on fake tensors. `typed`: the words that ask for another number of ranks.
    """

    run: RunSettings
    config: Any
    machine: Machine
    rank: int = 0
    stage: int = -1
    layers: int | None = 0
    cap: int | None = None
    fake: bool = True
    typed: TypedRanks = another_launcher

    @property
    def world(self) -> int:
        return self.machine.world


@dataclass(frozen=True, slots=True)
class Predicted:
    """The plan and its figures, given `budgets` in bytes of device and host.

    `memory` is of the operators that run here, `target` of the job's own device: the same where there is a GPU.
    `device_bytes`: allocated ones, without gaps. `compute_s`: seconds of a step without traffic between ranks; `step_s`:
    with the traffic that computing does not overlap.
    """

    job: Job
    plan: MemoryPlan
    budgets: tuple[int, int]
    memory: StepMemory
    target: StepMemory
    device_bytes: int
    kinds: Kinds
    compute_s: float | None
    step_s: float | None


def predict(request: RehearsalRequest, rank_job: RankJob, mesh: Mesh) -> tuple[ModelSizes, Predicted]:
    """Choose the plan as training would, for the whole model and this machine's memory; return sizes and figures."""
    model: Any = empty_model(rank_job.config, dtype=rank_job.weights)
    if rank_job.lora is not None:
        model = add_adapters(model, rank_job.lora, seed=rank_job.seed)
    sizes = loaded_sizes(ModelParts.of(model))
    gpu = mesh.device.type == "cuda"
    job = job_of(
        model,
        mesh,
        "shard",
        rank_job.optimizer.name,
        fused=True,
        compute_dtype=rank_job.compute,
        replicas=rank_job.replicas,
        on_host=rank_job.away,
    )
    planned = replace(job, length=rank_job.length, accumulate=rank_job.rows > 1)
    budgets = _budgets(request, gpu=gpu)
    decided = Decided.of(request.run.memory.decided)
    plan = plan_or_refuse(sizes, planned, *budgets, decided, phrases=_typed(request, gpu=gpu))
    target = memory_of(sizes, planned, plan)
    # Without a GPU nothing is compiled.
    job = planned if gpu else replace(planned, fused=False)
    memory = target if gpu else memory_of(sizes, job, plan)
    terms = [term for term in memory.allocated if gpu or term.name != _WORKSPACE]
    compute = step = None
    if gpu:
        compute = step_time(sizes, job, plan, request.machine.instant, rows=rank_job.rows).seconds
        step = step_time(sizes, job, plan, request.machine, rows=rank_job.rows).seconds
    total = sum(term.device_bytes for term in terms)
    return sizes, Predicted(job, plan, budgets, memory, target, total, kinds_of(terms), compute, step)


def _typed(request: RehearsalRequest, *, gpu: bool) -> Phrases:
    """Return the words of an advice, as typed after `ithaca rehearse`."""
    gpus = request.machine.gpus

    def host(gib: int) -> str:
        if gib * GIB <= MOST * _host_memory(request, gpu=gpu):
            return f"memory.host_budget={gib}GiB"
        # On a GPU this machine's own host memory is short, which no option changes.
        if gpu:
            return f"{math.ceil(gib / SHARE)} GiB of free host memory"
        return f"--host-memory {math.ceil(gib * gpus / SHARE)}GiB"

    return RUN_FILE._replace(
        host=host,
        sp=lambda sp: f"--world {max(request.world, sp)} mesh.sp={sp}",
        device=more_device(_device_memory(request, gpu=gpu), RUN_FILE.budget),
    )


def _budgets(request: RehearsalRequest, *, gpu: bool) -> tuple[int, int]:
    """Return device and host bytes of one rank: the run's budgets or a share of the memory, within what exists here."""
    most = _device_memory(request, gpu=gpu)
    device = min(request.run.memory.budget or int(SHARE * most), most)
    return device, host_share(_host_memory(request, gpu=gpu), request.run.memory.host_budget)


def _host_memory(request: RehearsalRequest, *, gpu: bool) -> int:
    """Return the host bytes of one rank of the job, at most those that are free here."""
    own = request.machine.host_memory // request.machine.gpus
    return min(own, psutil.virtual_memory().available) if gpu else own


def _device_memory(request: RehearsalRequest, *, gpu: bool) -> int:
    """Return the bytes of the device that may be used."""
    here = torch.cuda.mem_get_info()[1] if gpu else request.machine.device.memory
    return min(here, request.cap or here)


def kinds_of(terms: Sequence[Term]) -> Kinds:
    """Return the plan's terms added up by kind."""
    totals = dict.fromkeys(("weights", "optimizer", "gradients", "working"), 0)
    for term in terms:
        totals[_KINDS.get(term.name, "working")] += term.device_bytes
    return Kinds(**totals)
