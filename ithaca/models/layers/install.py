"""What is put on decoder layers: tiled units in place of their token-wise children, and a replay around each layer.

Only `forward` attributes of module instances are set, so everything comes off again and FSDP2's hooks, which sit on
`__call__`, stay around it: weights are gathered when a layer is replayed, because its backward gathered them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from ithaca.models.bound import CALL, Binding, logger, unsharded
from ithaca.models.discover.passing import found_by, watching
from ithaca.models.discover.roles import UnitRole, norms_around, shapes
from ithaca.models.discover.trials import roles_of
from ithaca.models.layers.fuse import FusedNorm, can_fuse, compilations, compiled_chain, fused_rotary, norms_within
from ithaca.models.layers.head import HeadForward, bare_head, head_spec
from ithaca.models.layers.installed import Installed
from ithaca.models.layers.module_attributes import settings
from ithaca.models.layers.units import Fused, UnitBackward, UnitForward, adapted, router_of
from ithaca.models.planner.plan_in_force import AutoMemory
from ithaca.planning.plan import MemoryPlan


@dataclass(eq=False)
class LayerRunner:
    """Runs one decoder layer through its own forward, with a tape for its attention."""

    binding: Binding
    forward: Callable[..., Any]
    keeps: bool = False
    value: bool = True
    aside: list[Tensor] = field(default_factory=list)

    def run(self, args: Any, kwargs: Any, anchors: list[Tensor] | None, *, value: bool) -> LayerResult:
        own = kwargs.get(CALL) or self.binding.call
        if own is None:
            try:
                return LayerResult(self.forward(*args, **kwargs), [], [])
            finally:
                # transformers gathers those of a whole pass itself.
                self.aside.clear()
        tape = Tape([Anchor.of(anchors)], replaying=True) if anchors else None if self.keeps else Tape()
        call = AttentionCall(own.layout, tape)
        if CALL in kwargs:
            kwargs = {**kwargs, CALL: call}
        before, self.binding.call = self.binding.call, call
        self.value, self.aside = value, []
        try:
            output = self.forward(*args, **kwargs)
        finally:
            self.binding.call, self.value = before, True
        left = [] if tape is None else tape.anchors
        if len(left) > 1:
            raise UnsupportedError(f"a layer attends {len(left)} times: only 'keep' is exact for this architecture")
        aside, self.aside = self.aside, []
        return LayerResult(output, aside, [t for anchor in left for t in anchor.tensors])

    def emit_side_outputs(self, tensors: list[Tensor]) -> None:
        self.binding.router_logits += tensors

    def accounting(self) -> AbstractContextManager[None]:
        return self.binding.handle.accounting()


@dataclass(eq=False)
class TiledChild:
    """A unit's forward, in place of its main child's; the unit's norms hand through."""

    own: UnitForward
    main: nn.Module
    runner: LayerRunner
    unit: Unit
    silent: bool
    routers: bool

    def __call__(self, x_BLC: Tensor) -> Any:
        if self.own.apart:
            given = self.own.alone(self.main, x_BLC)
        elif self.runner.keeps and self._in_one(x_BLC):
            # Nothing of this layer is to be run again: autograd keeps what it needs.
            given = self.own(x_BLC)
        else:
            given = self.unit(x_BLC, value=self.runner.value or not self.silent)
        if not self.routers:
            return _single(given)
        *outputs, logits = given
        self.runner.aside.append(logits.reshape(-1, logits.shape[-1]))
        return _single(tuple(outputs))

    def _in_one(self, x_BLC: Tensor) -> bool:
        """One tile; or a whole pass, of which transformers takes router logits as the router gives them."""
        if self.routers:
            return not self.runner.binding.sharded and torch.is_grad_enabled()
        return x_BLC.shape[1] <= self.unit.tile


@dataclass(eq=False)
class HandThrough:
    """In place of the forward of a unit's norm: the main child does its work."""

    own: UnitForward
    norm: nn.Module

    def __call__(self, x_BLC: Tensor) -> Any:
        return _single(self.own.alone(self.norm, x_BLC)) if self.own.apart else x_BLC


def _single(given: Any) -> Any:
    return given[0] if isinstance(given, tuple) and len(given) == 1 else given


