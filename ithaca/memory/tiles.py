"""Token-wise modules run in tiles: chunked MLPs, expert blocks and norms.

A `Unit` is a function of `x_BLC` that treats every token by itself. Forward runs the function tile by tile over L and
saves `x` alone. Backward runs each tile again with gradients, so only one tile of the widest activation exists at once:

    forward    x [B, L, C] = | tile 0 | tile 1 | tile 2 |  ->  out [B, L, C], each tile's [B, t, 4C] freed
    backward   for each tile: run again, dx of the tile, dW += dW of the tile (in fp32)

A unit with `gradients` computes a tile's gradients without the tile's output. All parameters that require grad are
inputs of the autograd function, so frozen weights and adapters work too. Outputs keep their structure, a tensor or a
tuple, of `[B, L, ...]` or `[B * L, ...]`.
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
from ithaca.memory.replay_guard import ModuleSnapshot


@dataclass(eq=False, slots=True)
class Unit:
    """Token-wise function `run` on at most `tile` tokens at a time.

    `draws`: `run` may draw random numbers; a tile that is run again draws the same ones. `gradients(x_BtC, dout_BtC)`
    returns a tile's gradients, the input's first if it requires grad, then the parameters'. `snapshot` records the
    modules that `run` depends on; backward refuses them if they have changed. `tails`: the outputs' last shapes.
    """

    run: Callable[[Tensor], Any]
    # A function: FSDP2 exchanges parameters between sharded and gathered ones.
    parameters: Callable[[], list[nn.Parameter]]
    tile: int
    draws: bool = False
    gradients: Callable[[Tensor, Tensor], list[Tensor | None]] | None = None
    snapshot: Callable[[], ModuleSnapshot] | None = None
    tails: list[tuple[torch.Size, torch.dtype]] | None = None

    def __call__(self, x_BLC: Tensor, *, value: bool = True) -> Any:
        """Return the outputs; with `value=False` return zeros of their shapes, of which only gradients are used."""
        trained = [p for p in self.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and (x_BLC.requires_grad or trained):
            outputs = _Tiled.apply(x_BLC, self, value, *trained)
        else:
            outputs = self.forward(x_BLC)
        return outputs if len(outputs) > 1 else outputs[0]

    def forward(self, x_BLC: Tensor) -> tuple[Tensor, ...]:
        """Return all outputs over all tokens, without a graph."""
        spans = self.spans(x_BLC, self.tile)
        if len(spans) == 1:
            return tuple(self.pieces(x_BLC))
        whole: list[Tensor] = []
        for span in spans:
            # A copy: with several rows the tile is not contiguous, and some models call view() on their input.
            pieces = self.pieces(x_BLC[:, span].contiguous())
            if not whole:
                whole = [piece.new_empty(*x_BLC.shape[:2], *piece.shape[2:]) for piece in pieces]
            for target, piece in zip(whole, pieces, strict=True):
                target[:, span].copy_(piece)
        return tuple(whole)

    def pieces(self, x_BtC: Tensor) -> list[Tensor]:
        """Return one tile's outputs, each as `[B, t, ...]`."""
        # A clone: a module may add noise to its input in place.
        result = self.run(x_BtC.clone() if self.draws else x_BtC)
        outputs = list(result) if isinstance(result, tuple) else [result]
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
    def forward(ctx: Any, x_BLC: Tensor, unit: Unit, value: bool, *trained: nn.Parameter) -> tuple[Tensor, ...]:
        # The tile of now: a longer pass before backward may change the unit's, and other tiles draw other numbers.
        ctx.unit, ctx.tile, ctx.rng = unit, unit.tile, Rng(x_BLC.device) if unit.draws else None
        ctx.snapshot = None if unit.snapshot is None else unit.snapshot()
        ctx.save_for_backward(x_BLC, *trained)
        if value or unit.tails is None:
            return unit.forward(x_BLC)
        return tuple(x_BLC.new_zeros((*x_BLC.shape[:2], *tail), dtype=dtype) for tail, dtype in unit.tails)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.snapshot is not None:
            ctx.snapshot.refuse_changed()
            if ctx.unit.draws and ctx.snapshot.mode_changed:
                ctx.snapshot.refuse_changed_mode()
        x_BLC, *trained = ctx.saved_tensors
        inward, spans = ctx.needs_input_grad[0], ctx.unit.spans(x_BLC, ctx.tile)
        sums: list[Tensor | None] = [None] * len(trained)
        with nullcontext() if ctx.rng is None else ctx.rng.again():
            if len(spans) == 1:
                # The tile's own dx: a second tensor beside it would be one residual stream more at a layer's peak.
                dx_BLC, *sums = _tile_gradients(ctx.unit, x_BLC, spans[0], dout, trained, inward=inward)
                return dx_BLC, None, None, *sums
            dx_BLC = torch.empty_like(x_BLC) if inward else None
            for span in spans:
                dx_BtC, *grads = _tile_gradients(ctx.unit, x_BLC, span, dout, trained, inward=inward)
                if dx_BLC is not None:
                    dx_BLC[:, span] = 0 if dx_BtC is None else dx_BtC
                _add(sums, grads)
                # Freed before the next tile allocates its own.
                del dx_BtC, grads
        totals = [None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True)]
        return (dx_BLC, None, None, *totals)


def _tile_gradients(
    unit: Unit, x_BLC: Tensor, span: slice, dout: tuple[Tensor | None, ...], trained: list[Tensor], *, inward: bool
) -> list[Tensor | None]:
    """Return the gradients of one tile's input, None unless `inward`, and of the trained parameters."""
    x_BtC = x_BLC[:, span].contiguous().detach().requires_grad_(inward)
    if unit.gradients is not None and dout[0] is not None:
        grads = unit.gradients(x_BtC, dout[0][:, span])
        return grads if inward else [None, *grads]
    with torch.enable_grad():
        outputs = unit.pieces(x_BtC)
    pairs = [(o, d[:, span]) for o, d in zip(outputs, dout, strict=True) if o.requires_grad and d is not None]
    inputs = [*([x_BtC] if inward else []), *trained]
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
