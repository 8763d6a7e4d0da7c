"""Token-wise work, a tile of tokens at a time.

A `Unit` is a function of `x_BLC` that treats every token alone: an MLP with the norms around it, an expert block, a
norm. Called, it runs tile by tile over L and saves `x` only; backward runs each tile again with gradients, so what
lives at once is one tile of the widest activation. A unit that can go back without its value is asked for a tile's
gradients instead. Weight gradients of low-precision weights are summed over tiles in fp32. Frozen inputs, frozen
weights and adapters work alike: every parameter that wants a gradient is an input of the autograd function. Outputs
keep their structure, a tensor or a tuple, of `[B, L, ...]` or `[B * L, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ithaca.memory.random_state import Rng
from ithaca.memory.replay_guard import Noted


@dataclass(eq=False, slots=True)
class Unit:
    """`run` on at most `tile` tokens at a time. `parameters` is asked at every call: FSDP2 swaps them. `draws`: `run`
    may draw random numbers, and draws the same ones when a tile is run again.

    `gradients(x_BtC, dout_BtC)`, where there is one, gives a tile's gradients, its input's first if `x_BtC` wants one,
    then those of the parameters that do. `note`: what `run` depends on, looked at again before backward runs it.
    """

    run: Callable[[Tensor], Any]
    parameters: Callable[[], list[nn.Parameter]]
    tile: int
    draws: bool = False
    gradients: Callable[[Tensor, Tensor], list[Tensor | None]] | None = None
    note: Callable[[], Noted] | None = None
    tails: list[tuple[torch.Size, torch.dtype]] | None = None

    def __call__(self, x_BLC: Tensor, *, value: bool = True) -> Any:
        """The outputs; with `value=False` only gradients are wanted and nothing is computed before backward."""
        wanted = [p for p in self.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and (x_BLC.requires_grad or wanted):
            given = _Tiled.apply(x_BLC, self, value, *wanted)
        else:
            given = self.forward(x_BLC)
        return given if len(given) > 1 else given[0]

    def forward(self, x_BLC: Tensor) -> tuple[Tensor, ...]:
        """All outputs over all tokens, without a graph."""
        spans = self.spans(x_BLC, self.tile)
        if len(spans) == 1:
            return tuple(self.pieces(x_BLC))
        whole: list[Tensor] = []
        for span in spans:
            # Of several rows a tile is no view that every model can take apart again: it is copied.
            pieces = self.pieces(x_BLC[:, span].contiguous())
            if not whole:
                whole = [piece.new_empty(*x_BLC.shape[:2], *piece.shape[2:]) for piece in pieces]
            for target, piece in zip(whole, pieces, strict=True):
                target[:, span].copy_(piece)
        return tuple(whole)

    def pieces(self, x_BtC: Tensor) -> list[Tensor]:
        """One tile's outputs, each as `[B, t, ...]`."""
        # Noise may be laid onto the very input.
        given = self.run(x_BtC.clone() if self.draws else x_BtC)
        outputs = list(given) if isinstance(given, tuple) else [given]
        tokens = x_BtC.shape[:2]
        pieces = [out if out.shape[:2] == tokens else out.unflatten(0, tuple(tokens)) for out in outputs]
        self.tails = [(piece.shape[2:], piece.dtype) for piece in pieces]
        return pieces

    @staticmethod
    def spans(x_BLC: Tensor, tile: int) -> list[slice]:
        length = x_BLC.shape[1]
        return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLC: Tensor, unit: Unit, value: bool, *wanted: nn.Parameter) -> tuple[Tensor, ...]:
        # A longer pass before backward may change the unit's tile: other tiles would draw other numbers.
        ctx.unit, ctx.tile, ctx.rng = unit, unit.tile, Rng(x_BLC.device) if unit.draws else None
        ctx.noted = None if unit.note is None else unit.note()
        ctx.save_for_backward(x_BLC, *wanted)
        if value or unit.tails is None:
            return unit.forward(x_BLC)
        return tuple(x_BLC.new_zeros((*x_BLC.shape[:2], *tail), dtype=dtype) for tail, dtype in unit.tails)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.noted is not None:
            ctx.noted.refuse_changed()
            if ctx.unit.draws and ctx.noted.switched:
                ctx.noted.refuse_switched()
        x_BLC, *wanted = ctx.saved_tensors
        inward, spans = ctx.needs_input_grad[0], ctx.unit.spans(x_BLC, ctx.tile)
        sums: list[Tensor | None] = [None] * len(wanted)
        with nullcontext() if ctx.rng is None else ctx.rng.again():
            if len(spans) == 1:
                dx_BLC, *sums = _tile_gradients(ctx.unit, x_BLC, spans[0], dout, wanted, inward=inward)
                return dx_BLC, None, None, *sums
            dx_BLC = torch.empty_like(x_BLC) if inward else None
            for span in spans:
                dx_BtC, *grads = _tile_gradients(ctx.unit, x_BLC, span, dout, wanted, inward=inward)
                if dx_BLC is not None:
                    dx_BLC[:, span] = 0 if dx_BtC is None else dx_BtC
                _add(sums, grads)
                # Gone before the next tile's come.
                del dx_BtC, grads
        totals = [None if total is None else total.to(p.dtype) for total, p in zip(sums, wanted, strict=True)]
        return (dx_BLC, None, None, *totals)


def _tile_gradients(
    unit: Unit, x_BLC: Tensor, span: slice, dout: tuple[Tensor | None, ...], wanted: list[Tensor], *, inward: bool
) -> list[Tensor | None]:
    """Gradients of one tile: its input's, None unless `inward`, and those of what is `wanted`."""
    x_BtC = x_BLC[:, span].contiguous().detach().requires_grad_(inward)
    if unit.gradients is not None and dout[0] is not None:
        grads = unit.gradients(x_BtC, dout[0][:, span])
        return grads if inward else [None, *grads]
    with torch.enable_grad():
        outputs = unit.pieces(x_BtC)
    pairs = [(o, d[:, span]) for o, d in zip(outputs, dout, strict=True) if o.requires_grad and d is not None]
    inputs = [*([x_BtC] if inward else []), *wanted]
    ends, seeds = [o for o, _ in pairs], [d for _, d in pairs]
    grads = list(torch.autograd.grad(ends, inputs, seeds, allow_unused=True))
    return grads if inward else [None, *grads]


def _add(sums: list[Tensor | None], grads: list[Tensor | None]) -> None:
    """Add a tile's weight gradients in fp32."""
    for index, grad in enumerate(grads):
        if grad is None:
            continue
        total = sums[index]
        if total is not None:
            total += grad
        else:
            sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32))
