"""`ithaca rehearse`: one rank of a cluster's job on the one device here, beside the plan's figures.

    predict          plan of the whole model, as training would choose it      Predicted
    choose_runs      all layers, or a few of every kind
    measure          the first run, with attention                             seconds of each layer, bytes
                     runs with more layers, without attention                  bytes that a layer adds
    derive           the whole model's step                                    Rehearsed

Seconds are the device's own. Traffic between ranks is counted, and its time predicted from the link's speed. Without a GPU
tensors are fake, and memory alone is reported.

Invariant: both sides of a comparison are of the same job and plan, and count the same bytes. Allocated bytes have no gaps,
so the plan's allowance for gaps is compared with what the allocator reserved, and not with allocated bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.layers.fuse import compiled_once
from ithaca.planning.memory_plan import Job
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.traffic import Machine, exchange_s, exchanged
from ithaca.rehearse.cut_model import RankJob
from ithaca.rehearse.extrapolate import MORE, PartialRun, PartialRuns, choose_runs, cut_plan, derive, derive_timed
from ithaca.rehearse.lone_group import simulated_world
from ithaca.rehearse.measured_step import Figures, measure
from ithaca.rehearse.memory_trace import Kinds
from ithaca.rehearse.phases import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ithaca.rehearse.prediction import Predicted, RehearsalRequest, predict
from ithaca.state.weights.placement import leaves_device
from ithaca.training.degrees import StageDegrees
from ithaca.training.schedule import apply_stages
from ithaca.training.session import precision_of

# Longer steps run few layers unless the request says otherwise: predicted seconds, or layers where there is no GPU.
WHOLE_S, WHOLE_LAYERS = 60.0, 8


@dataclass(frozen=True, slots=True)
class Exchange:
    """One of a step's all-to-alls over all layers and rows: bytes this rank sends to others, and predicted seconds."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Result of a rehearsal; seconds are of a whole optimizer step.

    `derived`: True if not all layers ran. `figures`: runs with attention; `bare`: runs for bytes alone, without it.
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
        """Seconds of a step: computing as measured, and the traffic that it does not overlap as predicted."""
        plan = self.predicted
        if self.compute_s is None or plan.step_s is None or plan.compute_s is None:
            return self.compute_s
        return self.compute_s + plan.step_s - plan.compute_s

    @property
    def memory_error(self) -> float:
        """Excess of the plan over the rehearsed peak, as a share of the peak."""
        return self.predicted.device_bytes / self.peak - 1

    @property
    def time_error(self) -> float | None:
        """Excess of the plan over the measured seconds of computing; None without a clock."""
        if self.compute_s is None or self.predicted.compute_s is None:
            return None
        return self.predicted.compute_s / self.compute_s - 1


def rehearse(request: RehearsalRequest, progress: Callable[[str], None] = lambda text: None) -> Rehearsed:
    """Run the rank, all layers or a few; `progress` is called with a line of text before each run."""
    gpu = torch.cuda.is_available()
    if request.run.memory.plan != "auto":
        raise UnsupportedError("memory.plan='none' keeps everything and has no plan to compare with: use 'auto'")
    if gpu and request.cap is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.cap / total))
    with simulated_world(request.world, request.rank), compiled_once():
        number = request.stage % len(request.run.stages)
        config = apply_stages(request.config, request.run.stages[: number + 1], random=True)
        heads = int(config.get_text_config().num_attention_heads)
        degrees = StageDegrees(request.run.mesh, request.run.stages, request.world, heads, request.typed)
        sp = degrees.sp(number)
        mesh = init_mesh(sp=sp, device=None if gpu else "cpu")
        job = job_of_rank(request, number, config, mesh)
        sizes, predicted = predict(request, job, mesh)
        progress(f"plan: {predicted.plan.summary()}")
        runs = _choose_runs(request, sizes, predicted, bare=not job.fake)
        layer_s = (predicted.compute_s or 0.0) / job.rows / len(sizes.layers)

        def run(part: PartialRun, *, bare: bool = False) -> Figures:
            progress(f"running {len(part.layers)} of {len(sizes.layers)} layers{' without attention' if bare else ''}")
            plan = cut_plan(predicted.plan, part.layers)
            return measure(job, part.layers, plan, mesh, bare=bare, layer_s=layer_s)

        # Attention on fake tensors takes no time, so runs with attention serve for bytes too.
        separate = runs.derived and not job.fake
        figures = tuple(run(part) for part in (runs.runs[:1] if separate else runs.runs))
        bare = tuple(run(part, bare=True) for part in runs.runs) if separate else ()
        return _whole(job, mesh, sizes, predicted, runs, figures, bare, request.machine)