def install_memory(
    binding: Binding,
    layers: list[nn.Module],
    memory: MemoryPlan | AutoMemory,
    *,
    fuse: bool = False,
    sharded: bool = False,
) -> Installed:
    """Tile the token-wise units of every layer and the head, and put each layer under its mode.

    `sharded`: FSDP2 will shard the weights, so a model is refused whose layers it would hand copies.
    """
    if not layers:
        name = type(binding.model).__name__
        raise UnsupportedError(f"{name} does not name its layers (_no_split_modules): use memory=None")
    with unsharded(binding.model):
        with watching(binding.model, layers) as watch:
            around = norms_around(binding.model, layers)
        passing = found_by(watch)
        given = passing.settled(memory if isinstance(memory, MemoryPlan) else memory.given, len(layers))
        roles = roles_of(binding.model, layers, partial(on_trial, binding), silence=passing.refused is None)
        spec = head_spec(binding.model)
    if sharded:
        passing.refuse_copies()
    handle = binding.handle
    installed = handle.keep(Installed(handle, binding.model, fused=fuse))
    handle.add(installed)
    installed.chain.strict = isinstance(given, MemoryPlan) or given.layers is not None
    compiled = compilations()
    for layer, own in zip(layers, roles, strict=True):
        runner = LayerRunner(binding, layer.forward)
        units = [
            _install_unit(installed, runner, layer, role, _fused(layer, role, compiled) if fuse else None)
            for role in own
        ]
        if fuse:
            _fuse_attention(installed, layer, compiled)
        installed.runners.append(runner)
        installed.layers.append(Layer(layer, runner, installed.chain, "keep", len(installed.layers), units=units))
        handle.replace_method(layer, "forward", installed.layers[-1])
    for stack, role in around:
        fused = _fused(stack, role, compiled) if fuse else None
        _install_unit(installed, LayerRunner(binding, stack.forward), stack, role, fused)
    _install_head(installed, spec, fuse=fuse)
    if isinstance(memory, AutoMemory):
        installed.auto = handle.keep(memory)
        handle.explain = memory.out_of_memory
        passing.inform(memory, given)
        in_place = spec is not None and spec.scale == 1 and memory.job.loss_in_place
        memory.job = replace(memory.job, whole_logits=spec is None, loss_in_place=in_place)
    if isinstance(given, MemoryPlan):
        installed.apply(given)
    installed.stacks = [m for m in binding.model.modules() if isinstance(m, nn.ModuleList) and set(m) & set(layers)]
    installed.note_parts()
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
    """The unit's compiled code, shared by all layers of the same shape and settings."""
    children = role.children(layer)
    if role.draws or not can_fuse(children):
        return None
    key = (shapes(layer), role, tuple(map(settings, children)), adapters_now(adapted(children)))
    if key not in compiled:
        compiled[key] = Fused.of(layer, role)
    fused: Fused = compiled[key]
    return fused


def _fuse_attention(installed: Installed, layer: nn.Module, compiled: dict[Any, Any]) -> None:
    """The rotary embedding and the norms of an attention; its matrices and its kernel stay as they are."""
    kind = shapes(layer)
    for name, child in layer.named_children():
        forward = fused_rotary(child, compiled)
        if forward is None:
            continue
        installed.handle.replace_method(child, "forward", forward)
        for inner, norm in norms_within(child).items():
            key = (kind, name, inner, settings(norm))
            if key not in compiled:
                compiled[key] = compiled_chain([norm])
            installed.assumed.compiled([norm])
            installed.handle.replace_method(norm, "forward", FusedNorm(norm, compiled[key]))


@contextmanager
def on_trial(binding: Binding, layer: nn.Module, role: UnitRole) -> Iterator[LayerRunner]:
    """Inside, the layer has this one unit, in tiles of two tokens; see `trials.py`."""
    trial, runner = Installed(binding.handle, binding.model), LayerRunner(binding, layer.forward)
    with binding.handle.temporarily():
        _install_unit(trial, runner, layer, role)
        try:
            yield runner
        finally:
            runner.aside.clear()


def _install_unit(
    installed: Installed, runner: LayerRunner, layer: nn.Module, role: UnitRole, fused: Fused | None = None
) -> Unit:
    children = role.children(layer)
    main = layer.get_submodule(role.main)
    router, index = router_of(installed.model, main)
    fused = None if router else fused
    forward = UnitForward(children, [c.forward for c in children], router, index, fused)
    split = None if fused is None else fused.split
    backward = None if split is None else UnitBackward(role.until_main(layer), split, forward)
    unit = Unit(forward, forward.parameters, tile=2, draws=role.draws, gradients=backward, snapshot=forward.note)
    installed.units.append(unit)
    if not role.draws:
        installed.assumed.drawless(children)
    if fused is not None:
        installed.assumed.compiled(children)
    child = TiledChild(forward, main, runner, unit, role.silent, router is not None)
    for other in children:
        instead = child if other is main else HandThrough(forward, other)
        installed.handle.replace_method(other, "forward", instead)
    return unit
