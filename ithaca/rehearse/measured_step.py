"""One rank's step, measured: forward, backward, optimizer, with the memory each of them reaches.

`measure(part, layers, plan, mesh)` builds the rank's shards of a model with random weights, cut to some of its layers
where that is asked, and runs steps of its own share of a row; the ranks it is joined with may be real or
`rehearse_group`'s. On a GPU time and memory are the device's; without one memory is traced, of real or of fake tensors.

Invariant: what runs is what training runs: `parallelize`, `causal_loss`, `build_optimizer`, under the plan given.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ithaca.attention.clock import ATTENTION, CLOCK, EXCHANGE
from ithaca.config.schema import LoraSettings, OptimizerSettings
from ithaca.errors import UnsupportedError
from ithaca.loss.causal import MicroBatch, causal_loss, micro_loss
from ithaca.memory.offload import HostStore
from ithaca.memory.release import release
from ithaca.mesh import Mesh
from ithaca.models.bound import binding_of
from ithaca.models.experts import has_experts
from ithaca.models.files.pretrained import add_adapters, empty_model
from ithaca.models.files.read_weights import local, materialize
from ithaca.models.support import base_model, decoder_layers
from ithaca.parallelize import parallelize
from ithaca.planning.plan import MemoryPlan
from ithaca.rehearse.fake_tensors import fake_step, faked
from ithaca.rehearse.lone_group import sent_of
from ithaca.rehearse.memory_trace import Kinds, Trace, TracedStore, held_by
from ithaca.rehearse.no_attention import without_attention
from ithaca.rehearse.phases import BACKWARD, FORWARD, OPTIMIZER, DevicePhases, TracedPhases
from ithaca.sequence.batch import shard_batch
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.optimizer.clipping import clipped_step, gradient_norm
from ithaca.state.weights.placement import OnHost

# A first step this long for each shard compiles, makes the optimizer's state and warms the kernels up.
SHORT = 2048
# A step of fewer seconds is run again, at most so many times within as many seconds more; the median counts. What a first
# step loses to the driver and to libraries, some tenths of a second, is lost in a longer one.
AGAIN_S, AGAIN = 6.0, 3
# A layer of more seconds is run ahead without its attention, whose first call is lost in it.
SLOW_S = 4.0
_DRAWN = 2**22
# A longer step's tensors are rounded up each by itself.
_ROUNDING = 4096
# What of it FSDP2 pins where it lives on the host.
PINNED = ("weights", "gradients")


@dataclass(frozen=True, slots=True)
class Part:
    """What every rank of the job runs. `rows`: of one sequence group, one after another. `away`: weights, gradients and
    optimizer state are the host's, or count as such. `fake`: no memory is touched."""

    config: Any
    length: int
    rows: int
    weights: torch.dtype
    compute: torch.dtype | None
    optimizer: OptimizerSettings
    on_host: OnHost = "nothing"
    away: bool = False
    replicas: int = 1
    kernel: str = "auto"
    lora: LoraSettings | None = None
    seed: int = 0
    fake: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run of some layers gave; seconds of one row's forward and backward and of one optimizer step.

    `kinds`: bytes of the device at every phase's peak, gradients as at its end. `pinned`: as the driver holds it, rounded
    up. `host`: saved tensors there, and weights, gradients and state where they live there. `filling_s` is left out of
    `seconds`: it stands where real data would arrive. `layer_s`: forward and backward of every layer, unknown for the
    last one to run. `attention_s`, `packing_s` and what was sent are of two rows where a step has more than one.
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
    part: Part, layers: Sequence[int], plan: MemoryPlan, mesh: Mesh, *, bare: bool = False, layer_s: float = 0.0
) -> Figures:
    """The figures of a model of these of its layers under `plan`, which has a mode for each of them.

    `bare`: without attention, for bytes alone. `layer_s`: what a layer is expected to take.
    """
    if part.fake and has_experts(part.config) and (part.compute or part.weights) == torch.float32:
        raise UnsupportedError(
            "experts in fp32 cannot be rehearsed without a GPU, for torch has no rule for the shapes of their products: "
            "use precision=mixed or precision=bf16"
        )
    # An earlier run's weights would be counted as this one's.
    release(mesh.device)
    with ExitStack() as stack:
        if bare:
            stack.enter_context(without_attention())
        model = build(part, layers, plan, mesh)
        stack.enter_context(warnings.catch_warnings())
        # FSDP2 looks whether adapters, which have values already, are where they were.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)) if part.fake else None
        materialize(model)
        if fake is None:
            _fill(model)
        settings = part.optimizer
        optimizer = build_optimizer(
            model, settings.name, lr=1e-5, betas=settings.betas, in_backward=settings.in_backward
        )
        run = _Run(part, tuple(layers), plan, model, optimizer, mesh, fake, list(model.parameters()))
        if mesh.device.type == "cuda":
            return run.on_device(once=bare, slow=layer_s > SLOW_S)
        return run.traced()


