"""`ithaca rehearse`: one rank of a job on the one device here, beside what the plan said of it.

The plan is made for the whole model as training would make it; then its step runs: all layers, or a few of them with
the rest derived (`rehearse_cut`): seconds from each layer's own, bytes from runs with more layers and no attention.
Time is the device's own; what travels between ranks is counted, and its time is predicted from the link's speed.
Without a GPU tensors are fake and memory alone is reported.

Invariant: both sides of a comparison are of the same job and plan, and of the same things. Bytes allocated have no gaps,
so what the plan sets aside for those is not compared with them but with what the allocator reserved. The plan is the one
for the job's own device, which `ithaca plan` shows; where it runs on the CPU's operators, which keep more, it is compared
by what it says of those, without the kernels' workspace, as no trace sees that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from ithaca.config.schema import Run
from ithaca.constants import GIB
from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.files.pretrained import add_adapters, empty_model
from ithaca.models.layers.fuse import compiled_once
from ithaca.models.planner.loaded_sizes import sizes_of
from ithaca.models.planner.plan_in_force import MOST, SHARE, host_share, job_of, more_device
from ithaca.models.support import base_model
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.plan import Decided, Job, MemoryPlan
from ithaca.planning.search.advice import Words, typed_free
from ithaca.planning.search.choose import choose_plan
from ithaca.planning.terms.memory_terms import Memory, Term, memory_of
from ithaca.planning.terms.step_time import step_time
from ithaca.planning.terms.traffic import Machine, exchange_s, exchanged
from ithaca.rehearse.extrapolate import MORE, Trial, Trials, choose_trials, cut_plan, derive, derive_clocked
from ithaca.rehearse.lone_group import alone
from ithaca.rehearse.measured_step import Figures, Part, measure
from ithaca.rehearse.memory_trace import Kinds
from ithaca.rehearse.phases import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ithaca.state.weights.placement import leaves_device
from ithaca.training.degrees import StageDegrees, TypedRanks, another_launcher
from ithaca.training.schedule import apply_stages
from ithaca.training.session import precision_of

# A step longer than this is cut to few layers, unless told: seconds as predicted, layers where there is no clock.
WHOLE_S, WHOLE_LAYERS = 60.0, 8
_WORKSPACE = "kernel workspace"
_KINDS = {"weights": "weights", "optimizer state": "optimizer", "gradients": "gradients"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A rehearsal: stage `stage` of `run` on `machine`, as rank `rank`.

    `layers`: how many more a later run has than the first; None for all in one run, 0 for what suits. `fake`: without a
    GPU, tensors that take no memory and no time. `typed`: how another number of ranks is asked for.
    """

    run: Run
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
    """What the plan says, given `budgets` of device and host.

    `memory` is of the operators that run here, `target` of the job's own device: the same where there is a GPU.
    `device_bytes` are those allocated, without gaps. `compute_s`: of a step without what travels between ranks; `step_s`:
    with what shows of it.
    """

    job: Job
    plan: MemoryPlan
    budgets: tuple[int, int]
    memory: Memory
    target: Memory
    device_bytes: int
    kinds: Kinds
    compute_s: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One of a step's all-to-alls over all layers and rows: bytes this rank sends to others, and predicted seconds."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Everything a rehearsal gives; `derived` where not all layers ran, with the runs for bytes alone as `bare`.

    Seconds are of a whole optimizer step.
    """

    length: int
    rows: int
    degrees: tuple[int, int, int]
    predicted: Predicted
    figures: tuple[Figures, ...]
    bare: tuple[Figures, ...]
    derived: bool
    seconds: dict[str, float]
    peaks: dict[str, int]
    kinds: Kinds
    reserved: int
    pinned: int
    host: int
    exchanges: tuple[Exchange, ...]
    link: str

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def compute_s(self) -> float | None:
        return sum(self.seconds.values()) if self.seconds else None

    @property
    def step_s(self) -> float | None:
        """Computing as measured, and what shows of the ranks' traffic as predicted."""
        said = self.predicted
        if self.compute_s is None or said.step_s is None or said.compute_s is None:
            return self.compute_s
        return self.compute_s + said.step_s - said.compute_s

    @property
    def memory_error(self) -> float:
        """By how much of the rehearsed peak the plan was too high."""
        return self.predicted.device_bytes / self.peak - 1

    @property
    def time_error(self) -> float | None:
        if self.compute_s is None or self.predicted.compute_s is None:
            return None
        return self.predicted.compute_s / self.compute_s - 1


