"""One rank's step, measured: seconds and peak memory of forward, backward and optimizer.

`measure(job, layers, plan, mesh)` runs steps of the rank's own share of a row on random weights. The mesh's other ranks
may be real or `lone_group`'s. On a GPU time and memory are the device's; without one memory is traced, on real or fake
tensors.

Invariant: the step is training's own: `parallelize`, `causal_loss`, `build_optimizer`, under the plan that is passed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ithaca.attention.clock import ATTENTION, CLOCK, EXCHANGE
from ithaca.errors import UnsupportedError
from ithaca.loss.causal import MicroBatch, causal_loss, micro_loss
from ithaca.memory.release import release
from ithaca.mesh import Mesh
from ithaca.models.binding_state import binding_of
from ithaca.models.experts import has_experts
from ithaca.models.files.read_weights import materialize
from ithaca.models.support import base_model, decoder_layers
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.rehearse.cut_model import RankJob, build, fill_weights, one_of_each, running_only
from ithaca.rehearse.fake_tensors import fake_shard, fake_step
from ithaca.rehearse.lone_group import sent_of
from ithaca.rehearse.memory_trace import Kinds, Trace, TracedStore, held_by
from ithaca.rehearse.no_attention import without_attention
from ithaca.rehearse.phases import BACKWARD, FORWARD, OPTIMIZER, DevicePhases, TracedPhases
from ithaca.sequence.batch import shard_batch
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.optimizer.clipping import clipped_step, gradient_norm

# Tokens a shard of the first step, which compiles, makes the optimizer's state and warms the kernels up.
SHORT = 2048
# A step of fewer seconds is repeated, at most so many times within as many seconds more; the median counts. A first step
# loses some tenths of a second to the driver and to libraries, which a longer step hides.
AGAIN_S, AGAIN = 6.0, 3
# A layer of more seconds is warmed up without its attention, because its time hides attention's first call.
SLOW_S = 4.0
# Bytes by which each tensor of a longer step may be rounded up.
_ROUNDING = 4096
# Kinds that FSDP2 pins where they live on the host.
PINNED = ("weights", "gradients")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run of some layers: seconds of one row's forward and backward and of one optimizer step.

    `kinds`: bytes of the device at each phase's peak, gradients as at its end. `pinned`: host memory as the driver holds
    it, rounded up. `host`: saved tensors on the host, and weights, gradients and state that live there. `filling_s`:
    filling of buffers with data that would arrive from other ranks, left out of `seconds`. `layer_s`: forward and backward
    of each layer, None for the last layer of a phase. `attention_s`, `packing_s`, `sent` and `calls` are of two rows where
    a step has more than one.
    """

    layers: tuple[int, ...]
    seconds: dict[str, float]
    kinds: dict[str, Kinds]
    reserved: int
    pinned: int
    host: int
    layer_s: dict[str, list[float | None]] = field(default_factory=dict)
    attention_s: float = 0.0
    packing_s: float = 0.0
    filling_s: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    loss: float | None = None

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peaks(self) -> dict[str, int]:
        return {phase: kinds.total for phase, kinds in self.kinds.items()}


def measure(
    job: RankJob, layers: Sequence[int], plan: MemoryPlan, mesh: Mesh, *, bare: bool = False, layer_s: float = 0.0
) -> Figures:
    """Return the figures of these of the model's layers under `plan`, which has a mode for each of them.

    `bare`: without attention, for bytes alone. `layer_s`: expected seconds of a layer.
    """
    if job.fake and has_experts(job.config) and (job.compute or job.weights) == torch.float32:
        raise UnsupportedError(
            "experts in fp32 cannot be rehearsed without a GPU, for torch has no rule for the shapes of their products: "
            "use precision=mixed or precision=bf16"
        )
    # Weights of an earlier run would count as this run's.
    release(mesh.device)
    with ExitStack() as stack:
        if bare:
            stack.enter_context(without_attention())
        model = build(job, layers, plan, mesh)
        stack.enter_context(warnings.catch_warnings())
        # FSDP2 reads the addresses of adapters, which have values before the fake mode begins.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)) if job.fake else None
        materialize(model)
        if fake is None:
            fill_weights(model)
        settings = job.optimizer
        optimizer = build_optimizer(
            model, settings.name, lr=1e-5, betas=settings.betas, in_backward=settings.in_backward
        )
        run = _Run(job, tuple(layers), plan, model, optimizer, mesh, fake, list(model.parameters()))
        if mesh.device.type == "cuda":
            return run.on_device(once=bare, slow=layer_s > SLOW_S)
        return run.traced()