def build(part: Part, layers: Sequence[int], plan: MemoryPlan, mesh: Mesh) -> nn.Module:
    """The rank's model, its weights still empty."""
    model: nn.Module = cut(empty_model(part.config, dtype=part.weights), layers)
    if part.lora is not None:
        model = add_adapters(model, part.lora, seed=part.seed)
    return parallelize(
        model,
        mesh,
        replicas=part.replicas,
        on_host=part.on_host,
        kernel=part.kernel,
        memory=plan,
        optimizer=part.optimizer.name,
        compute_dtype=part.compute,
    )


def cut(model: Any, layers: Sequence[int]) -> Any:
    """The model with these of its layers only, in their order, under a config of its own."""
    every = decoder_layers(model)
    if list(layers) == list(range(len(every))):
        return model
    blocks = _blocks(model, every[0])
    del blocks[:]
    blocks.extend(every[index] for index in layers)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[index] for index in layers]
    text.num_hidden_layers = len(layers)
    for module in model.modules():
        if getattr(module, "config", None) is model.config:
            module.config = config
    for place, index in enumerate(layers):
        for module in every[index].modules():
            if "layer_idx" in module.__dict__:
                module.__dict__["layer_idx"] = place
            if "config" in module.__dict__:
                module.__dict__["config"] = config
    model.config = config
    return model