def job_of_rank(request: RehearsalRequest, number: int, config: Any, mesh: Mesh) -> RankJob:
    """Return the work of every rank in stage `number`."""
    run, stage = request.run, request.run.stages[number]
    fake = mesh.device.type == "cpu" and request.fake
    # Fake tensors stand in for a GPU's, so they have its precision.
    weights, compute = precision_of(run, torch.device("cuda") if fake else mesh.device)
    return RankJob(
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


def _choose_runs(request: RehearsalRequest, sizes: ModelSizes, predicted: Predicted, *, bare: bool) -> PartialRuns:
    more = request.layers
    if more == 0:
        quick = len(sizes.layers) <= WHOLE_LAYERS if predicted.compute_s is None else predicted.compute_s <= WHOLE_S
        more = None if quick else MORE
    return choose_runs(predicted.plan, sizes.kinds, more, bare=bare)


def _whole(
    job: RankJob,
    mesh: Mesh,
    sizes: ModelSizes,
    predicted: Predicted,
    runs: PartialRuns,
    figures: tuple[Figures, ...],
    bare: tuple[Figures, ...],
    machine: Machine,
) -> Rehearsed:
    """Return the whole model's figures, derived from those of the runs."""
    first = figures[0]

    def total(value: Callable[[Figures], float]) -> float:
        return derive(runs, [value(each) for each in bare or figures], value(first))

    peaks = {phase: int(total(lambda f, p=phase: f.peaks[p])) for phase in PHASES}  # type: ignore[misc]
    worst = max(peaks, key=lambda phase: peaks[phase])
    kinds = {name: int(total(lambda f, n=name: getattr(f.kinds[worst], n))) for name in asdict(first.kinds[worst])}  # type: ignore[misc]
    seconds: dict[str, float] = {}
    if first.seconds:
        seconds = {
            phase: job.rows * derive_timed(runs, first.seconds[phase], first.layer_s[phase])
            for phase in (FORWARD, BACKWARD)
        }
        seconds[OPTIMIZER] = total(lambda f: f.seconds[OPTIMIZER])
    return Rehearsed(
        length=job.length,
        rows=job.rows,
        degrees=(mesh.dp, mesh.ring, mesh.sp),
        predicted=predicted,
        figures=figures,
        bare=bare,
        derived=runs.derived,
        seconds=seconds,
        peaks=peaks,
        kinds=Kinds(**kinds),
        # The allocator's gaps follow no line: take the widest.
        reserved=max(peaks.values()) + max(each.reserved - max(each.peaks.values()) for each in (*figures, *bare)),
        pinned=int(total(lambda f: f.pinned)),
        host=int(total(lambda f: f.host)),
        exchanges=exchanges_of(sizes, predicted, job.rows, machine),
        link=_describe_link(predicted.job, machine),
    )


def exchanges_of(sizes: ModelSizes, predicted: Predicted, rows: int, machine: Machine) -> tuple[Exchange, ...]:
    """Return the four exchanges of a layer, summed over layers and rows."""
    job = predicted.job
    if job.sp == 1:
        return ()
    wires = [exchanged(sizes, job, mode, predicted.plan.head_groups) for mode in predicted.plan.layers]
    names = {
        "q, k, v": "forward_in",
        "output": "forward_out",
        "output's gradient; q, k, v and output again": "backward_in",
        "gradients of q, k, v": "backward_out",
    }
    return tuple(
        Exchange(
            name,
            rows * sum(getattr(wire, key) for wire in wires),
            rows * sum(exchange_s(machine, job, getattr(wire, key)) for wire in wires),
        )
        for name, key in names.items()
    )


def _describe_link(job: Job, machine: Machine) -> str:
    inside = f"{machine.link.name}, {machine.link.speed:g} GB/s"
    if job.sp <= machine.gpus:
        return inside
    return f"{inside}; between nodes {machine.network.name}, {machine.network.speed:g} GB/s"