@dataclass(eq=False, slots=True)
class _Run:
    job: RankJob
    layers: tuple[int, ...]
    plan: MemoryPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    fake: FakeTensorMode | None
    parameters: list[nn.Parameter]

    def on_device(self, *, once: bool = False, slow: bool = False) -> Figures:
        """Run a short step, then one of the whole length, and more if that is quick, unless `once`."""
        short = min(self.job.length, SHORT * self.mesh.shards)
        self._step(short, nullcontext())
        self._pin_memory(self.job.length / short)
        with without_attention() if slow and not once else nullcontext():
            self._warm_up()
        torch.cuda.empty_cache()
        first = self._timed()
        if once or first.step_s > AGAIN_S:
            return first
        more = [self._timed() for _ in range(min(AGAIN, int(AGAIN_S / first.step_s)))]
        median = sorted(more, key=lambda each: each.step_s)[(len(more) - 1) // 2]
        # Later steps reuse the memory that the first took from the driver: only the first shows how much that was.
        return replace(median, reserved=first.reserved)

    def _pin_memory(self, longer: float) -> None:
        """Pin the host memory of a step `longer` times as long: a run pins once, so the timed step must not."""
        store = self._store
        if store is not None:
            store.reserve([math.ceil(block.memory.nbytes * longer) + _ROUNDING for block in store.free])

    def _warm_up(self) -> None:
        """Run one layer of each kind and mode: libraries choose and load kernels at a shape's first call."""
        with running_only(self.model, one_of_each(base_model(self.model).config.get_text_config(), self.plan)):
            self._loss(self.job.length).backward()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _store(self) -> Any:
        """The plan's store of offloaded tensors; None if nothing is offloaded."""
        installed = binding_of(self.model).memory
        return None if installed is None else installed.store

    def _timed(self) -> Figures:
        device, sent = self.mesh.device, sent_of(self.mesh.sp_group)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
        sent.clear()
        phase = DevicePhases(device, sent, decoder_layers(base_model(self.model)))
        with CLOCK.recording(device) as clock:
            loss = self._step(self.job.length, phase)
            spent = clock.seconds()
        saved = 0 if self._store is None else self._store.pinned
        filling = sent.filling_s()
        return Figures(
            layers=self.layers,
            seconds=phase.seconds,
            kinds=phase.kinds,
            reserved=torch.cuda.max_memory_reserved(device),
            pinned=torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) + saved,
            host=saved + phase.on_host(),
            layer_s=phase.layers(),
            attention_s=spent[ATTENTION],
            packing_s=max(0.0, spent[EXCHANGE] - filling),
            filling_s=filling,
            sent=dict(sent.bytes),
            calls=dict(sent.calls),
            loss=loss,
        )

    def traced(self) -> Figures:
        """Run a whole step for the optimizer's state, then trace one; for machines without a GPU."""
        self._step(self.job.length, nullcontext())
        trace = Trace(lambda: held_by(self.parameters, self.optimizer), away=self.job.away)
        self._trace_offloading(trace)
        sent = sent_of(self.mesh.sp_group)
        phase = TracedPhases(trace, sent, decoder_layers(base_model(self.model)))
        sent.clear()
        with trace:
            loss = self._step(self.job.length, phase)
        return Figures(
            layers=self.layers,
            seconds=phase.seconds if self.fake is None else {},
            kinds=phase.kinds,
            reserved=max(kinds.total for kinds in phase.kinds.values()),
            pinned=trace.pinned + phase.on_host(PINNED),
            host=trace.pinned + phase.on_host(),
            layer_s=phase.layers() if self.fake is None else {},
            sent=dict(sent.bytes),
            calls=dict(sent.calls),
            loss=loss,
        )

    def _trace_offloading(self, trace: Trace) -> None:
        installed = binding_of(self.model).memory
        if installed is None or installed.store is None:
            return
        installed.store = TracedStore(self.mesh.device, trace=trace)
        for layer in installed.layers:
            layer.store = None if layer.store is None else installed.store

    def _step(self, length: int, phases: AbstractContextManager[Any]) -> float | None:
        """Run one optimizer step, over two rows if a step has more than one: the second finds gradients."""
        if self.job.rows > 1:
            self._loss(length).backward()
        with phases as phase:
            loss = self._loss(length)
            self._mark(phase, FORWARD)
            loss.backward()
            self._mark(phase, BACKWARD)
            self._update(loss.detach())
            self._mark(phase, OPTIMIZER)
        self.optimizer.zero_grad(set_to_none=True)
        return None if self.fake is not None else float(loss.detach())

    def _mark(self, phase: Any, name: str) -> None:
        if phase is not None:
            phase.mark(name, held_by(self.parameters, self.optimizer))

    def _update(self, loss: Tensor) -> None:
        if self.fake is not None:
            # No norm, whose value cannot be read; it takes hardly any memory.
            fake_step(self.optimizer)
            return
        norm = gradient_norm(self.parameters, self.mesh.device)
        clipped_step(self.optimizer, norm, loss, self.job.optimizer.clip)

    def _loss(self, length: int) -> Tensor:
        vocabulary = int(base_model(self.model).config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(self.job.seed + 1)
        if self.fake is None:
            ids = torch.randint(0, vocabulary, (1, length), generator=generator)
            return causal_loss(self.model, {"input_ids": ids}, self.mesh)
        # The host reads the row's tokens to make a layout, so the row is sharded with real ones.
        with unset_fake_temporarily():
            ids = torch.randint(0, vocabulary, (1, length), generator=generator)
            shard = shard_batch({"input_ids": ids}, self.mesh, vocab_size=vocabulary)
        # Without an agreement of ranks: fake tensors have no values to compare.
        micro = MicroBatch(fake_shard(shard, self.fake), shard.count)
        return micro_loss(self.model, micro, self.mesh, shard.count)
