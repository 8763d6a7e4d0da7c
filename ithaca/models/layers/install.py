"""Installation of a memory plan on decoder layers: tiled units, compiled code and a replay around each layer.

    layer.forward = Layer                 saves and replays the layer as its mode says           memory/replay.py
      LayerRunner -> the layer's own forward, with a tape for its attention                      attention/tape.py
        input_layernorm.forward           tiled
        self_attn.forward                 rotary embedding and norms of q and k compiled
        post_attention_layernorm.forward = NormInUnit   returns its input: the MLP's unit runs the norm
        mlp.forward = TiledChild          runs norm and MLP, tile by tile                        memory/tiles.py
    model.forward = HeadForward           head and loss, tile by tile                            layers/head.py

Only `forward` attributes of module instances are set, so everything can be taken off again. FSDP2's hooks run in
`__call__`, around these forwards: a layer's weights are gathered for its replay, because they are gathered for its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.attention.tape import Anchor, AttentionCall, Tape
from ithaca.errors import UnsupportedError
from ithaca.memory.head_loss import LossSpec
from ithaca.memory.layer_function import LayerResult
from ithaca.memory.replay import Layer
from ithaca.memory.replay_guard import adapters_now
from ithaca.memory.tiles import Unit
from ithaca.models.binding_state import CALL, Binding, logger
from ithaca.models.discover.findings import discovered, surveyed
from ithaca.models.discover.random_weights import randomized
from ithaca.models.discover.roles import UnitRole, shapes
from ithaca.models.layers.fuse import FusedNorm, can_fuse, compilations, compiled_chain, fused_rotary, norms_within
from ithaca.models.layers.head import HeadForward, bare_head
from ithaca.models.layers.installed_state import Installed
from ithaca.models.layers.module_attributes import settings
from ithaca.models.layers.units import Fused, UnitBackward, UnitForward, adapted, router_of
from ithaca.models.planner.memory_planner import MemoryPlanner
from ithaca.planning.memory_plan import MemoryPlan


@dataclass(eq=False)
class LayerRunner:
    """Runs one decoder layer through its own forward, with a tape for its attention.

    `keeps`: the layer's mode is "keep". `value`: silent units compute their output. `router_logits`: those of this run.
    """

    binding: Binding
    forward: Callable[..., Any]
    keeps: bool = False
    value: bool = True
    router_logits: list[Tensor] = field(default_factory=list)

    def run(self, args: Any, kwargs: Any, anchors: list[Tensor] | None, *, value: bool) -> LayerResult:
        outer = kwargs.get(CALL) or self.binding.call
        if outer is None:
            try:
                return LayerResult(self.forward(*args, **kwargs), [], [])
            finally:
                # In a pass over whole sequences transformers collects router logits itself.
                self.router_logits.clear()
        tape = Tape([Anchor.of(anchors)], replaying=True) if anchors else None if self.keeps else Tape()
        call = AttentionCall(outer.layout, tape)
        if CALL in kwargs:
            kwargs = {**kwargs, CALL: call}
        before, self.binding.call = self.binding.call, call
        self.value, self.router_logits = value, []
        try:
            output = self.forward(*args, **kwargs)
        finally:
            self.binding.call, self.value = before, True
        recorded = [] if tape is None else tape.anchors
        if len(recorded) > 1:
            raise UnsupportedError(f"a layer attends {len(recorded)} times: only 'keep' is exact for this architecture")
        router_logits, self.router_logits = self.router_logits, []
        return LayerResult(output, router_logits, [t for anchor in recorded for t in anchor.tensors])

    def emit_side_outputs(self, tensors: list[Tensor]) -> None:
        self.binding.router_logits += tensors

    def accounting(self) -> AbstractContextManager[None]:
        return self.binding.handle.accounting()


@dataclass(eq=False)
class TiledChild:
    """The forward of a unit's main child: runs the whole unit, tile by tile."""

    unit_forward: UnitForward
    main: nn.Module
    runner: LayerRunner
    unit: Unit
    silent: bool
    has_router: bool

    def __call__(self, x_BLC: Tensor) -> Any:
        if self.unit_forward.runs_separately:
            result = self.unit_forward.run_child(self.main, x_BLC)
        elif self.runner.keeps and self._runs_whole(x_BLC):
            # The mode "keep" replays nothing, so autograd saves activations as usual.
            result = self.unit_forward(x_BLC)
        else:
            result = self.unit(x_BLC, value=self.runner.value or not self.silent)
        if not self.has_router:
            return _unpacked(result)
        *outputs, logits = result
        self.runner.router_logits.append(logits.reshape(-1, logits.shape[-1]))
        return _unpacked(tuple(outputs))

    def _runs_whole(self, x_BLC: Tensor) -> bool:
        """True if the unit runs on all tokens at once."""
        # In a pass over whole sequences transformers records the router's output, which must then be one tensor.
        if self.has_router:
            return not self.runner.binding.sharded and torch.is_grad_enabled()
        return x_BLC.shape[1] <= self.unit.tile


@dataclass(eq=False)
class NormInUnit:
    """The forward of a norm that belongs to a unit: returns its input, as the unit's main child runs the norm."""

    unit_forward: UnitForward
    norm: nn.Module

    def __call__(self, x_BLC: Tensor) -> Any:
        if self.unit_forward.runs_separately:
            return _unpacked(self.unit_forward.run_child(self.norm, x_BLC))
        return x_BLC


def _unpacked(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) and len(result) == 1 else result


