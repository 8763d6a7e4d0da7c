"""The two all-to-alls: "my tokens, all heads" <-> "all tokens, my heads".

`start_to_heads` takes shards `[B, L, H, D]` and gives `[B, S, h, D]`; `start_to_tokens` is its reverse. Both leave the
exchange on the wire and return a `Pending`. Several tensors travel in one collective: on the wire a token's row is all
its tensors' heads side by side, tokens in global order:

    wire [S, B, row]      row of token t:  | q heads | k heads | v heads |

The receiver of `start_to_heads` therefore unpacks nothing: its tensors are strided views of what arrived. On the way
back the heads are written into whole tensors, and where a kv head went to several ranks its parts are added there.
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
class Lane:
    """One tensor of an exchange: which heads of how many each rank has, and the head size."""

    ranges: tuple[Range, ...]
    heads: int
    size: int

    def width(self, rank: int) -> int:
        """Elements of one token's row that rank `rank` gets."""
        start, end = self.ranges[rank]
        return (end - start) * self.size

    def repeats(self, period: int) -> bool:
        """True if every range, `period` ranks on, is the same moved up by one and the same number of heads."""
        moves = {(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.ranges, self.ranges[period:], strict=False)}
        return len(moves) == 1 and all(start == end >= 0 for start, end in moves)


class Pending:
    """An exchange on the wire; `wait` gives its tensors, in order with the work of the current stream."""

    def __init__(self, work: dist.Work, arrive: Callable[[], list[Tensor]]) -> None:
        self._work, self._arrive = work, arrive

    @CLOCK.clocked(EXCHANGE)
    def wait(self) -> list[Tensor]:
        self._work.wait()
        return self._arrive()


@CLOCK.clocked(EXCHANGE)
def start_to_heads(tensors_BLHD: list[Tensor], lanes: list[Lane], group: dist.ProcessGroup) -> Pending:
    """All ranks' tokens of this rank's heads, as strided `[B, S, h, D]` views of one buffer."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, length = tensors_BLHD[0].shape[:2]
    rows = [sum(lane.width(rank) for lane in lanes) for rank in range(ranks)]
    send = tensors_BLHD[0].new_empty(length * batch * sum(rows))
    _pack(send, tensors_BLHD, lanes, rows)
    received = send.new_empty(ranks * length * batch * rows[me])
    work = _send(received, send, [length * batch * rows[me]] * ranks, [length * batch * row for row in rows], group)
    return Pending(work, lambda: _columns(received.view(ranks * length, batch, rows[me]), lanes, me))


@CLOCK.clocked(EXCHANGE)
def start_to_tokens(
    tensors_BShD: list[Tensor], lanes: list[Lane], group: dist.ProcessGroup, into: list[Tensor], shared: list[bool]
) -> Pending:
    """This rank's tokens of the lanes' heads, into `[B, L, H, D]`; into a `shared` tensor heads are added, not written."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, total = tensors_BShD[0].shape[:2]
    tokens = total // ranks * batch
    rows = [sum(lane.width(rank) for lane in lanes) for rank in range(ranks)]
    send_SBR = _side_by_side(tensors_BShD, lanes, me)
    received = send_SBR.new_empty(tokens * sum(rows))
    work = _send(received, send_SBR.view(-1), [tokens * row for row in rows], [tokens * rows[me]] * ranks, group)
    return Pending(work, lambda: _unpack(received, lanes, rows, into, shared))


def _send(
    received: Tensor, send: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup
) -> dist.Work:
    work = dist.all_to_all_single(received, send, arriving, leaving, group=group, async_op=True)
    assert work is not None
    return work


def _pack(send: Tensor, tensors_BLHD: list[Tensor], lanes: list[Lane], rows: list[int]) -> None:
    """Each destination's block is `[L, B, row]`: its heads of every tensor side by side."""
    batch, length = tensors_BLHD[0].shape[:2]
    for wire_PLBR, place, count in _repeats(send, lanes, rows, batch, length):
        column = 0
        for tensor, lane in zip(tensors_BLHD, lanes, strict=True):
            _copy(_part(wire_PLBR, lane, place, column), _windows(tensor, lane, place, count))
            column += lane.width(place)


def _unpack(
    received: Tensor, lanes: list[Lane], rows: list[int], into: list[Tensor], shared: list[bool]
) -> list[Tensor]:
    batch, length = into[0].shape[:2]
    column = [0] * len(rows)
    for target_BLHD, lane, add in zip(into, lanes, shared, strict=True):
        if add:
            _add(target_BLHD, _blocks(received, rows, batch, length), lane, column)
        else:
            for wire_PLBR, place, count in _repeats(received, lanes, rows, batch, length):
                _copy(_windows(target_BLHD, lane, place, count), _part(wire_PLBR, lane, place, column[place]))
        column = [at + lane.width(rank) for rank, at in enumerate(column)]
    return into