def rehearse(asked: Asked, progress: Callable[[str], None] = lambda text: None) -> Rehearsed:
    """Run the rank, or a few layers of it."""
    gpu = torch.cuda.is_available()
    if asked.run.memory.plan != "auto":
        raise UnsupportedError("memory.plan='none' keeps everything and has no plan to compare with: use 'auto'")
    if gpu and asked.cap is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked.cap / total))
    with alone(asked.world, asked.rank), compiled_once():
        number = asked.stage % len(asked.run.stages)
        config = apply_stages(asked.config, asked.run.stages[: number + 1], random=True)
        heads = int(config.get_text_config().num_attention_heads)
        sp = StageDegrees(asked.run.mesh, asked.run.stages, asked.world, heads, asked.typed).sp(number)
        mesh = init_mesh(sp=sp, device=None if gpu else "cpu")
        part = part_of(asked, number, config, mesh)
        sizes, said = predict(asked, part, mesh)
        progress(f"plan: {said.plan.summary()}")
        trials = _trials(asked, sizes, said, bare=not part.fake)
        layer_s = (said.compute_s or 0.0) / part.rows / len(sizes.layers)

        def run(trial: Trial, *, bare: bool = False) -> Figures:
            how = " without attention" if bare else ""
            progress(f"running {len(trial.layers)} of {len(sizes.layers)} layers{how}")
            return measure(part, trial.layers, cut_plan(said.plan, trial.layers), mesh, bare=bare, layer_s=layer_s)

        # Fake attention takes no time: there one sort of run serves for all.
        separate = trials.derived and not part.fake
        figures = tuple(run(trial) for trial in (trials.runs[:1] if separate else trials.runs))
        bare = tuple(run(trial, bare=True) for trial in trials.runs) if separate else ()
        return _whole(part, mesh, sizes, said, trials, figures, bare, asked.machine)


def part_of(asked: Asked, number: int, config: Any, mesh: Mesh) -> Part:
    """What every rank runs in stage `number`. Fake tensors stand for a GPU's, so they have its precision."""
    run, stage = asked.run, asked.run.stages[number]
    fake = mesh.device.type == "cpu" and asked.fake
    weights, compute = precision_of(run, torch.device("cuda") if fake else mesh.device)
    return Part(
        config=config,
        length=stage.length,
        rows=stage.batch // mesh.dp,
        weights=weights,
        compute=compute,
        optimizer=run.optimizer,
        on_host=run.memory.on_host,
        away=run.memory.on_host == "everything" if fake else leaves_device(mesh, run.memory.on_host),
        replicas=run.mesh.replicas,
        kernel=run.model.kernel,
        lora=run.lora,
        seed=run.seed,
        fake=fake,
    )


def predict(asked: Asked, part: Part, mesh: Mesh) -> tuple[ModelSizes, Predicted]:
    """The plan that training would choose with this machine's memory, and what it says."""
    model: Any = empty_model(part.config, dtype=part.weights)
    if part.lora is not None:
        model = add_adapters(model, part.lora, seed=part.seed)
    sizes = sizes_of(model, base_model(model))
    gpu = mesh.device.type == "cuda"
    job = job_of(
        model,
        mesh,
        "shard",
        part.optimizer.name,
        fused=True,
        compute_dtype=part.compute,
        replicas=part.replicas,
        on_host=part.away,
    )
    planned = replace(job, length=part.length, accumulate=part.rows > 1)
    budgets = _budgets(asked, gpu=gpu)
    decided = Decided.of(asked.run.memory.decided)
    plan = choose_plan(sizes, planned, *budgets, decided, words=_typed(asked, gpu=gpu))
    target = memory_of(sizes, planned, plan)
    # Without a GPU nothing is compiled.
    job = planned if gpu else replace(planned, fused=False)
    memory = target if gpu else memory_of(sizes, job, plan)
    terms = [term for term in memory.allocated if gpu or term.name != _WORKSPACE]
    compute = step = None
    if gpu:
        compute = step_time(sizes, job, plan, asked.machine.instant, rows=part.rows).seconds
        step = step_time(sizes, job, plan, asked.machine, rows=part.rows).seconds
    total = sum(term.device_bytes for term in terms)
    return sizes, Predicted(job, plan, budgets, memory, target, total, kinds_of(terms), compute, step)


def _typed(asked: Asked, *, gpu: bool) -> Words:
    """Changes as they are typed after `ithaca rehearse`; on a GPU it is this machine's own host memory that is short."""
    gpus, budget = asked.machine.gpus, "memory.budget={}".format

    def host(gib: int) -> str:
        if gib * GIB <= MOST * _host_there(asked, gpu=gpu):
            return f"memory.host_budget={gib}GiB"
        if gpu:
            return f"{math.ceil(gib / SHARE)} GiB of free host memory"
        return f"--host-memory {math.ceil(gib * gpus / SHARE)}GiB"

    return Words(
        "memory.on_host=everything",
        host,
        lambda sp: f"--world {max(asked.world, sp)} mesh.sp={sp}",
        "--length {}".format,
        budget,
        more_device(_most(asked, gpu=gpu), budget),
        typed_free,
    )


