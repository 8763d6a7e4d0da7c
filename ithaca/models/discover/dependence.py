"""Dependence of outputs on inputs, found with NaN as the marker: no tolerance, and no lucky inputs that hide a reader.

    input           MLP (token-wise)     convolution over tokens
    x x N x x  ->   y y N y y            y y N N N                  N: a token of NaN

A NaN in one input token appears in every output that reads the token, even if a weight is small or zero. Two tests:

    token-wise      a NaN token must leave every other token, earlier, later and in other rows, without NaN
    other readers   a module's output is replaced by NaN, and its known reader by the reader's recorded output: a NaN in
                    the layer's output, or a NaN tensor that is still referenced afterwards, shows another reader

Comparisons (top-k, arg-max) can swallow a NaN, and an output may depend on a token's position alone. Therefore outputs
of random tokens are compared too: for parts of a row, for permuted tokens and rows, and after exchanging one token, each
token's output must equal its output in the whole batch, to the rounding of the dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

ROWS, LENGTH = 2, 6
# Standard deviations of the random inputs.
_DRAWS = (1.0, 4.0)
# The error of a sum in another order, in units in the last place (ulp): the largest one measured on small models.
_ULPS = 16
# The number of terms in the longest sums of those models.
_TERMS = 64
Outputs = list[Tensor]


def is_tokenwise(module: nn.Module, like: Tensor) -> bool:
    """True if the module maps `[B, t, C]` token by token, in every draw; C, dtype and device are those of `like`."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for size in _DRAWS:
            x = size * torch.randn(ROWS, LENGTH, like.shape[-1], generator=draw, dtype=torch.float64)
            other = size * torch.randn(like.shape[-1], generator=draw, dtype=torch.float64)
            if not _TokenwiseTrial(module, x.to(like), other.to(like)).passes():
                return False
    return True


class _TokenwiseTrial:
    """Comparisons for one random draw: `x_BtC`, and a token `other_C` that replaces one of its tokens."""

    def __init__(self, module: nn.Module, x_BtC: Tensor, other_C: Tensor) -> None:
        self.module, self.x, self.other, self.tolerance = module, x_BtC, other_C, rounding_tolerance(module, x_BtC)
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
        nan = torch.full_like(self.other, torch.nan)
        return all(same) and self._stays_in_token(0, 2, nan) and self._stays_in_token(1, 3, self.other)

    def run(self, x_BtC: Tensor) -> Outputs | None:
        """Return all outputs as `[B, t, ...]`; None if an output has another form, or the input was written in place."""
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

    def _stays_in_token(self, row: int, token: int, value_C: Tensor) -> bool:
        """True if `value_C` in one token leaves the outputs of all other tokens unchanged."""
        x_BtC = self.x.clone()
        x_BtC[row, token] = value_C
        got = self.run(x_BtC)
        kept = torch.ones(x_BtC.shape[:2], dtype=torch.bool, device=x_BtC.device)
        kept[row, token] = False
        assert self.whole is not None
        return got is not None and self._same([out[kept][None] for out in got], [out[kept][None] for out in self.whole])

    def _same(self, got: Outputs, expected: Outputs) -> bool:
        """True if all tokens are equal, to rounding."""
        for ours, theirs, whole in zip(got, expected, self.whole or (), strict=True):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not bool(ours.isfinite().all()):
                return False
            off_Bt = (ours.double() - theirs.double()).abs().flatten(2).amax(-1)
            wrong = int((off_Bt > self.tolerance * float(whole.double().abs().max())).sum())
            # In half precision the router may score two experts of a token equally and choose either.
            if wrong > (1 if self.x.dtype in (torch.bfloat16, torch.float16) else 0):
                return False
        return True


def rounding_tolerance(module: nn.Module, x: Tensor) -> float:
    """Return the relative error that rounding may cause: that of the coarsest dtype the module computes in."""
    floating = [p for p in module.parameters() if p.is_floating_point()]
    # Norms and routers cast to fp32 whatever the dtype of their input, fp64 included.
    dtypes = {x.dtype, torch.float32, *(p.dtype for p in floating)}
    # The rounding error of a sum grows with the square root of the number of its terms.
    terms = max((size for p in floating for size in p.shape), default=1)
    return _ULPS * max(1.0, (terms / _TERMS) ** 0.5) * max(torch.finfo(dtype).eps for dtype in dtypes)


def has_other_readers(
    layer: nn.Module, args: Any, kwargs: Any, producer: nn.Module, reader: nn.Module, output: Any
) -> bool:
    """True if a run of the layer reads the output of `producer` anywhere but in `reader`, whose recorded output is `output`."""
    marks: list[weakref.ref[Tensor]] = []
    forward = producer.forward

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        mark = torch.full_like(forward(*args, **kwargs), torch.nan)
        marks.append(weakref.ref(mark))
        return mark

    def recorded(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, torch.clone, output)

    with torch.no_grad(), _forward_replaced(producer, marked), _forward_replaced(reader, recorded):
        result = layer(*args, **kwargs)
    # The arguments too: a layer may hand tensors on in a dict or list that it was called with.
    leaves = tree_flatten((result, args, kwargs))[0]
    spread = any(isinstance(x, Tensor) and x.is_floating_point() and bool(x.isnan().any()) for x in leaves)
    # Without these references, a mark that is still alive is held by a module or an object of the model.
    del result, leaves
    return spread or any(mark() is not None for mark in marks)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module instance runs `forward`."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
