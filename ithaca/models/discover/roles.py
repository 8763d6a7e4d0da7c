"""Roles of a decoder layer's children, found by recording one run of the layer rather than by class names.

    LlamaDecoderLayer
      input_layernorm           token-wise, no matrices         UnitRole(("input_layernorm",), wide=False)
      self_attn                 reads other tokens              no role
      post_attention_layernorm  token-wise, read by mlp alone   }
      mlp                       token-wise, has matrices        } one UnitRole, wide=True, main="mlp", end="down_proj"

A direct child is token-wise if the child takes one tensor and no output token depends on another token
(`dependence.py`). A token-wise child with matrices is an MLP or an expert block; a token-wise child without is a norm.
A norm before an MLP joins the MLP's unit if the MLP is the norm's only reader. A norm after an MLP joins if the norm is
the MLP's only reader.

A unit is *silent* if its output is only added to the residual stream, so that a replay can skip the output. Trials with
a zeroed output decide (`trials.py`). A unit's *end* is the inner module, usually the last matrix, whose output is the
unit's output: backward needs no value of that product.
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
from ithaca.models.discover.dependence import has_other_readers, is_tokenwise
from ithaca.models.layers.module_attributes import dropping, settings

TOKENS = 4


@dataclass(frozen=True, slots=True)
class UnitRole:
    """Children of a layer that form one token-wise unit.

    `names`: the children in the order they run. `main`: the child whose call runs the unit. `wide`: the unit has matrices.
    `draws`: the unit draws random numbers in training. `end`: the module inside `main`, if any, whose output is the
    output of `main`.
    """

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
class _ChildCall:
    """A recorded call of a child: its arguments and output, compared by identity.

    `entry_versions`: the version counter, at entry, of each tensor of this call and of earlier calls. `exit_version`: the
    version counter of the output at exit. Equal versions mean that nothing was written in place in between.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    entry_versions: dict[int, int]
    exit_version: int

    @property
    def first(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple) else self.output

    @cached_property
    def draws(self) -> bool:
        """True if the module draws random numbers in training, in a dropout or elsewhere."""
        # A dropout that this run skips may run later: the dropout of a disabled adapter, for instance.
        if dropping(self.module) is not None:
            return True
        rng = Rng(self.args[0].device)
        with torch.no_grad(), training_mode(self.module, training=True), rng.again():
            self.module(*self.args)
            return rng.moved()


def signature(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key of the layer's code, shapes and settings: layers with equal signatures have equal roles."""
    return (shapes(layer), settings(layer, with_layer_index=False))


def shapes(layer: nn.Module) -> tuple[Any, ...]:
    """Return the layer's class name and parameter shapes: weights of one layer fit another with equal shapes."""
    return (type(layer).__name__, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))