def _blocks(model: nn.Module, first: nn.Module) -> nn.ModuleList:
    """The list that the model runs its layers from."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is first)


@contextmanager
def only(model: nn.Module, wanted: Sequence[int]) -> Iterator[None]:
    """A pass under this runs these layers and no others."""
    every = decoder_layers(base_model(model))
    blocks, binding = _blocks(model, every[0]), binding_of(model)
    whole, count = blocks._modules, binding.layers

    def put(modules: Any, layers: int) -> None:
        blocks._modules, binding.layers = modules, layers
        if binding.memory is not None:
            binding.memory.note_parts()

    put({str(place): every[index] for place, index in enumerate(wanted)}, len(wanted))
    try:
        yield
    finally:
        put(whole, count)


def _fill(model: nn.Module) -> None:
    """Weights of a fresh model's size: matrices of small random numbers, vectors around one."""
    block = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02

    @cache
    def drawn(matrix: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        return (block if matrix else 1 + block).to(device, dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            own = local(parameter).view(-1)
            values = drawn(parameter.dim() > 1, own.device, own.dtype)
            for start in range(0, own.numel(), _DRAWN):
                own[start : start + _DRAWN].copy_(values[: own.numel() - start])


def one_of_each(config: Any, plan: MemoryPlan) -> list[int]:
    """A layer of each kind of attention and mode, as another mode runs other compiled code; one whose input is rebuilt
    comes with those it is rebuilt from."""
    types = getattr(config, "layer_types", None) or [None] * len(plan.layers)
    kinds = list(zip(types, plan.layers, strict=True))
    first = {kinds.index(kind) for kind in kinds}
    return sorted({index for last in first for index in range(last - plan.chain[last], last + 1)})


@dataclass(eq=False, slots=True)
class _Run:
    part: Part
    layers: tuple[int, ...]
    plan: MemoryPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    fake: FakeTensorMode | None
    parameters: list[nn.Parameter]

    def on_device(self, *, once: bool = False, slow: bool = False) -> Figures:
        """A short step first; then one of the whole length, and more where that is quick, unless `once`."""
        short = min(self.part.length, SHORT * self.mesh.shards)
        self._step(short, nullcontext())
        self._pin_ahead(self.part.length / short)
        with without_attention() if slow and not once else nullcontext():
            self._load_kernels()
        torch.cuda.empty_cache()
        first = self._timed()
        if once or first.step_s > AGAIN_S:
            return first
        # These find the memory that the first took from the driver; how much that was is the first one's to say.
        more = [self._timed() for _ in range(min(AGAIN, int(AGAIN_S / first.step_s)))]
        return replace(sorted(more, key=lambda each: each.step_s)[(len(more) - 1) // 2], reserved=first.reserved)

    def _pin_ahead(self, longer: float) -> None:
        """A run pins its host memory once, in its first step; here it is done before the step that is timed."""
        store = self._store
        if store is not None:
            store.reserve([math.ceil(block.memory.nbytes * longer) + _ROUNDING for block in store.free])

    def _load_kernels(self) -> None:
        """Libraries choose and load kernels at a shape's first call: one layer of each kind and mode makes it, before the timed
        step."""
        with only(self.model, one_of_each(base_model(self.model).config.get_text_config(), self.plan)):
            self._loss(self.part.length).backward()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _store(self) -> HostStore | None:
        installed = _memory(self.model)
        store: HostStore | None = None if installed is None else installed.store
        return store

    def _timed(self) -> Figures:
        device, group = self.mesh.device, self.mesh.sp_group
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
        sent_of(group).clear()
        phase = DevicePhases(device, sent_of(group), decoder_layers(base_model(self.model)))
        with CLOCK.running(device) as clock:
            loss = self._step(self.part.length, phase)
            spent = clock.seconds()
        saved = 0 if self._store is None else self._store.pinned
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        filling = sent_of(group).filling_s()
        return Figures(
            layers=self.layers,
            seconds=phase.seconds,
            kinds=phase.kinds,
            reserved=torch.cuda.max_memory_reserved(device),
            pinned=pinned + saved,
            host=saved + phase.on_host(),
            layer_s=phase.layers(),
            attention_s=spent[ATTENTION],
            packing_s=max(0.0, spent[EXCHANGE] - filling),
            filling_s=filling,
            sent=dict(sent_of(group).bytes),
            calls=dict(sent_of(group).calls),
            loss=loss,
        )

    def traced(self) -> Figures:
        """Without a GPU: a whole step for the optimizer's state, then one with every storage followed."""
        self._step(self.part.length, nullcontext())
        trace = Trace(lambda: held_by(self.parameters, self.optimizer), away=self.part.away)
        _trace_store(self.model, self.mesh, trace)
        sent = sent_of(self.mesh.sp_group)
        phase = TracedPhases(trace, sent, decoder_layers(base_model(self.model)))
        sent.clear()
        with trace:
            loss = self._step(self.part.length, phase)
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

    def _step(self, length: int, phases: AbstractContextManager[Any]) -> float | None:
        """One optimizer step over two rows where a step has more than one: the second finds gradients."""
        if self.part.rows > 1:
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
            # Nothing can be read of fake tensors, and a norm takes no memory to speak of.
            fake_step(self.optimizer)
            return
        norm = gradient_norm(self.parameters, self.mesh.device)
        clipped_step(self.optimizer, norm, loss, self.part.optimizer.clip)

    def _loss(self, length: int) -> Tensor:
        vocabulary = int(base_model(self.model).config.get_text_config().vocab_size)
        draw = torch.Generator().manual_seed(self.part.seed + 1)
        if self.fake is None:
            ids = torch.randint(0, vocabulary, (1, length), generator=draw)
            return causal_loss(self.model, {"input_ids": ids}, self.mesh)
        # Where the row's tokens go is worked out with real ones: it is read on the host.
        with unset_fake_temporarily():
            ids = torch.randint(0, vocabulary, (1, length), generator=draw)
            shard = shard_batch({"input_ids": ids}, self.mesh, vocab_size=vocabulary)
        # The other ranks are taken to have said the same: fake tensors hold nothing to compare.
        micro = MicroBatch(faked(shard, self.fake), shard.count)
        return micro_loss(self.model, micro, self.mesh, shard.count)


def _memory(model: nn.Module) -> Any:
    return binding_of(model).memory


def _trace_store(model: nn.Module, mesh: Mesh, trace: Trace) -> None:
    """Let the trace know what the plan sends to the host."""
    installed = _memory(model)
    if installed is None or installed.store is None:
        return
    installed.store = TracedStore(mesh.device, trace=trace)
    for layer in installed.layers:
        layer.store = None if layer.store is None else installed.store
