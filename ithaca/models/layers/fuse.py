"""torch.compile for the token-wise work around the matrix products: norms, activations, rotary embeddings.

In eager mode this work takes a fifth of a step at 32K tokens. Three things are compiled:

    units     a unit's children as one function of their weights and a tile, so that all layers of one shape share one
              compilation. The number of tokens is dynamic: a new length compiles nothing. For a unit that ends in a
              matrix product, the part before the product and the product's backward are compiled separately: backward
              needs no value of the product, and the compiler drops it
    rotary    a copy of the attention's own forward, in which `apply_rotary_pos_emb` is the compiled function. The change
              affects this model alone, unlike a patch of transformers
    q, k norm each norm inside attention, which eager mode would keep in fp32
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

from ithaca.models.discover.dependence import is_tokenwise, rounding_tolerance
from ithaca.models.layers.hooks import drop_hooks
from ithaca.models.layers.module_attributes import dropping

_ROTARY = "apply_rotary_pos_emb"

Weights = dict[str, Tensor]
Chain = Callable[[list[Weights], Tensor], Any]
# The backward of a module: from (trained weights, other weights, input, output gradient) to the gradients of the trained
# weights and of the input.
ModuleBackward = Callable[[Weights, Weights, Tensor, Tensor], tuple[Weights, Tensor]]

_SHARED: ContextVar[dict[Any, Any] | None] = ContextVar("compiled by several models", default=None)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Inside, all models that are parallelized share compiled code; an inner `compiled_once` uses the outer one's code."""
    token = _SHARED.set({} if (outer := _SHARED.get()) is None else outer)
    try:
        yield
    finally:
        _SHARED.reset(token)


def compilations() -> dict[Any, Any]:
    """Return the cache of compiled code, keyed by shapes and settings: shared inside `compiled_once`, else empty."""
    shared = _SHARED.get()
    return {} if shared is None else shared


def compiled_chain(children: list[nn.Module], *, before: str | None = None) -> Chain:
    """Return a compiled function of (weights by name, tile) that runs the children one after another.

    `before`: a module inside the last child. The compiled function then returns that module's input.
    """
    skeletons = [_without_weights(child) for child in children]
    if before is not None:
        skeletons[-1].get_submodule(before).__dict__["forward"] = _identity

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


def compiled_backward(module: nn.Module) -> ModuleBackward:
    """Return the compiled backward of a module; its output is not computed."""
    skeleton = _without_weights(module)

    def backward(trained: Weights, others: Weights, x_1TC: Tensor, dout_1TC: Tensor) -> tuple[Weights, Tensor]:
        def value(trained: Weights, x_1TC: Tensor) -> Any:
            return functional_call(skeleton, others | trained, (x_1TC,))

        back: Any = torch.func.vjp(value, trained, x_1TC)[1]
        gradients: tuple[Weights, Tensor] = back(dout_1TC)
        return gradients

    fused = torch.compile(_with_own_code(backward))

    def by_tokens(trained: Weights, others: Weights, x_BtC: Tensor, dout_BtC: Tensor) -> tuple[Weights, Tensor]:
        dweights, dx_1TC = fused(trained, others, _one_row(x_BtC), _one_row(dout_BtC))
        return dweights, dx_1TC.view(x_BtC.shape)

    return by_tokens


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _one_row(x_BtC: Tensor) -> Tensor:
    x_1TC = _rows(x_BtC)
    torch._dynamo.maybe_mark_dynamic(x_1TC, 1)
    # dynamo also guards on the strides of a view's base, and the number of tokens is one of its sizes.
    base = x_1TC._base
    for dim in range(0 if base is None else base.ndim - 1):
        torch._dynamo.maybe_mark_dynamic(base, dim)
    return x_1TC


def _identity(x: Tensor) -> Tensor:
    return x


