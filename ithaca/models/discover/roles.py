"""What the parts of a decoder layer do, found by watching one run rather than by class names.

A direct child that takes one tensor and treats every token alone (`dependence.py`) is token-wise: with matrices it is an
MLP or an expert block, without it is a norm. A norm whose output nothing but an MLP reads, and a norm that alone reads an
MLP's output, belong to that MLP: the three become one unit. A unit is silent if its value merely joins the residual
stream, so that a replay need not compute it: that too is tried, by zeroing the value and comparing every gradient. Where
an MLP's output is that of a module inside it, its last matrix as a rule, backward can do without that product's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PreTrainedModel

from ithaca.memory.layer_arguments import Arguments
from ithaca.memory.random_state import Rng
from ithaca.models.discover.dependence import is_tokenwise, read_elsewhere
from ithaca.models.layers.module_attributes import dropping, settings

TOKENS = 4


@dataclass(frozen=True, slots=True)
class UnitRole:
    """Children, by name and in the order they run, that are one token-wise unit; `main` is where it is called, `end`
    the module inside `main`, if any, whose output is the unit's. `draws`: random numbers, in training."""

    names: tuple[str, ...]
    main: str
    wide: bool
    draws: bool = False
    silent: bool = False
    end: str | None = None

    def children(self, layer: nn.Module) -> list[nn.Module]:
        return [layer.get_submodule(name) for name in self.names]

    def until_main(self, layer: nn.Module) -> list[nn.Module]:
        return self.children(layer)[: self.names.index(self.main) + 1]


@dataclass(frozen=True, eq=False)
class _Seen:
    """One call of a child: what went in and what came out, by identity. `entered`: how often each tensor of this and of
    earlier calls had been written to by then, `left`: how often the output had when it came."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    entered: dict[int, int]
    left: int

    @property
    def first(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple) else self.output

    @cached_property
    def draws(self) -> bool:
        """Whether random numbers are drawn in training, by a dropout or by anything else. A dropout that is not used
        may be yet, as that of an adapter that is off."""
        if dropping(self.module) is not None:
            return True
        rng = Rng(self.args[0].device)
        with torch.no_grad(), switched(self.module, training=True), rng.again():
            self.module(*self.args)
            return rng.moved()


def signature(layer: nn.Module) -> tuple[Any, ...]:
    """Layers with equal signatures have equal roles."""
    return (shapes(layer), settings(layer, places=False))


def shapes(layer: nn.Module) -> tuple[Any, ...]:
    """Weights of one layer fit another with equal shapes."""
    return (type(layer).__name__, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))


def layer_arguments(model: PreTrainedModel, layers: list[nn.Module]) -> dict[int, tuple[Any, Any]]:
    """What the model passes to the first layer of each signature, in a run of a few tokens that ends there."""
    wanted = {signature(layer): index for index, layer in reversed(list(enumerate(layers)))}
    found: dict[int, tuple[Any, Any]] = {}
    handles = []

    class Enough(Exception):
        """All were seen; the rest of the model need not run."""

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Layers after this one may put more into what they all share.
            own = Arguments.of(args, kwargs)[0].run_with([], [])
            found[index] = (own.args, own.kwargs)
            if len(found) == len(wanted):
                raise Enough

        return hook

    for index in wanted.values():
        handles.append(layers[index].register_forward_pre_hook(watch(index), with_kwargs=True))
    ids = few_tokens(model)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


def few_tokens(model: PreTrainedModel) -> torch.Tensor:
    """[1, TOKENS], of which even the smallest vocabulary has every one."""
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    return ids % int(model.config.get_text_config().vocab_size)


def norms_around(model: PreTrainedModel, layers: list[nn.Module]) -> list[tuple[nn.Module, UnitRole]]:
    """Token-wise modules without matrices beside the layers, such as the norm after the last, and where they hang."""
    stack = next(m for m in model.modules() if any(layers[0] in list(c) for c in _lists(m)))
    ids = few_tokens(model)
    calls: list[_Seen] = []
    with torch.no_grad(), _hooks(stack, calls):
        model(input_ids=ids, use_cache=False)
    names = [call.name for call in calls]
    once = [c for c in calls if names.count(c.name) == 1 and not _has_matrices(c.module)]
    return [(stack, UnitRole((c.name,), c.name, wide=False)) for c in once if _is_tokenwise(c) and not c.draws]


def _lists(module: nn.Module) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList)]


def find_units(layer: nn.Module, args: Any, kwargs: Any) -> list[UnitRole]:
    """The token-wise units of a layer, from watching it run."""
    seen = list(_watch(layer, args, kwargs))
    tokenwise = [call for call in seen if _is_tokenwise(call)]
    units: list[UnitRole] = []
    taken: set[str] = set()
    for call in (c for c in tokenwise if _has_matrices(c.module)):
        norms = [c for c in tokenwise if not _has_matrices(c.module)]
        before = next((c for c in norms if c.first is call.args[0]), None)
        after = next((c for c in norms if c.args[0] is call.first), None)
        if before is not None and not _hands_on(seen, before, call, layer, args, kwargs):
            before = None
        if after is not None and not _hands_on(seen, call, after, layer, args, kwargs):
            after = None
        parts = [c for c in (before, call, after) if c is not None]
        names, drawn = tuple(c.name for c in parts), any(c.draws for c in parts)
        end = None if drawn or (after is not None and not _hands_through(after)) else _end(call)
        units.append(UnitRole(names, call.name, wide=True, draws=drawn, end=end))
        taken |= set(names)
    units += [UnitRole((c.name,), c.name, wide=False) for c in tokenwise if c.name not in taken and not c.draws]
    return units


def _hands_on(seen: list[_Seen], giver: _Seen, reader: _Seen, layer: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if what `giver` gives goes to `reader` alone, and neither that nor what it was made from is written to
    between the two: then one of them can do the work of both."""
    if isinstance(giver.output, tuple):
        return False
    readers = [c.name for c in seen if any(x is giver.first for x in tree_flatten((c.args, c.kwargs))[0])]
    made_from, given = giver.args[0], giver.first
    unwritten = (
        reader.entered[id(given)] == giver.left and reader.entered[id(made_from)] == giver.entered[id(made_from)]
    )
    if readers != [reader.name] or not unwritten:
        return False
    return not read_elsewhere(layer, args, kwargs, giver.module, reader.module, reader.output)


