"""torch.compile for the small token-wise work around the matrix products: norms, activations, rotary embeddings.

Left to eager, those are a fifth of a step at 32K tokens. A unit's children are compiled as one function of their
weights and a tile, so one compilation serves every layer of the same shape; a tile of another length (the tail) runs
eagerly, so that no new length ever waits for the compiler. Rotary embeddings are compiled by giving a layer's
attention its own forward, the same code with the compiled function in place of transformers' one: nothing outside
this model changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_ROTARY = "apply_rotary_pos_emb"

Chain = Callable[[list[dict[str, Tensor]], Tensor], Any]


def compiled_chain(children: list[nn.Module]) -> Chain:
    """The children one after another, compiled; called with their weights, by name, and a tile."""
    # Skeletons without weights: the real modules will have other forwards, and weights that FSDP2 swaps.
    skeletons = [copy.deepcopy(child).to("meta") for child in children]

    def chain(weights: list[dict[str, Tensor]], x_BtC: Tensor) -> Any:
        given: Any = x_BtC
        for skeleton, own in zip(skeletons, weights, strict=True):
            given = functional_call(skeleton, own, (given,))
        return given

    return torch.compile(_with_own_code(chain), dynamic=False)


def _with_own_code(function: Any) -> Any:
    """The same function as a code object of its own: dynamo counts recompilations by code, and gives up at eight."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def weights_of(children: list[nn.Module]) -> list[dict[str, Tensor]]:
    """What a compiled chain is called with: every parameter and buffer as it is just now."""
    return [dict(child.named_parameters()) | dict(child.named_buffers()) for child in children]


def can_fuse(children: list[nn.Module]) -> bool:
    """Not where numbers are drawn: a compiled graph draws others than an eager one."""
    drawn = (module for child in children for module in child.modules())
    return not any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in drawn)


def fused_rotary(attention: nn.Module, compiled: dict[Any, Any]) -> MethodType | None:
    """The attention's forward with its rotary embedding compiled, or None where it has none by that name."""
    forward: Any = attention.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType) or _ROTARY not in function.__code__.co_names:
        return None
    rotary = function.__globals__[_ROTARY]
    if rotary not in compiled:
        compiled[rotary] = torch.compile(rotary, dynamic=True)
    renamed = function.__globals__ | {_ROTARY: compiled[rotary]}
    own = FunctionType(function.__code__, renamed, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return MethodType(own, attention)
