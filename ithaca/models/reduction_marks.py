"""Marks on the tensors of one shard that leave the model: logits, hidden states, and copies for hooks inside the model.

A rank computes them of its own tokens, and gradients of all ranks are summed (`weights="none"`: averaged). So a mean that
the caller takes of them has the wrong gradient, and another value on every rank. Each tensor carries a mark; a reduction
over ranks walks down the graph of its loss, finds the marks, and sets them in its backward. A gradient that arrives at a
mark that is not set is refused before it enters the model:

    logits (marked) -> the caller's sum -> reduce_mean -> loss.backward()      reduce_mean's backward sets the mark
    logits (marked) -> the caller's mean ---------------> loss.backward()      refused at the mark
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ithaca.errors import UnsupportedError

_KEY = "ithaca_reduction_marks"
NEVER = -1


@dataclass(eq=False, slots=True)
class ReductionMark:
    """A hook on a tensor of this rank's tokens: its gradient has to come through a reduction over ranks.

    `free`: the model goes on with this copy itself, so any gradient may arrive.
    """

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
    """Return a number of the backward that runs in this thread, -1 outside of one."""
    # torch 2.11 to 2.13 have no public name for it.
    return int(torch._C._current_graph_task_id())


def mark(tensor: Tensor, what: str) -> ReductionMark | None:
    """Put a mark on a tensor; None if the tensor has no gradient or is a leaf."""
    if not tensor.requires_grad or tensor.grad_fn is None:
        return None
    own = ReductionMark(what)
    tensor.register_hook(own)
    node: Any = tensor.grad_fn
    node.metadata.setdefault(_KEY, []).append(own)
    return own


def mark_copies(tree: Any, what: str) -> tuple[Any, list[ReductionMark]]:
    """Return views of all tensors with marked nodes of their own in the graph: the model's own use stays unmarked."""
    marks: list[ReductionMark] = []

    def marked(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        copy = value.view_as(value)
        own = mark(copy, what)
        marks.extend([] if own is None else [own])
        return copy

    return tree_map(marked, tree), marks


def mark_output(output: Any) -> Any:
    """Mark what a model returns: the logits (or the summed loss) themselves, copies of everything else."""
    first = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    if isinstance(first, Tensor):
        mark(first, "the logits")
    return tree_map(lambda value: value if value is first else mark_copies(value, "an output")[0], output)


def marks_below(tensor: Tensor) -> list[ReductionMark]:
    """Return the marks that a tensor was computed from: the first on each way down its graph."""
    marked = (node.metadata[_KEY] for node in _nodes_below([tensor.grad_fn], _is_marked) if _is_marked(node))
    return [own for marks in marked for own in marks]


def leaves_below(values: Iterable[Any]) -> list[Tensor]:
    """Return the trained leaves that tensors were computed from without passing a mark."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    leaves = [tensor for tensor in tensors if tensor.grad_fn is None]
    nodes = _nodes_below([tensor.grad_fn for tensor in tensors], _is_marked)
    return leaves + [node.variable for node in nodes if not _is_marked(node) and hasattr(node, "variable")]


def _nodes_below(start: list[Any], stop: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the graph's nodes from `start` down, each once; below a node with `stop` the walk ends."""
    seen: set[Any] = set()
    waiting = [*start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not stop(node):
            waiting += [before for before, _ in node.next_functions]


def _is_marked(node: Any) -> bool:
    return _KEY in node.metadata


def with_local_gradient(part: Tensor, value: Tensor, factor: float | Tensor) -> Tensor:
    """Return `value`, which all ranks computed together, with the gradient of this rank's part times `factor`."""
    if not part.requires_grad:
        return value
    given: Tensor = _LocalGradient.apply(part, value, factor, marks_below(part))
    return given


def set_reduced(marks: Sequence[ReductionMark]) -> None:
    """Set marks, in the backward of a reduction: gradients may arrive there in this backward."""
    for each in marks:
        each.reduced_in = current_backward()


class _LocalGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, factor: float | Tensor, marks: list[ReductionMark]) -> Tensor:
        ctx.dtype, ctx.factor, ctx.marks = part.dtype, factor, marks
        # No view: callers divide their losses in place.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        set_reduced(ctx.marks)
        return grad.to(ctx.dtype) * ctx.factor, None, None, None


def with_gradient_times(value: Any, factor: float) -> Any:
    """Return the same tensor with a gradient `factor` times as large."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    copy = value.view_as(value)
    copy.register_hook(lambda gradient: gradient * factor)
    return copy