@contextmanager
def _hooks(layer: nn.Module, calls: list[_Seen]) -> Iterator[None]:
    handles: list[Any] = []
    entered: dict[str, dict[int, int]] = {}
    for name, child in layer.named_children():

        def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            held = tree_flatten((args, kwargs, [(call.args, call.output) for call in calls]))[0]
            entered[name] = {id(x): x._version for x in held if isinstance(x, Tensor)}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            left = first._version if isinstance(first, Tensor) else 0
            calls.append(_Seen(name, module, args, kwargs, output, entered[name], left))

        handles.append(child.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(child.register_forward_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(layer: nn.Module, args: Any, kwargs: Any) -> list[_Seen]:
    calls: list[_Seen] = []
    with torch.no_grad(), _hooks(layer, calls):
        layer(*args, **kwargs)
    names = [call.name for call in calls]
    # A child that runs twice in a layer is nobody's unit.
    return [call for call in calls if names.count(call.name) == 1]


def _hands_through(call: _Seen) -> bool:
    """A dropout that drops nothing, for one."""
    if isinstance(call.module, nn.Identity | nn.modules.dropout._DropoutNd):
        return dropping(call.module) is None
    return call.first is call.args[0] and call.left == call.entered[id(call.first)]


def _end(call: _Seen) -> str | None:
    """The outermost module inside this one that takes a tensor and whose output, never written to, is this one's."""
    calls: list[tuple[str, bool, Any, int]] = []
    handles = []
    for name, inner in call.module.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            plain = not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() == 3
            calls.append((name, plain, output, output._version if isinstance(output, Tensor) else 0))

        if name and _has_matrices(inner):
            handles.append(inner.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            given = call.module(*call.args)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, *_ in calls]
    ends = [
        name
        for name, plain, output, version in calls
        if plain and output is given and output._version == version and names.count(name) == 1
    ]
    return min(ends, key=len, default=None)


def _has_matrices(module: nn.Module) -> bool:
    return any(p.dim() > 1 for p in module.parameters())


def _is_tokenwise(call: _Seen) -> bool:
    """One floating `[B, t, C]` in, one of the same shape out first, and every token for itself."""
    alone = len(call.args) == 1 and all(value is None for value in call.kwargs.values())
    x = call.args[0] if call.args else None
    if not alone or not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(call.first, Tensor):
        return False
    if call.first.shape != x.shape or not x.is_floating_point():
        return False
    # What draws is judged as it is when it does not.
    with switched(call.module, training=False) if call.draws else nullcontext():
        return is_tokenwise(call.module, x)


@contextmanager
def switched(module: nn.Module, *, training: bool) -> Iterator[None]:
    before = {inner: inner.training for inner in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


def gradients(layer: nn.Module, args: Any, kwargs: Any, weigh: Tensor) -> list[Tensor]:
    """Gradients of the layer's inputs and of every parameter, frozen or not, for a fixed gradient of its output."""
    swapped = _swapped(layer)
    own = [p for p in layer.parameters() if p.is_floating_point() and (p.requires_grad or p not in swapped)]
    with torch.enable_grad(), _trained(own):
        args, kwargs = tree_map(_leaf, (args, kwargs))
        leaves = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
        # A layer may write into what it is given, and into a leaf it may not.
        args, kwargs = tree_map(_written_to, (args, kwargs))
        output = layer(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        grads = torch.autograd.grad(first, [*leaves, *own], weigh, allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in grads]


def _swapped(layer: nn.Module) -> set[nn.Parameter]:
    """Frozen weights that PEFT takes out and puts back in every run (`target_parameters`): to autograd they change."""
    wrappers = [module for module in layer.modules() if hasattr(module, "parameter_name")]
    return {p for module in wrappers for p in module.parameters() if not p.requires_grad}


@contextmanager
def _trained(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, all of them have gradients: what is frozen now may be trained later."""
    before = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p, trained in zip(parameters, before, strict=True):
            p.requires_grad_(trained)


def drawn(args: Any, kwargs: Any, seed: int) -> tuple[Any, Any]:
    """The same arguments with random hidden states: the first floating `[B, t, C]` among them."""
    leaves, spec = tree_flatten((args, kwargs))
    first = next(
        (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3), None
    )
    if first is not None:
        draw = torch.Generator().manual_seed(seed)
        leaves[first] = torch.randn(leaves[first].shape, generator=draw, dtype=torch.float64).to(leaves[first])
    return tree_unflatten(leaves, spec)


def _leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _written_to(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.requires_grad else x
