"""torch.compile for the small token-wise work around the matrix products: norms, activations, rotary embeddings.

Left to eager, those are a fifth of a step at 32K tokens. A unit's children are compiled as one function of their
weights and a tile, so one compilation serves every layer of the same shape; the number of tokens is left open, so that
no new length ever waits for the compiler. Backward through a unit that ends in a product has no use for that product's
value: what comes before is compiled as a function of its own, and so is the way back through the product, from which
the compiler drops the value. Rotary embeddings are compiled by giving a layer's attention its own forward, the same
code with the compiled function in place of transformers' one: nothing outside this model changes. Norms of queries and
keys, which eager would keep in fp32, are compiled where they stand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call
from torch.utils._pytree import tree_map

from ithaca.models.discover.dependence import is_tokenwise, rounding
from ithaca.models.layers.hooks import drop_hooks
from ithaca.models.layers.module_attributes import dropping

_ROTARY = "apply_rotary_pos_emb"

Weights = dict[str, Tensor]
Chain = Callable[[list[Weights], Tensor], Any]
# Called with a module's trained weights, its others, its input and its output's gradient; gives gradients of the first
# and the third.
WayBack = Callable[[Weights, Weights, Tensor, Tensor], tuple[Weights, Tensor]]

_SHARED: ContextVar[dict[Any, Any] | None] = ContextVar("compiled by several models", default=None)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Models of one config that are parallelized inside share the code that is compiled for them; one in another is
    the same."""
    token = _SHARED.set({} if (outer := _SHARED.get()) is None else outer)
    try:
        yield
    finally:
        _SHARED.reset(token)


def compilations() -> dict[Any, Any]:
    """Where a model's compiled code goes, by the shape of what it is of."""
    shared = _SHARED.get()
    return {} if shared is None else shared


def compiled_chain(children: list[nn.Module], *, before: str | None = None) -> Chain:
    """The children one after another, compiled; called with their weights, by name, and a tile.

    `before`: the module inside the last child that the output comes from; then what goes into that is the output.
    """
    skeletons = [_skeleton(child) for child in children]
    if before is not None:
        skeletons[-1].get_submodule(before).__dict__["forward"] = _hand_through

    def chain(weights: list[Weights], x_BtC: Tensor) -> Any:
        given: Any = x_BtC
        for skeleton, own in zip(skeletons, weights, strict=True):
            given = functional_call(skeleton, own, (given,))
        return given

    fused = torch.compile(_with_own_code(chain))

    def by_tokens(weights: list[Weights], x_BtC: Tensor) -> Any:
        given = fused(weights, _one_row(x_BtC))
        return tree_map(lambda y: y.view(*x_BtC.shape[:-1], *y.shape[2:]) if y.ndim > 2 else y, given)

    return by_tokens


def compiled_way_back(module: nn.Module) -> WayBack:
    """From the gradient of the module's output to those of its weights and its input, its value left out."""
    skeleton = _skeleton(module)

    def way_back(trained: Weights, others: Weights, x_1TC: Tensor, dout_1TC: Tensor) -> tuple[Weights, Tensor]:
        def value(trained: Weights, x_1TC: Tensor) -> Any:
            return functional_call(skeleton, others | trained, (x_1TC,))

        back: Any = torch.func.vjp(value, trained, x_1TC)[1]
        gradients: tuple[Weights, Tensor] = back(dout_1TC)
        return gradients

    fused = torch.compile(_with_own_code(way_back))

    def by_tokens(trained: Weights, others: Weights, x_BtC: Tensor, dout_BtC: Tensor) -> tuple[Weights, Tensor]:
        of_weights, dx_1TC = fused(trained, others, _one_row(x_BtC), _one_row(dout_BtC))
        return of_weights, dx_1TC.view(x_BtC.shape)

    return by_tokens


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _one_row(x_BtC: Tensor) -> Tensor:
    x_1TC = _rows(x_BtC)
    torch._dynamo.maybe_mark_dynamic(x_1TC, 1)
    # A view's code is guarded by the strides of what it is a view of, where the number of tokens is too.
    base = x_1TC._base
    for dim in range(0 if base is None else base.ndim - 1):
        torch._dynamo.maybe_mark_dynamic(base, dim)
    return x_1TC


def _hand_through(x: Tensor) -> Tensor:
    return x


def _skeleton(module: nn.Module) -> nn.Module:
    """The module without its weights and hooks: the real one will have another forward, and weights that FSDP2 swaps;
    hooks run where it is called, and the compiled code serves other layers too.

    Not a deep copy: what else hangs on a module (a config, and on it the whole model) must not be copied.
    """
    bare = copy.copy(module)
    bare._parameters = {n: None if p is None else nn.Parameter(p.to("meta")) for n, p in module._parameters.items()}
    bare._buffers = {n: None if b is None else b.to("meta") for n, b in module._buffers.items()}
    bare._modules = {n: None if m is None else _skeleton(m) for n, m in module._modules.items()}
    drop_hooks([bare])
    return bare


