"""Boundaries on decoder layers: a call before every layer's forward and before its backward.

All ranks run the same layers in the same order, so they pass the same boundaries. Activation checkpointing recomputes
a layer through its `forward`, not through the module's call, and so makes no boundary.

Invariant: outputs and gradients are untouched, and every hook can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

At = Callable[[str], None]


def put_boundaries(layers: Sequence[nn.Module], at: At) -> Callable[[], None]:
    """Call `at("forward layer 3")` and `at("backward layer 3")` where these begin; return the function that removes this."""
    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(_before, at, f"forward layer {index}")))
        handles.append(layer.register_forward_hook(partial(_after, at, f"backward layer {index}")))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _before(at: At, label: str, _module: nn.Module, _args: Any) -> None:
    at(label)


def _after(at: At, label: str, _module: nn.Module, _args: Any, output: Any) -> None:
    # A hook on the output's gradient: a module's backward hooks would put views around its outputs.
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _grad: at(label))
            return