def _add(target_BLHD: Tensor, blocks: list[Tensor], lane: Lane, column: list[int]) -> None:
    """Every rank's part of a tensor whose heads several ranks had."""
    for rank, block_LBR in enumerate(blocks):
        start, end = lane.ranges[rank]
        target_BLHD[:, :, start:end] += _part(block_LBR, lane, rank, column[rank]).transpose(0, 1)


def _period(lanes: list[Lane], ranks: int) -> int:
    """After how many ranks the widths repeat, every range having moved on by the same number of heads: 1 where all
    ranks have alike, 2 for 28/4 heads over 8 ranks (4, 3, 4, 3, ... heads)."""
    for period in (p for p in range(1, ranks) if ranks % p == 0):
        if all(lane.repeats(period) for lane in lanes):
            return period
    return ranks


def _repeats(
    buffer: Tensor, lanes: list[Lane], rows: list[int], batch: int, length: int
) -> Iterator[tuple[Tensor, int, int]]:
    """`(blocks [P, L, B, row], rank, P)`: P equally spaced ranks from `rank` on, whose blocks one strided copy serves."""
    period = _period(lanes, len(rows))
    sizes = [length * batch * row for row in rows[:period]]
    for place, part in enumerate(buffer.view(len(rows) // period, -1).split(sizes, dim=1)):
        yield part.view(-1, length, batch, rows[place]), place, len(part)


def _windows(x_BLHD: Tensor, lane: Lane, place: int, count: int) -> Tensor:
    """The heads of `count` equally spaced ranks from `place` on, `[P, L, B, h, D]`, as a view."""
    start, end = lane.ranges[place]
    step = lane.ranges[place + len(lane.ranges) // count][0] - start if count > 1 else 0
    if step == 0:
        return x_BLHD[:, :, start:end].transpose(0, 1).expand(count, -1, -1, -1, -1)
    span_BLHD = x_BLHD[:, :, start : end + step * (count - 1)]
    return span_BLHD.unfold(2, end - start, step).permute(2, 1, 0, 4, 3)


def _part(wire_LBR: Tensor, lane: Lane, rank: int, column: int) -> Tensor:
    """A lane's columns of rank `rank`'s rows, heads apart: `[..., h, D]`."""
    return wire_LBR[..., column : column + lane.width(rank)].unflatten(-1, (-1, lane.size))


def _copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, 16 bytes at a time where both allow it: a strided copy of single bf16 numbers runs at
    38% of the memory's speed on an H200, one of 16-byte units at twice that."""
    wide_target, wide_source = _wide(target), _wide(source)
    if wide_target is not None and wide_source is not None:
        wide_target.copy_(wide_source)
    else:
        target.copy_(source)


def _wide(x: Tensor) -> Tensor | None:
    """The same memory in units of 16 bytes, or None where it does not divide so."""
    unit = 16 // x.element_size()
    steps = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    if x.device.type == "cpu" or unit < 2 or x.stride(-1) != 1 or any(step % unit for step in steps):
        return None
    return x.view(torch.complex128)


def _blocks(buffer: Tensor, rows: list[int], batch: int, length: int) -> list[Tensor]:
    pieces = buffer.split([length * batch * row for row in rows])
    return [piece.view(length, batch, row) for piece, row in zip(pieces, rows, strict=True)]


def _columns(wire_SBR: Tensor, lanes: list[Lane], me: int) -> list[Tensor]:
    parts = wire_SBR.split([lane.width(me) for lane in lanes], dim=-1)
    return [p.unflatten(-1, (-1, lane.size)).transpose(0, 1) for p, lane in zip(parts, lanes, strict=True)]


def _side_by_side(tensors_BShD: list[Tensor], lanes: list[Lane], me: int) -> Tensor:
    """The send buffer `[S, B, row]`; a lone tensor that lies so already is sent as it is."""
    batch, total = tensors_BShD[0].shape[:2]
    if len(tensors_BShD) == 1 and tensors_BShD[0].transpose(0, 1).is_contiguous():
        return tensors_BShD[0].transpose(0, 1).view(total, batch, -1)
    wire_SBR = tensors_BShD[0].new_empty(total, batch, sum(lane.width(me) for lane in lanes))
    for view_BShD, tensor in zip(_columns(wire_SBR, lanes, me), tensors_BShD, strict=True):
        view_BShD.copy_(tensor)
    return wire_SBR
