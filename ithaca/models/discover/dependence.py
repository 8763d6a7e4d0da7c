"""Dependence of values on values, found with NaN as the marker: no tolerance, and no inputs that happen to hide it.

A NaN in one token of a module's input comes out wherever that token is read, be the weights small, neutral or zero. So

    token-wise       a marked token leaves all others, before and after it and in other rows, without a mark
    read elsewhere   a module's output is replaced by marks, and its one known reader by the value it gave: marks in
                     what the layer gives, or a mark that is still held afterwards, show another reader

Comparisons (a top-k, an arg-max) can swallow a mark, and a value may depend on its place alone. Therefore values are
compared too, of random tokens in several draws: parts of a row alone, tokens and rows in another order, and one token
exchanged must each give what the whole gave, to the rounding of the dtype that is computed in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

ROWS, LENGTH = 2, 6
# Sizes of the random inputs.
_DRAWS = (1.0, 4.0)
# Sums of a few thousand products in another order, in units of the last place of the largest.
_ULPS = 16
# The longest sums of the small models that the number above was found on.
_TERMS = 64
Outputs = list[Tensor]


def is_tokenwise(module: nn.Module, like: Tensor) -> bool:
    """True if the module maps `[B, t, C]` (of `like`'s C, dtype and device) token by token, in every draw."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for size in _DRAWS:
            x = size * torch.randn(ROWS, LENGTH, like.shape[-1], generator=draw, dtype=torch.float64)
            other = size * torch.randn(like.shape[-1], generator=draw, dtype=torch.float64)
            if not _RandomTokens(module, x.to(like), other.to(like)).passes():
                return False
    return True


class _RandomTokens:
    """One draw: `x_BtC`, and a token to put in the place of another."""

    def __init__(self, module: nn.Module, x_BtC: Tensor, other_C: Tensor) -> None:
        self.module, self.x, self.other, self.room = module, x_BtC, other_C, rounding(module, x_BtC)
        self.whole = self.run(x_BtC)

    def passes(self) -> bool:
        whole = self.whole
        if whole is None or not all(bool(out.isfinite().all()) for out in whole):
            return False
        order, rows = torch.tensor([4, 0, 5, 2, 1, 3], device=self.x.device), torch.tensor([1, 0], device=self.x.device)
        same = (
            self._agrees(self.x, [out.clone() for out in whole]),
            *(
                self._agrees(self.x[:, span], [out[:, span] for out in whole])
                for span in (slice(0, 3), slice(3, 6), slice(4, 5))
            ),
            self._agrees(self.x[1:], [out[1:] for out in whole]),
            self._agrees(self.x[:, order], [out[:, order] for out in whole]),
            self._agrees(self.x[rows], [out[rows] for out in whole]),
        )
        return all(same) and self._alone(0, 2, torch.full_like(self.other, torch.nan)) and self._alone(1, 3, self.other)

    def run(self, x_BtC: Tensor) -> Outputs | None:
        """All outputs as `[B, t, ...]`; None where one has no such form, or the input was written to."""
        given = x_BtC.contiguous().clone()
        version = given._version
        outputs = self.module(given)
        found = []
        for out in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(out, Tensor) or given._version != version:
                return None
            if out.shape[:2] != x_BtC.shape[:2]:
                if out.ndim == 0 or out.shape[0] != x_BtC.shape[0] * x_BtC.shape[1]:
                    return None
                out = out.unflatten(0, tuple(x_BtC.shape[:2]))
            found.append(out)
        return found

    def _agrees(self, x_BtC: Tensor, expected: Outputs) -> bool:
        got = self.run(x_BtC)
        return got is not None and len(got) == len(expected) and self._same(got, expected)

    def _alone(self, row: int, token: int, value_C: Tensor) -> bool:
        """True if another value of one token leaves all others as they were."""
        x_BtC = self.x.clone()
        x_BtC[row, token] = value_C
        got = self.run(x_BtC)
        kept = torch.ones(x_BtC.shape[:2], dtype=torch.bool, device=x_BtC.device)
        kept[row, token] = False
        assert self.whole is not None
        return got is not None and self._same([out[kept][None] for out in got], [out[kept][None] for out in self.whole])

    def _same(self, got: Outputs, expected: Outputs) -> bool:
        """True if all tokens are equal to rounding."""
        for ours, theirs, whole in zip(got, expected, self.whole or (), strict=True):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not bool(ours.isfinite().all()):
                return False
            off_Bt = (ours.double() - theirs.double()).abs().flatten(2).amax(-1)
            wrong = int((off_Bt > self.room * float(whole.double().abs().max())).sum())
            # In half precision two experts of one token may be equal to rounding, and either be chosen.
            if wrong > (1 if self.x.dtype in (torch.bfloat16, torch.float16) else 0):
                return False
        return True


def rounding(module: nn.Module, x: Tensor) -> float:
    """The relative room that rounding needs: of the coarsest dtype that is computed in, fp32 among them, to which norms
    and routers cast whatever they are given. The rounding of a sum grows with the root of the number of its terms."""
    floating = [p for p in module.parameters() if p.is_floating_point()]
    dtypes = {x.dtype, torch.float32, *(p.dtype for p in floating)}
    terms = max((size for p in floating for size in p.shape), default=1)
    return _ULPS * max(1.0, (terms / _TERMS) ** 0.5) * max(torch.finfo(dtype).eps for dtype in dtypes)


def read_elsewhere(layer: nn.Module, args: Any, kwargs: Any, giver: nn.Module, reader: nn.Module, value: Any) -> bool:
    """True if anything but `reader`, which gave `value`, reads what `giver` gives in a run of the layer."""
    held: list[weakref.ref[Tensor]] = []
    forward = giver.forward

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        mark = torch.full_like(forward(*args, **kwargs), torch.nan)
        held.append(weakref.ref(mark))
        return mark

    with torch.no_grad(), _forward(giver, marked), _forward(reader, lambda *args, **kwargs: _copied(value)):
        output = layer(*args, **kwargs)
    # What a layer passes on beside its output stands in what it was called with.
    spread = any(bool(x.isnan().any()) for x in _floats((output, args, kwargs)))
    del output
    return spread or any(mark() is not None for mark in held)


def _copied(value: Any) -> Any:
    return (
        tuple(map(_copied, value))
        if isinstance(value, tuple)
        else value.clone()
        if isinstance(value, Tensor)
        else value
    )


def _floats(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