def layer_arguments(model: PreTrainedModel, layers: list[nn.Module]) -> dict[int, tuple[Any, Any]]:
    """Return the arguments of the first layer of each signature, by layer index, from a run of a few tokens."""
    first_layers = {signature(layer): index for index, layer in reversed(list(enumerate(layers)))}
    found: dict[int, tuple[Any, Any]] = {}
    handles = []

    class AllRecorded(Exception):
        """Ends the model's forward once the arguments of every signature are recorded."""

    def recorder(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A copy of the containers: later layers may add entries to a dict that all layers share.
            own = Arguments.of(args, kwargs)[0].run_with([], [])
            found[index] = (own.args, own.kwargs)
            if len(found) == len(first_layers):
                raise AllRecorded

        return hook

    for index in first_layers.values():
        handles.append(layers[index].register_forward_pre_hook(recorder(index), with_kwargs=True))
    try:
        with torch.no_grad():
            model(input_ids=few_tokens(model), use_cache=False)
    except AllRecorded:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


def few_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Return token ids of shape `[1, TOKENS]`, all inside the model's vocabulary."""
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    return ids % int(model.config.get_text_config().vocab_size)


def norms_around(model: PreTrainedModel, layers: list[nn.Module]) -> list[tuple[nn.Module, UnitRole]]:
    """Return the norms that are siblings of the layers, such as the final norm, each with its parent module."""
    stack = next(
        m
        for m in model.modules()
        if any(isinstance(child, nn.ModuleList) and layers[0] in list(child) for child in m.children())
    )
    calls: list[_ChildCall] = []
    with torch.no_grad(), _recording(stack, calls):
        model(input_ids=few_tokens(model), use_cache=False)
    norms = [call for call in _called_once(calls) if not _has_matrices(call.module)]
    return [(stack, UnitRole((c.name,), c.name, wide=False)) for c in norms if _is_tokenwise(c) and not c.draws]


def find_units(layer: nn.Module, args: Any, kwargs: Any) -> list[UnitRole]:
    """Return the token-wise units of a layer, found in one recorded run."""
    recorded: list[_ChildCall] = []
    with torch.no_grad(), _recording(layer, recorded):
        layer(*args, **kwargs)
    calls = _called_once(recorded)
    tokenwise = [call for call in calls if _is_tokenwise(call)]
    units: list[UnitRole] = []
    in_units: set[str] = set()
    for call in (c for c in tokenwise if _has_matrices(c.module)):
        norms = [c for c in tokenwise if not _has_matrices(c.module)]
        before = next((c for c in norms if c.first is call.args[0]), None)
        after = next((c for c in norms if c.args[0] is call.first), None)
        if before is not None and not _is_only_reader(call, before, calls, layer, args, kwargs):
            before = None
        if after is not None and not _is_only_reader(after, call, calls, layer, args, kwargs):
            after = None
        parts = [c for c in (before, call, after) if c is not None]
        names, draws = tuple(c.name for c in parts), any(c.draws for c in parts)
        end = None if draws or (after is not None and not _is_identity(after)) else _output_module(call)
        units.append(UnitRole(names, call.name, wide=True, draws=draws, end=end))
        in_units |= set(names)
    units += [UnitRole((c.name,), c.name, wide=False) for c in tokenwise if c.name not in in_units and not c.draws]
    return units


def _is_only_reader(
    reader: _ChildCall, producer: _ChildCall, calls: list[_ChildCall], layer: nn.Module, args: Any, kwargs: Any
) -> bool:
    """True if nothing but `reader` reads the output of `producer`, so that one of the two can run both."""
    if isinstance(producer.output, tuple):
        return False
    readers = [c.name for c in calls if any(x is producer.first for x in tree_flatten((c.args, c.kwargs))[0])]
    source, output = producer.args[0], producer.first
    # A write in place to the producer's input or output between the two calls would be lost.
    unwritten = (
        reader.entry_versions[id(output)] == producer.exit_version
        and reader.entry_versions[id(source)] == producer.entry_versions[id(source)]
    )
    if readers != [reader.name] or not unwritten:
        return False
    return not has_other_readers(layer, args, kwargs, producer.module, reader.module, reader.output)


@contextmanager
def _recording(layer: nn.Module, calls: list[_ChildCall]) -> Iterator[None]:
    """Inside, every call of a direct child of `layer` is appended to `calls`."""
    handles: list[Any] = []
    entry_versions: dict[str, dict[int, int]] = {}
    for name, child in layer.named_children():

        def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            held = tree_flatten((args, kwargs, [(call.args, call.output) for call in calls]))[0]
            entry_versions[name] = {id(x): x._version for x in held if isinstance(x, Tensor)}

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            version = first._version if isinstance(first, Tensor) else 0
            calls.append(_ChildCall(name, module, args, kwargs, output, entry_versions[name], version))

        handles.append(child.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(child.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called_once(calls: list[_ChildCall]) -> list[_ChildCall]:
    """Return the calls of children that ran once: a child that a layer runs twice belongs to no unit."""
    names = [call.name for call in calls]
    return [call for call in calls if names.count(call.name) == 1]


def _is_identity(call: _ChildCall) -> bool:
    """True if the call returned its input unchanged, as a dropout of probability 0 does."""
    if isinstance(call.module, nn.Identity | nn.modules.dropout._DropoutNd):
        return dropping(call.module) is None
    return call.first is call.args[0] and call.exit_version == call.entry_versions[id(call.first)]


def _output_module(call: _ChildCall) -> str | None:
    """Return the path of the outermost inner module whose output is the call's output; None if there is none."""
    calls: list[tuple[str, bool, Any, int]] = []
    handles = []
    for name, inner in call.module.named_modules():

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            plain = not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() == 3
            calls.append((name, plain, output, output._version if isinstance(output, Tensor) else 0))

        if name and _has_matrices(inner):
            handles.append(inner.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad():
            result = call.module(*call.args)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, *_ in calls]
    # The same tensor with the same version: a product that is scaled in place afterwards is not the output.
    ends = [
        name
        for name, plain, output, version in calls
        if plain and output is result and output._version == version and names.count(name) == 1
    ]
    return min(ends, key=len, default=None)


def _has_matrices(module: nn.Module) -> bool:
    return any(p.dim() > 1 for p in module.parameters())


def _is_tokenwise(call: _ChildCall) -> bool:
    """True if the module maps one `[B, t, C]` to one of the same shape, token by token; further outputs may follow."""
    one_argument = len(call.args) == 1 and all(value is None for value in call.kwargs.values())
    x = call.args[0] if call.args else None
    if not one_argument or not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(call.first, Tensor):
        return False
    if call.first.shape != x.shape or not x.is_floating_point():
        return False
    # Random numbers differ from run to run, so a module that draws them is compared in evaluation mode.
    with training_mode(call.module, training=False) if call.draws else nullcontext():
        return is_tokenwise(call.module, x)


@contextmanager
def training_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the module and its inner modules are in training (or evaluation) mode; each gets its own mode back."""
    before = {inner: inner.training for inner in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


def gradients(layer: nn.Module, args: Any, kwargs: Any, dout: Tensor) -> list[Tensor]:
    """Return the gradients of the layer's inputs and of every parameter, frozen or not, for the output gradient `dout`."""
    # PEFT takes frozen weights out and puts them back in every run (`target_parameters`): autograd sees them change.
    wrappers = [module for module in layer.modules() if hasattr(module, "parameter_name")]
    swapped = {p for module in wrappers for p in module.parameters() if not p.requires_grad}
    own = [p for p in layer.parameters() if p.is_floating_point() and p not in swapped]
    with torch.enable_grad(), _all_trainable(own):
        args, kwargs = tree_map(_as_leaf, (args, kwargs))
        leaves = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
        # A layer may write in place into its arguments, and autograd refuses such writes to a leaf.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.requires_grad else x, (args, kwargs))
        output = layer(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        grads = torch.autograd.grad(first, [*leaves, *own], dout, allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in grads]


@contextmanager
def _all_trainable(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, every parameter requires a gradient: a parameter that is frozen now may be trained later."""
    before = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p, requires_grad in zip(parameters, before, strict=True):
            p.requires_grad_(requires_grad)


def with_random_hidden(args: Any, kwargs: Any, seed: int) -> tuple[Any, Any]:
    """Return the same arguments with random hidden states: the first floating-point `[B, t, C]` is replaced."""
    leaves, spec = tree_flatten((args, kwargs))
    first = next(
        (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3), None
    )
    if first is not None:
        draw = torch.Generator().manual_seed(seed)
        leaves[first] = torch.randn(leaves[first].shape, generator=draw, dtype=torch.float64).to(leaves[first])
    return tree_unflatten(leaves, spec)


def _as_leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