def _budgets(asked: Asked, *, gpu: bool) -> tuple[int, int]:
    """Device and host bytes of one rank: what the run sets, else three quarters, of what it has there and there is here."""
    most = _most(asked, gpu=gpu)
    device = min(asked.run.memory.budget or int(SHARE * most), most)
    return device, host_share(_host_there(asked, gpu=gpu), asked.run.memory.host_budget)


def _host_there(asked: Asked, *, gpu: bool) -> int:
    there = asked.machine.host_memory // asked.machine.gpus
    return min(there, psutil.virtual_memory().available) if gpu else there


def _most(asked: Asked, *, gpu: bool) -> int:
    """Bytes of the device, or those of it that may be used."""
    here = torch.cuda.mem_get_info()[1] if gpu else asked.machine.device.memory
    return min(here, asked.cap or here)


def kinds_of(terms: Sequence[Term]) -> Kinds:
    totals = dict.fromkeys(("weights", "optimizer", "gradients", "working"), 0)
    for term in terms:
        totals[_KINDS.get(term.name, "working")] += term.device_bytes
    return Kinds(**totals)


def _trials(asked: Asked, sizes: ModelSizes, said: Predicted, *, bare: bool) -> Trials:
    more: int | None = asked.layers or MORE
    if asked.layers is None:
        more = None
    elif asked.layers == 0:
        whole = len(sizes.layers) <= WHOLE_LAYERS if said.compute_s is None else said.compute_s <= WHOLE_S
        more = None if whole else MORE
    return choose_trials(said.plan, sizes.kinds, more, bare=bare)


def _whole(
    part: Part,
    mesh: Mesh,
    sizes: ModelSizes,
    said: Predicted,
    trials: Trials,
    figures: tuple[Figures, ...],
    bare: tuple[Figures, ...],
    machine: Machine,
) -> Rehearsed:
    first = figures[0]

    def total(value: Callable[[Figures], float]) -> float:
        return derive(trials, [value(each) for each in bare or figures], value(first))

    peaks = {phase: int(total(lambda f, p=phase: f.peaks[p])) for phase in PHASES}  # type: ignore[misc]
    worst = max(peaks, key=lambda phase: peaks[phase])
    kinds = {name: int(total(lambda f, n=name: getattr(f.kinds[worst], n))) for name in asdict(first.kinds[worst])}  # type: ignore[misc]
    seconds: dict[str, float] = {}
    if first.seconds:
        seconds = {OPTIMIZER: total(lambda f: f.seconds[OPTIMIZER])}
        for phase in (FORWARD, BACKWARD):
            seconds[phase] = part.rows * derive_clocked(trials, first.seconds[phase], first.layer_s[phase])
        seconds = {phase: seconds[phase] for phase in PHASES}
    return Rehearsed(
        length=part.length,
        rows=part.rows,
        degrees=(mesh.dp, mesh.ring, mesh.sp),
        predicted=said,
        figures=figures,
        bare=bare,
        derived=trials.derived,
        seconds=seconds,
        peaks=peaks,
        kinds=Kinds(**kinds),
        # Gaps follow no line: the widest that was seen.
        reserved=max(peaks.values()) + max(each.reserved - max(each.peaks.values()) for each in (*figures, *bare)),
        pinned=int(total(lambda f: f.pinned)),
        host=int(total(lambda f: f.host)),
        exchanges=exchanges_of(sizes, said, part.rows, machine),
        link=_link(said.job, machine),
    )


def exchanges_of(sizes: ModelSizes, said: Predicted, rows: int, machine: Machine) -> tuple[Exchange, ...]:
    """The four exchanges of a layer, summed over layers and rows."""
    if said.job.sp == 1:
        return ()
    wires = [exchanged(sizes, said.job, mode, said.plan.head_groups) for mode in said.plan.layers]
    names = {
        "q, k, v": "forward_in",
        "output": "forward_out",
        "output's gradient, and what backward brings again": "backward_in",
        "gradients of q, k, v": "backward_out",
    }
    return tuple(
        Exchange(
            name,
            rows * sum(getattr(wire, key) for wire in wires),
            rows * sum(exchange_s(machine, said.job, getattr(wire, key)) for wire in wires),
        )
        for name, key in names.items()
    )


def _link(job: Job, machine: Machine) -> str:
    inside = f"{machine.link.name}, {machine.link.speed:g} GB/s"
    if job.sp <= machine.gpus:
        return inside
    return f"{inside}; between nodes {machine.network.name}, {machine.network.speed:g} GB/s"
