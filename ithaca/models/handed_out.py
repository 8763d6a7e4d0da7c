"""Tensors of one shard that leave the model: logits, hidden states, and what a hook on an inner module is shown.

A rank computes them of its own tokens, and gradients of all ranks are summed (`weights="none"`: averaged), so that a mean
taken of them has the wrong gradient and another value on every rank. Each carries a mark, found from a loss by a walk
down its graph; a reduction over ranks notes in its backward that the marks below it are reduced, and a gradient that
arrives without that is refused, before it goes into the model:

    logits (marked) -> the user's sum -> reduce_mean -> loss.backward()      reduce_mean's backward notes the mark
    logits (marked) -> the user's mean ---------------> loss.backward()      refused where the mark stands
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ithaca.errors import UnsupportedError

_KEY = "ithaca_handed_out"
NEVER = -1


@dataclass(eq=False, slots=True)
class Mark:
    """A hook on a tensor of this rank's tokens: its gradient has to come through a reduction over ranks."""

    what: str
    reduced_in: int = NEVER
    free: bool = False

    def __call__(self, gradient: Tensor) -> None:
        if not self.free and self.reduced_in != current_backward():
            raise UnsupportedError(
                f"backward reached {self.what}, of this rank's tokens alone, without a reduction over ranks: sum what you make "
                "of them, and call backward on ithaca.reduce_mean(model, total, count, mesh), alone or added to causal_loss"
            )


def current_backward() -> int:
    """A number of the backward that runs in this thread, -1 outside of one (torch 2.11 to 2.13 have no public name)."""
    return int(torch._C._current_graph_task_id())


def mark(tensor: Tensor, what: str) -> Mark | None:
    """Have the tensor's gradient checked; None where it has none or is a leaf."""
    if not tensor.requires_grad or tensor.grad_fn is None:
        return None
    own = Mark(what)
    tensor.register_hook(own)
    node: Any = tensor.grad_fn
    node.metadata.setdefault(_KEY, []).append(own)
    return own


def mark_copies(tree: Any, what: str) -> tuple[Any, list[Mark]]:
    """The same values with nodes of their own in the graph, marked: the model's own use of them stays unmarked."""
    marks: list[Mark] = []

    def shown(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        copy = value.view_as(value)
        own = mark(copy, what)
        marks.extend([] if own is None else [own])
        return copy

    return tree_map(shown, tree), marks


def mark_output(output: Any) -> Any:
    """What a model gives: the logits (or the summed loss) themselves, everything else as copies."""
    first = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    if isinstance(first, Tensor):
        mark(first, "the logits")

    def shown(value: Any) -> Any:
        return value if value is first else mark_copies(value, "an output")[0]

    return tree_map(shown, output)


def marks_below(tensor: Tensor) -> list[Mark]:
    """The marks that a tensor was computed from, each the first on its way down."""
    found: list[Mark] = []
    seen: set[Any] = set()
    ahead: list[Any] = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = node.metadata.get(_KEY)
        if own:
            found += own
        else:
            ahead += [before for before, _ in node.next_functions]
    return found


def leaves_below(values: Iterable[Any]) -> list[Tensor]:
    """The trained leaves that tensors were computed from without passing a mark."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    ahead: list[Any] = [tensor.grad_fn for tensor in tensors]
    found += [tensor for tensor in tensors if tensor.grad_fn is None]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen or _KEY in node.metadata:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        ahead += [before for before, _ in node.next_functions]
    return found


def reduced(part: Tensor, value: Tensor, factor: float | Tensor) -> Tensor:
    """`value`, which all ranks computed together; its gradient is that of this rank's part, times `factor`."""
    if not part.requires_grad:
        return value
    given: Tensor = _Reduced.apply(part, value, factor, marks_below(part))
    return given


def reducing(marks: Sequence[Mark]) -> None:
    """Note, in the backward of a reduction, that these are reduced."""
    for each in marks:
        each.reduced_in = current_backward()


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, factor: float | Tensor, marks: list[Mark]) -> Tensor:
        ctx.dtype, ctx.factor, ctx.marks = part.dtype, factor, marks
        # No view: callers divide their losses in place.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        reducing(ctx.marks)
        return grad.to(ctx.dtype) * ctx.factor, None, None, None


def with_gradient_times(value: Any, factor: float) -> Any:
    """The same tensor, whose gradient goes back `factor` times as large."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    copy = value.view_as(value)
    copy.register_hook(lambda gradient: gradient * factor)
    return copy