def _without_weights(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the module on the meta device, without hooks.

    The original gets another forward and, under FSDP2, other weights. Hooks run where the compiled code is called, as
    other layers share the code. A deep copy would follow references to a config and from there to the whole model.
    """
    bare = copy.copy(module)
    bare._parameters = {n: None if p is None else nn.Parameter(p.to("meta")) for n, p in module._parameters.items()}
    bare._buffers = {n: None if b is None else b.to("meta") for n, b in module._buffers.items()}
    bare._modules = {n: None if m is None else _without_weights(m) for n, m in module._modules.items()}
    drop_hooks([bare])
    return bare


def _with_own_code(function: Any) -> Any:
    """Return the function with a code object of its own: dynamo counts recompilations per code object, at most eight."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def weights_of(children: list[nn.Module]) -> list[Weights]:
    """Return the children's current parameters and buffers by name, the first argument of a compiled chain."""
    return [
        dict(child.named_parameters(remove_duplicate=False)) | dict(child.named_buffers(remove_duplicate=False))
        for child in children
    ]


def can_fuse(children: list[nn.Module]) -> bool:
    """True if the children can be compiled as one function of their weights."""
    # A forward on an instance may hold references to that instance and its weights.
    if any("forward" in module.__dict__ for child in children for module in child.modules()):
        return False
    # A weight with two names would get two partial gradients.
    names = [name for child in children for name, _ in child.named_parameters(remove_duplicate=False)]
    if len(names) > len({p for child in children for p in child.parameters()}):
        return False
    # Compiled code draws other random numbers than eager code.
    return all(dropping(child) is None for child in children)


def norms_within(attention: nn.Module) -> dict[str, nn.Module]:
    """Return the attention's norms (of queries, keys or latents): the children whose parameters are all vectors."""
    return {
        name: child
        for name, child in attention.named_children()
        if any(True for _ in child.parameters())
        and all(p.ndim == 1 for p in child.parameters())
        and can_fuse([child])
        and _norms_rows(child)
    }


def _norms_rows(norm: nn.Module) -> bool:
    """True if the norm normalises every `[C]` by itself, so that heads and tokens can be flattened into one row."""
    sizes, weight = {p.numel() for p in norm.parameters()}, next(norm.parameters())
    if len(sizes) > 1:
        return False
    x = torch.randn(2, 3, 4, *sizes, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        try:
            separate, flattened = norm(x), norm(_rows(x))
            if not isinstance(separate, Tensor) or separate.shape != x.shape or not is_tokenwise(norm, x[0]):
                return False
        except (RuntimeError, ValueError, TypeError, IndexError):
            # The norm takes another width or a heads dimension, and stays in eager mode.
            return False
    off = (separate - flattened.view_as(x)).double().norm()
    return bool(off <= rounding_tolerance(norm, x) * separate.double().norm())


@dataclass(eq=False)
class FusedNorm:
    """A compiled norm of `[..., C]`, which replaces the forward of one norm; a transposed view is not copied."""

    norm: nn.Module
    chain: Chain

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and not x.is_contiguous():
            # [B, H, L, D] as a view of [B, L, H, D]: the transpose back makes it contiguous.
            transposed: Tensor = self.chain(weights_of([self.norm]), x.transpose(1, 2)).transpose(1, 2)
            return transposed
        normed: Tensor = self.chain(weights_of([self.norm]), x)
        return normed


def fused_rotary(attention: nn.Module, compiled: dict[Any, Any]) -> MethodType | None:
    """Return the attention's forward with a compiled rotary embedding; None if it does not call `apply_rotary_pos_emb`."""
    forward: Any = attention.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType) or _ROTARY not in function.__code__.co_names:
        return None
    rotary = function.__globals__[_ROTARY]
    if rotary not in compiled:
        compiled[rotary] = _rotary_by_tokens(rotary)
    renamed = function.__globals__ | {_ROTARY: compiled[rotary]}
    own = FunctionType(function.__code__, renamed, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(own, function)
    return MethodType(own, attention)


def _rotary_by_tokens(rotary: Callable[..., Any]) -> Callable[..., Any]:
    """Return `rotary(q_BHLD, k_BHLD, cos_BLD, sin_BLD)` compiled with tokens as the first and only dynamic dimension.

    All lengths then share one compilation, and no index needs a division by a size that is unknown at compile time.
    """
    fused = torch.compile(_with_own_code(rotary))
    exact: dict[tuple[int, ...], bool] = {}

    def by_tokens(*args: Any, **kwargs: Any) -> Any:
        if kwargs or [getattr(x, "ndim", 0) for x in args] != [4, 4, 3, 3] or args[0].shape[2] != args[2].shape[1]:
            return rotary(*args, **kwargs)
        sizes = tuple(x.shape[-1] for x in args)
        if sizes not in exact:
            exact[sizes] = _rotates_by_tokens(rotary, sizes)
        if not exact[sizes]:
            return rotary(*args)
        return _rotate_flattened(fused, *args)

    return by_tokens


def _rotate_flattened(
    rotary: Callable[..., Any], q_BHLD: Tensor, k_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor
) -> tuple[Tensor, ...]:
    """Return `rotary`'s q and k, `[B, H, L, D]`, from one call with all T = B * L tokens as rows of one token each."""
    rows, length = q_BHLD.shape[0], q_BHLD.shape[2]
    tokens_TH1D = [x.transpose(1, 2).reshape(-1, x.shape[1], 1, x.shape[3]) for x in (q_BHLD, k_BHLD)]
    angles_T1D = [x.expand(rows, -1, -1).reshape(-1, 1, x.shape[2]) for x in (cos_BLD, sin_BLD)]
    for x in (*tokens_TH1D, *angles_T1D):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    rotated = rotary(*tokens_TH1D, *angles_T1D)
    return tuple(x.view(rows, length, *x.shape[1:2], *x.shape[3:]).transpose(1, 2) for x in rotated)


def _rotates_by_tokens(rotary: Callable[..., Any], sizes: tuple[int, ...]) -> bool:
    """True if rotating each token separately gives, to the bit, the rotation of all tokens together."""
    draw = torch.Generator().manual_seed(0)
    # As many heads as tokens: a function that confuses the two dimensions runs as well, and its result differs.
    shapes = [(2, 3, 3), (2, 3, 3), (2, 3), (2, 3)]
    with unset_fake_temporarily(), torch.no_grad():
        given = [torch.randn(*shape, size, generator=draw) for shape, size in zip(shapes, sizes, strict=True)]
        pairs = zip(rotary(*given), _rotate_flattened(rotary, *given), strict=True)
        return all(torch.equal(whole, single) for whole, single in pairs)