def _with_own_code(function: Any) -> Any:
    """The same function as a code object of its own: dynamo counts recompilations by code, and gives up at eight."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def weights_of(children: list[nn.Module]) -> list[Weights]:
    """What a compiled chain is called with: every parameter and buffer as it is just now."""
    return [
        dict(child.named_parameters(remove_duplicate=False)) | dict(child.named_buffers(remove_duplicate=False))
        for child in children
    ]


def can_fuse(children: list[nn.Module]) -> bool:
    """Not where numbers are drawn: a compiled graph draws others than an eager one. Nor where an instance was given a
    forward, which is of that instance and its weights, or a weight has two names, whose gradients would be apart."""
    if any("forward" in module.__dict__ for child in children for module in child.modules()):
        return False
    names = [name for child in children for name, _ in child.named_parameters(remove_duplicate=False)]
    if len(names) > len({p for child in children for p in child.parameters()}):
        return False
    return all(dropping(child) is None for child in children)


def norms_within(attention: nn.Module) -> dict[str, nn.Module]:
    """Children of an attention that have vectors and nothing else: its norms of queries, keys or latents."""
    return {
        name: child
        for name, child in attention.named_children()
        if any(True for _ in child.parameters())
        and all(p.ndim == 1 for p in child.parameters())
        and can_fuse([child])
        and _norms_rows(child)
    }


def _norms_rows(norm: nn.Module) -> bool:
    """True if the norm treats every `[C]` alone, whatever stands before it: heads and tokens are laid into one row."""
    sizes, weight = {p.numel() for p in norm.parameters()}, next(norm.parameters())
    if len(sizes) > 1:
        return False
    x = torch.randn(2, 3, 4, *sizes, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        try:
            apart, together = norm(x), norm(_rows(x))
            if not isinstance(apart, Tensor) or apart.shape != x.shape or not is_tokenwise(norm, x[0]):
                return False
        except (RuntimeError, ValueError, TypeError, IndexError):
            # Of another width, or of heads: it is left as it is.
            return False
    off = (apart - together.view_as(x)).double().norm()
    return bool(off <= rounding(norm, x) * apart.double().norm())


@dataclass(eq=False)
class FusedNorm:
    """A norm of `[..., C]`, compiled; heads before tokens, as a transposed view has them, are not copied."""

    norm: nn.Module
    chain: Chain

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and not x.is_contiguous():
            turned: Tensor = self.chain(weights_of([self.norm]), x.transpose(1, 2)).transpose(1, 2)
            return turned
        normed: Tensor = self.chain(weights_of([self.norm]), x)
        return normed


def fused_rotary(attention: nn.Module, compiled: dict[Any, Any]) -> MethodType | None:
    """The attention's forward with its rotary embedding compiled, or None where it has none by that name."""
    forward: Any = attention.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType) or _ROTARY not in function.__code__.co_names:
        return None
    rotary = function.__globals__[_ROTARY]
    if rotary not in compiled:
        compiled[rotary] = _by_tokens(rotary)
    renamed = function.__globals__ | {_ROTARY: compiled[rotary]}
    own = FunctionType(function.__code__, renamed, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(own, function)
    return MethodType(own, attention)


def _by_tokens(rotary: Callable[..., Any]) -> Callable[..., Any]:
    """`rotary(q_BHLD, k_BHLD, cos_BLD, sin_BLD)`, compiled with tokens as the outermost dimension and alone left open.

    Then one compilation serves all lengths, and no element's place takes a division by an unknown size.
    """
    fused = torch.compile(_with_own_code(rotary))
    tried: dict[tuple[int, ...], bool] = {}

    def by_tokens(*args: Any, **kwargs: Any) -> Any:
        if kwargs or [getattr(x, "ndim", 0) for x in args] != [4, 4, 3, 3] or args[0].shape[2] != args[2].shape[1]:
            return rotary(*args, **kwargs)
        sizes = tuple(x.shape[-1] for x in args)
        if sizes not in tried:
            tried[sizes] = _turns_tokens(rotary, sizes)
        if not tried[sizes]:
            return rotary(*args)
        return _turned(fused, *args)

    return by_tokens


def _turned(rotary: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    rows, length = q.shape[0], q.shape[2]
    tokens = [x.transpose(1, 2).reshape(-1, x.shape[1], 1, x.shape[3]) for x in (q, k)]
    angles = [x.expand(rows, -1, -1).reshape(-1, 1, x.shape[2]) for x in (cos, sin)]
    for x in (*tokens, *angles):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    turned = rotary(*tokens, *angles)
    return tuple(x.view(rows, length, *x.shape[1:2], *x.shape[3:]).transpose(1, 2) for x in turned)


def _turns_tokens(rotary: Callable[..., Any], sizes: tuple[int, ...]) -> bool:
    """True if the rotation of each token alone is, to the bit, that of all: as many heads as tokens tell a function apart
    that takes one for the other."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 3), (2, 3, 3), (2, 3), (2, 3)]
    with unset_fake_temporarily(), torch.no_grad():
        given = [torch.randn(*shape, size, generator=draw) for shape, size in zip(shapes, sizes, strict=True)]
        pairs = zip(rotary(*given), _turned(rotary, *given), strict=True)
        return all(torch.equal(whole, alone) for whole, alone in pairs)
