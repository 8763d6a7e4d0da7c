"""Exchange between a token shard of all heads and whole sequences of one rank's heads, several tensors at once.

Two ranks, 4 tokens (t0..t3), 2 query heads (q0, q1) and 1 kv head that both ranks need:

    start_to_heads    rank 0: t0 t1 | q0 q1 k v   --.--  rank 0: t0 t1 t2 t3 | q0 k v
    [B, L, H, D]      rank 1: t2 t3 | q0 q1 k v   --'--  rank 1: t0 t1 t2 t3 | q1 k v      [B, S, h, D]

    start_to_tokens   the reverse; both ranks send k and v, whose parts are added at the owner of the token

On the wire the row of a token holds all tensors' heads side by side, tokens in global order:

    wire [S, B, row]      row of token t:  | q heads | k heads | v heads |

After `start_to_heads` nothing is unpacked: the results are strided views of the receive buffer. `start_to_tokens`
writes heads into whole tensors. Both leave the collective running and return a `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.clock import CLOCK, EXCHANGE
from ithaca.heads import Range


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """One tensor of an exchange: each rank's range of its heads, the number of heads, and the head size."""

    ranges: tuple[Range, ...]
    heads: int
    size: int

    def width(self, rank: int) -> int:
        """Elements of one token's row that rank `rank` gets."""
        start, end = self.ranges[rank]
        return (end - start) * self.size

    def repeats(self, period: int) -> bool:
        """True if every range, `period` ranks on, has moved up by the same number of heads and kept its size."""
        moves = {(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.ranges, self.ranges[period:], strict=False)}
        return len(moves) == 1 and all(start == end >= 0 for start, end in moves)


class Pending:
    """Running exchange; `wait` returns its tensors, in order with the work of the current stream."""

    def __init__(self, work: dist.Work, unpack: Callable[[], list[Tensor]]) -> None:
        self._work, self._unpack = work, unpack

    @CLOCK.timed(EXCHANGE)
    def wait(self) -> list[Tensor]:
        self._work.wait()
        return self._unpack()


@CLOCK.timed(EXCHANGE)
def start_to_heads(tensors_BLHD: list[Tensor], all_columns: list[TensorColumns], group: dist.ProcessGroup) -> Pending:
    """Send all heads of this rank's tokens; receive this rank's heads of all tokens, strided `[B, S, h, D]` views."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, length = tensors_BLHD[0].shape[:2]
    rows = [sum(columns.width(rank) for columns in all_columns) for rank in range(ranks)]
    send = tensors_BLHD[0].new_empty(length * batch * sum(rows))
    _pack(send, tensors_BLHD, all_columns, rows)
    received = send.new_empty(ranks * length * batch * rows[me])
    work = _all_to_all(
        received, send, [length * batch * rows[me]] * ranks, [length * batch * row for row in rows], group
    )
    return Pending(work, lambda: _views_by_tensor(received.view(ranks * length, batch, rows[me]), all_columns, me))


@CLOCK.timed(EXCHANGE)
def start_to_tokens(
    tensors_BShD: list[Tensor],
    all_columns: list[TensorColumns],
    group: dist.ProcessGroup,
    into: list[Tensor],
    shared: list[bool],
) -> Pending:
    """Send this rank's heads of all tokens; receive all heads of its tokens into `into`, each `[B, L, H, D]`.

    Heads are added to `shared` tensors, which several ranks send, and written to the others.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, total = tensors_BShD[0].shape[:2]
    tokens = total // ranks * batch
    rows = [sum(columns.width(rank) for columns in all_columns) for rank in range(ranks)]
    send_SBR = _side_by_side(tensors_BShD, all_columns, me)
    received = send_SBR.new_empty(tokens * sum(rows))
    work = _all_to_all(received, send_SBR.view(-1), [tokens * row for row in rows], [tokens * rows[me]] * ranks, group)
    return Pending(work, lambda: _unpack(received, all_columns, rows, into, shared))


def _all_to_all(
    received: Tensor, send: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup
) -> dist.Work:
    work = dist.all_to_all_single(received, send, arriving, leaving, group=group, async_op=True)
    assert work is not None
    return work


def _pack(send: Tensor, tensors_BLHD: list[Tensor], all_columns: list[TensorColumns], rows: list[int]) -> None:
    """Fill the send buffer: each destination's block is `[L, B, row]`, its heads of every tensor side by side."""
    batch, length = tensors_BLHD[0].shape[:2]
    for wire_PLBR, first, count in _block_groups(send, all_columns, rows, batch, length):
        offset = 0
        for tensor, columns in zip(tensors_BLHD, all_columns, strict=True):
            _copy(_part(wire_PLBR, columns, first, offset), _windows(tensor, columns, first, count))
            offset += columns.width(first)


def _unpack(
    received: Tensor, all_columns: list[TensorColumns], rows: list[int], into: list[Tensor], shared: list[bool]
) -> list[Tensor]:
    batch, length = into[0].shape[:2]
    offset = [0] * len(rows)
    for target_BLHD, columns, add in zip(into, all_columns, shared, strict=True):
        if add:
            _add(target_BLHD, _views_by_rank(received, rows, batch, length), columns, offset)
        else:
            for wire_PLBR, first, count in _block_groups(received, all_columns, rows, batch, length):
                _copy(_windows(target_BLHD, columns, first, count), _part(wire_PLBR, columns, first, offset[first]))
        offset = [at + columns.width(rank) for rank, at in enumerate(offset)]
    return into


