"""What is put on decoder layers: tiled units in place of their token-wise children, and a replay around each layer.

Only `forward` attributes of module instances are set, so everything comes off again and FSDP2's hooks, which sit on
`__call__`, stay around it: weights are gathered when a layer is replayed, because its backward gathered them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.attention.tape import Anchor, AttentionCall, Tape
from ithaca.errors import UnsupportedError
from ithaca.memory.head_loss import LossSpec
from ithaca.memory.offload import HostStore
from ithaca.memory.replay import Chain, Layer, Outcome
from ithaca.memory.replay_guard import adapters_now
from ithaca.memory.tiles import Unit
from ithaca.models.binding import unsharded
from ithaca.models.bound import LAYOUT, Binding, logger
from ithaca.models.discover.passing import Passing, found_by, watching
from ithaca.models.discover.roles import UnitRole, norms_around, shapes
from ithaca.models.discover.trials import roles_of
from ithaca.models.layers.fuse import FusedNorm, can_fuse, compilations, compiled_chain, fused_rotary, norms_within
from ithaca.models.layers.head import HeadForward, bare_head, head_spec
from ithaca.models.layers.hooks import AROUND_LAYERS, HOOKED_INSIDE, forward_hooked, hooked
from ithaca.models.layers.method_replacement import looks_like
from ithaca.models.layers.module_attributes import Assumed, settings
from ithaca.models.layers.units import Fused, UnitBackward, UnitForward, adapted, router_of
from ithaca.models.planner.plan_in_force import AutoMemory
from ithaca.models.refusals.memory_plans import check_plan
from ithaca.planning.plan import MemoryPlan
from ithaca.sequence.layout import SequenceLayout


@dataclass(eq=False)
class LayerRunner:
    """Runs one decoder layer through its own forward, with a tape for its attention."""

    binding: Binding
    forward: Callable[..., Any]
    keeps: bool = False
    value: bool = True
    aside: list[Tensor] = field(default_factory=list)

    def run(self, args: Any, kwargs: Any, anchors: list[Tensor] | None, *, value: bool) -> Outcome:
        own = kwargs.get(LAYOUT) or self.binding.call
        if own is None:
            try:
                return Outcome(self.forward(*args, **kwargs), [], [])
            finally:
                # transformers gathers those of a whole pass itself.
                self.aside.clear()
        tape = Tape([Anchor.of(anchors)], replaying=True) if anchors else None if self.keeps else Tape()
        call = AttentionCall(own.layout, tape)
        if LAYOUT in kwargs:
            kwargs = {**kwargs, LAYOUT: call}
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
        return Outcome(output, aside, [t for anchor in left for t in anchor.tensors])

    def say_aside(self, tensors: list[Tensor]) -> None:
        self.binding.router_logits += tensors

    def out_of_memory(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        return error if self.binding.memory is None else self.binding.memory.out_of_memory(error)


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


@dataclass(eq=False)
class Installed:
    """What was put on the layers of one model; `remove` takes it off."""

    binding: Binding
    chain: Chain = field(default_factory=Chain)
    layers: list[Layer] = field(default_factory=list)
    runners: list[LayerRunner] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    head: HeadForward | None = None
    store: HostStore | None = None
    auto: AutoMemory | None = None
    replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = field(default_factory=list)
    stacks: list[nn.ModuleList] = field(default_factory=list)
    parts: list[nn.Module] = field(default_factory=list)
    assumed: Assumed = field(default_factory=Assumed)
    passing: Passing = field(default_factory=Passing)
    fused: bool = False
    warned: bool = False

    @property
    def tiles_head(self) -> bool:
        return self.head is not None and self.head.reads_weight

    def apply(self, plan: MemoryPlan) -> None:
        """Put every layer under its mode; between two passes this may change as it likes."""
        check_plan(self.binding.model, [layer.module for layer in self.layers], plan)
        if any(plan.offload) and self.store is None:
            self.store = HostStore(self.binding.mesh.device)
            if self.auto is not None:
                self.auto.store = self.store
        for layer, runner, mode, away in zip(self.layers, self.runners, plan.layers, plan.offload, strict=True):
            layer.mode, layer.store, runner.keeps = mode, self.store if away else None, mode == "keep"
        for unit in self.units:
            unit.tile = plan.mlp_tile
        if self.head is not None:
            self.head.tile = plan.loss_tile
        self.binding.groups = plan.head_groups

    def put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """In place of the module's forward; one that somebody gave this instance comes back with `remove`."""
        if not inspect.ismethod(forward):
            looks_like(forward, module.forward)
        self.replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def begin(self, layout: SequenceLayout | None = None) -> None:
        """A new forward pass: its layers are linked anew, and a plan is made for it where that is left to us."""
        self.chain.begin()
        if self.auto is not None and layout is not None:
            plan = self.auto.plan_for(layout)
            if plan is not None:
                self.apply(plan)
        if layout is not None:
            self._refuse_hooks_between()
            self._warn_of_hooks_inside()

    def note_parts(self) -> None:
        self.parts = self._parts_now()

    def _parts_now(self) -> list[nn.Module]:
        """Of every layer its children, on which units stand; where units are compiled, what is in those too."""
        if self.fused:
            return [module for stack in self.stacks for module in stack.modules()]
        return [module for stack in self.stacks for layer in stack for module in (layer, *layer.children())]

    def refuse_replaced(self) -> None:
        """A unit stands on the modules that were there, a norm hands through to the MLP it had, and on what they did."""
        what = self._replaced() or self.assumed.changed(self.binding.model)
        if what is not None:
            raise UnsupportedError(
                f"{what} after parallelize: do so before it, or call ithaca.unbind(model) and parallelize it again"
            )

    def _replaced(self) -> str | None:
        now = self._parts_now()
        if now == self.parts:
            return None
        new = set(now) - set(self.parts)
        name = next((key for key, module in self.binding.model.named_modules() if module in new), None)
        return f"{name} was put into the model" if name else "modules were taken out of the model's layers"

    def _refuse_hooks_between(self) -> None:
        """A rebuilt input is the output of the layer before: hooks between the two would be passed by."""
        for index, (before, layer) in enumerate(pairwise(self.layers)):
            if layer.mode == "rebuild" and any(hooked(each.module, AROUND_LAYERS) for each in (before, layer)):
                raise UnsupportedError(
                    f"layer {index} or {index + 1} has hooks, and the plan rebuilds the input of layer {index + 1} "
                    "without them: take them off, or pass a MemoryPlan with 'save' or 'recompute' for that layer"
                )

    def _warn_of_hooks_inside(self) -> None:
        again = () if self.warned else (each.module for each in self.layers if each.mode != "keep")
        name = next((name for module in again if (name := forward_hooked(module)) is not None), None)
        if name is not None:
            self.warned = True
            logger.warning(HOOKED_INSIDE, name)

    def out_of_memory(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """The error with an account of the plan in force, where there is one."""
        return error if self.auto is None else self.auto.out_of_memory(error)

    def remove(self) -> None:
        for module, before in reversed(self.replaced):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        self.replaced.clear()
        if self.store is not None:
            self.store.close()


def install_memory(
    binding: Binding, layers: list[nn.Module], memory: MemoryPlan | AutoMemory, *, fuse: bool = False
) -> Installed:
    """Tile the token-wise units of every layer and the head, and put each layer under its mode."""
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
    installed = Installed(binding, fused=fuse)
    installed.passing = passing
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
        installed.put(layer, installed.layers[-1])
    for stack, role in around:
        fused = _fused(stack, role, compiled) if fuse else None
        _install_unit(installed, LayerRunner(binding, stack.forward), stack, role, fused)
    _install_head(installed, spec, fuse=fuse)
    installed.auto = None if isinstance(memory, MemoryPlan) else memory
    if installed.auto is not None:
        passing.inform(installed.auto, given)
        in_place = spec is not None and spec.scale == 1 and installed.auto.job.loss_in_place
        installed.auto.job = replace(installed.auto.job, whole_logits=spec is None, loss_in_place=in_place)
    if isinstance(given, MemoryPlan):
        installed.apply(given)
    installed.stacks = [m for m in binding.model.modules() if isinstance(m, nn.ModuleList) and set(m) & set(layers)]
    installed.note_parts()
    binding.memory = installed
    return installed


def _install_head(installed: Installed, spec: LossSpec | None, *, fuse: bool) -> None:
    model = installed.binding.model
    if spec is not None:
        head = bare_head(model)
        installed.head = HeadForward(model, head, model.forward, 1024, spec, fuse, installed.out_of_memory)
        installed.put(model, installed.head)
    elif installed.binding.mesh.rank == 0:
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
        installed.put(child, forward)
        for inner, norm in norms_within(child).items():
            key = (kind, name, inner, settings(norm))
            if key not in compiled:
                compiled[key] = compiled_chain([norm])
            installed.assumed.compiled([norm])
            installed.put(norm, FusedNorm(norm, compiled[key]))


@contextmanager
def on_trial(binding: Binding, layer: nn.Module, role: UnitRole) -> Iterator[LayerRunner]:
    """Inside, the layer has this one unit, in tiles of two tokens; see `trials.py`."""
    trial, runner = Installed(binding), LayerRunner(binding, layer.forward)
    _install_unit(trial, runner, layer, role)
    try:
        yield runner
    finally:
        trial.remove()
        runner.aside.clear()


def _install_unit(
    installed: Installed, runner: LayerRunner, layer: nn.Module, role: UnitRole, fused: Fused | None = None
) -> Unit:
    children = role.children(layer)
    main = layer.get_submodule(role.main)
    router, index = router_of(installed.binding.model, main)
    fused = None if router else fused
    forward = UnitForward(children, [c.forward for c in children], router, index, fused)
    split = None if fused is None else fused.split
    backward = None if split is None else UnitBackward(role.until_main(layer), split, forward)
    unit = Unit(forward, forward.parameters, tile=2, draws=role.draws, gradients=backward, note=forward.note)
    installed.units.append(unit)
    if not role.draws:
        installed.assumed.drawless(children)
    if fused is not None:
        installed.assumed.compiled(children)
    child = TiledChild(forward, main, runner, unit, role.silent, router is not None)
    for other in children:
        installed.put(other, child if other is main else HandThrough(forward, other))
    return unit