def install_memory(
    binding: Binding,
    layers: list[nn.Module],
    memory: MemoryPlan | MemoryPlanner,
    *,
    fuse: bool = False,
    sharded: bool = False,
    device: torch.device | None = None,
) -> Installed:
    """Tile the units of every layer and the head, and set each layer's memory mode.

    `sharded`: FSDP2 will shard the weights, so layers that it would hand copies are refused. `device`: the device of
    random weights for trial runs of a model on the meta device.
    """
    if not layers:
        name = type(binding.model).__name__
        raise UnsupportedError(f"{name} does not name its layers (_no_split_modules): use memory=None")
    found = surveyed(binding.model, layers) or discovered(binding, layers, partial(on_trial, binding), device)
    passing, spec = found.passing, found.logits
    given = passing.checked_plan(memory if isinstance(memory, MemoryPlan) else memory.given, len(layers))
    if sharded:
        passing.refuse_copies()
    handle = binding.handle
    installed = handle.keep(Installed(handle, binding.model, fused=fuse))
    handle.add(installed)
    installed.chain.strict = isinstance(given, MemoryPlan) or given.layers is not None
    compiled = compilations()
    for layer, roles in zip(layers, found.roles, strict=True):
        runner = LayerRunner(binding, layer.forward)
        units = [
            _install_unit(installed, runner, layer, role, _fused(layer, role, compiled) if fuse else None)
            for role in roles
        ]
        if fuse:
            _fuse_attention(installed, layer, compiled, device)
        installed.runners.append(runner)
        installed.layers.append(Layer(layer, runner, installed.chain, "keep", len(installed.layers), units=units))
        handle.replace_method(layer, "forward", installed.layers[-1])
    for stack, role in found.around:
        fused = _fused(stack, role, compiled) if fuse else None
        _install_unit(installed, LayerRunner(binding, stack.forward), stack, role, fused)
    _install_head(installed, spec, fuse=fuse)
    if isinstance(memory, MemoryPlanner):
        installed.planner = handle.keep(memory)
        handle.explain = memory.out_of_memory
        passing.restrict(memory, given)
        in_place = spec is not None and spec.scale == 1 and memory.job.loss_in_place
        memory.job = replace(memory.job, whole_logits=spec is None, loss_in_place=in_place)
    if isinstance(given, MemoryPlan):
        installed.apply(given)
    installed.stacks = [m for m in binding.model.modules() if isinstance(m, nn.ModuleList) and set(m) & set(layers)]
    installed.record_modules()
    return installed


def _install_head(installed: Installed, spec: LossSpec | None, *, fuse: bool) -> None:
    model = installed.model
    if spec is not None:
        head = bare_head(model)
        installed.head = HeadForward(model, head, model.forward, 1024, spec, fuse, installed.handle)
        installed.handle.replace_method(model, "forward", installed.head)
    elif installed.handle.mesh.rank == 0:
        logger.warning("%s does something of its own to its logits: they are computed whole", type(model).__name__)


def _fused(layer: nn.Module, role: UnitRole, compiled: dict[Any, Any]) -> Fused | None:
    """Return the unit's compiled code, shared by all layers of the same shapes and settings; None if not compilable."""
    children = role.children(layer)
    if role.draws or not can_fuse(children):
        return None
    key = (shapes(layer), role, tuple(map(settings, children)), adapters_now(adapted(children)))
    if key not in compiled:
        compiled[key] = Fused.of(layer, role)
    fused: Fused = compiled[key]
    return fused


def _fuse_attention(
    installed: Installed, layer: nn.Module, compiled: dict[Any, Any], device: torch.device | None
) -> None:
    """Compile the rotary embedding and the norms inside the layer's attention."""
    kind = shapes(layer)
    for name, child in layer.named_children():
        forward = fused_rotary(child, compiled)
        if forward is None:
            continue
        installed.handle.replace_method(child, "forward", forward)
        with nullcontext() if device is None else randomized(child, [], device):
            norms = norms_within(child)
        for inner, norm in norms.items():
            key = (kind, name, inner, settings(norm))
            if key not in compiled:
                compiled[key] = compiled_chain([norm])
            installed.assumed.assume_compiled([norm])
            installed.handle.replace_method(norm, "forward", FusedNorm(norm, compiled[key]))


@contextmanager
def on_trial(binding: Binding, layer: nn.Module, role: UnitRole) -> Iterator[LayerRunner]:
    """Inside, this one unit is installed on the layer, in tiles of two tokens; see `trials.py`."""
    trial, runner = Installed(binding.handle, binding.model), LayerRunner(binding, layer.forward)
    with binding.handle.temporarily():
        _install_unit(trial, runner, layer, role)
        try:
            yield runner
        finally:
            runner.router_logits.clear()


def _install_unit(
    installed: Installed, runner: LayerRunner, layer: nn.Module, role: UnitRole, fused: Fused | None = None
) -> Unit:
    """Install one unit on a layer: the main child runs the unit, the norms of the unit return their input."""
    children = role.children(layer)
    main = layer.get_submodule(role.main)
    router, index = router_of(installed.model, main)
    # Compiled code returns the unit's output alone, without router logits.
    fused = None if router else fused
    forward = UnitForward(children, [c.forward for c in children], router, index, fused)
    split = None if fused is None else fused.split
    backward = None if split is None else UnitBackward(role.until_main(layer), split, forward)
    unit = Unit(forward, forward.parameters, tile=2, draws=role.draws, gradients=backward, snapshot=forward.snapshot)
    installed.units.append(unit)
    installed.assumed.assume_forwards(children)
    if not role.draws:
        installed.assumed.assume_deterministic(children)
    if fused is not None:
        installed.assumed.assume_compiled(children)
    tiled = TiledChild(forward, main, runner, unit, role.silent, router is not None)
    for other in children:
        instead = tiled if other is main else NormInUnit(forward, other)
        installed.handle.replace_method(other, "forward", instead)
    return unit