def _add(target_BLHD: Tensor, blocks: list[Tensor], columns: TensorColumns, offset: list[int]) -> None:
    """Add each rank's heads to a tensor whose heads several ranks had."""
    for rank, block_LBR in enumerate(blocks):
        start, end = columns.ranges[rank]
        target_BLHD[:, :, start:end] += _part(block_LBR, columns, rank, offset[rank]).transpose(0, 1)


# One strided copy serves several ranks whose ranges are equally spaced. Example: 28/4 heads over 8 ranks.
#
#     rank          0     1     2     3     4     5      6      7
#     q heads      0-3   4-6   7-10  11-13  ...            widths 4 3 4 3 4 3 4 3: period 2, moved by 7 heads
#     first = 0     x           x           x            x    one copy of [4 ranks, L, B, 4 heads]
#     first = 1           x           x           x           x    one copy of [4 ranks, L, B, 3 heads]


def _period(all_columns: list[TensorColumns], ranks: int) -> int:
    """Return the number of ranks after which all ranges repeat, moved by equally many heads; or `ranks`."""
    for period in (p for p in range(1, ranks) if ranks % p == 0):
        if all(columns.repeats(period) for columns in all_columns):
            return period
    return ranks


def _block_groups(
    buffer: Tensor, all_columns: list[TensorColumns], rows: list[int], batch: int, length: int
) -> Iterator[tuple[Tensor, int, int]]:
    """Yield `(blocks [P, L, B, row], first, P)`: the blocks of P equally spaced ranks, from rank `first` on."""
    period = _period(all_columns, len(rows))
    sizes = [length * batch * row for row in rows[:period]]
    for first, part in enumerate(buffer.view(len(rows) // period, -1).split(sizes, dim=1)):
        yield part.view(-1, length, batch, rows[first]), first, len(part)


def _windows(x_BLHD: Tensor, columns: TensorColumns, first: int, count: int) -> Tensor:
    """Return the heads of `count` equally spaced ranks from `first` on, `[P, L, B, h, D]`, as a view."""
    start, end = columns.ranges[first]
    step = columns.ranges[first + len(columns.ranges) // count][0] - start if count > 1 else 0
    if step == 0:
        # All of these ranks have the same heads: a kv head that is used everywhere.
        return x_BLHD[:, :, start:end].transpose(0, 1).expand(count, -1, -1, -1, -1)
    span_BLHD = x_BLHD[:, :, start : end + step * (count - 1)]
    # unfold: [B, L, H, D] -> [B, L, P, D, h], windows of h heads, `step` apart.
    return span_BLHD.unfold(2, end - start, step).permute(2, 1, 0, 4, 3)


def _part(wire_LBR: Tensor, columns: TensorColumns, rank: int, offset: int) -> Tensor:
    """Return a tensor's columns of rank `rank`'s rows, as `[..., h, D]`."""
    return wire_LBR[..., offset : offset + columns.width(rank)].unflatten(-1, (-1, columns.size))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`, 16 bytes at a time where the strides of both allow."""
    wide_target, wide_source = _as_16_bytes(target), _as_16_bytes(source)
    if wide_target is not None and wide_source is not None:
        # A strided copy of single bf16 numbers runs at 38% of an H200's memory bandwidth, of 16-byte units at twice that.
        wide_target.copy_(wide_source)
    else:
        target.copy_(source)


def _as_16_bytes(x: Tensor) -> Tensor | None:
    """Return a view in units of 16 bytes; None if offset, last dim or strides are no multiples of them."""
    unit = 16 // x.element_size()
    steps = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    if x.device.type == "cpu" or unit < 2 or x.stride(-1) != 1 or any(step % unit for step in steps):
        return None
    return x.view(torch.complex128)


def _views_by_rank(buffer: Tensor, rows: list[int], batch: int, length: int) -> list[Tensor]:
    pieces = buffer.split([length * batch * row for row in rows])
    return [piece.view(length, batch, row) for piece, row in zip(pieces, rows, strict=True)]


def _views_by_tensor(wire_SBR: Tensor, all_columns: list[TensorColumns], me: int) -> list[Tensor]:
    parts = wire_SBR.split([columns.width(me) for columns in all_columns], dim=-1)
    return [p.unflatten(-1, (-1, columns.size)).transpose(0, 1) for p, columns in zip(parts, all_columns, strict=True)]


def _side_by_side(tensors_BShD: list[Tensor], all_columns: list[TensorColumns], me: int) -> Tensor:
    """Return the send buffer `[S, B, row]`; a single tensor of that memory layout is sent without a copy."""
    batch, total = tensors_BShD[0].shape[:2]
    if len(tensors_BShD) == 1 and tensors_BShD[0].transpose(0, 1).is_contiguous():
        return tensors_BShD[0].transpose(0, 1).view(total, batch, -1)
    wire_SBR = tensors_BShD[0].new_empty(total, batch, sum(columns.width(me) for columns in all_columns))
    for view_BShD, tensor in zip(_views_by_tensor(wire_SBR, all_columns, me), tensors_BShD, strict=True):
        view_BShD.copy_(tensor)
    return wire_SBR
