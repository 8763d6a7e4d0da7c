"""The two all-to-alls: "my tokens, all heads" <-> "all tokens, my heads".

`to_heads` takes shards `[B, L, H, D]` and gives `[B, S, h, D]`; `to_tokens` is its reverse. Several tensors
travel in one collective: on the wire a token's row is all its tensors' heads side by side, tokens in global
order, `[S, B, row]`. The receiver of `to_heads` therefore unpacks nothing: its tensors are strided views of
what arrived. Where a kv head went to several ranks, `to_tokens` sums what comes back in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.heads import Range


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

    @property
    def even(self) -> bool:
        """Whether the ranges are equal and cover every head once, so that one strided copy packs all ranks."""
        width = self.ranges[0][1]
        return all(r == (i * width, (i + 1) * width) for i, r in enumerate(self.ranges)) and self.covers_once

    @property
    def covers_once(self) -> bool:
        return sum(end - start for start, end in self.ranges) == self.heads


def to_heads(tensors_BLHD: list[Tensor], lanes: list[Lane], group: dist.ProcessGroup) -> list[Tensor]:
    """All ranks' tokens of this rank's heads, as strided `[B, S, h, D]` views of one buffer."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, length = tensors_BLHD[0].shape[:2]
    rows = [sum(lane.width(rank) for lane in lanes) for rank in range(ranks)]
    send = tensors_BLHD[0].new_empty(length * batch * sum(rows))
    _pack(send, tensors_BLHD, lanes, rows)
    received = send.new_empty(ranks * length * batch * rows[me])
    tokens = length * batch
    dist.all_to_all_single(received, send, [tokens * rows[me]] * ranks, [tokens * row for row in rows], group=group)
    wire_SBR = received.view(ranks * length, batch, rows[me])
    return _columns(wire_SBR, lanes, me)


def to_tokens(tensors_BShD: list[Tensor], lanes: list[Lane], group: dist.ProcessGroup) -> list[Tensor]:
    """This rank's tokens of all heads, `[B, L, H, D]`; copies of a kv head are summed in fp32."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    batch, total = tensors_BShD[0].shape[:2]
    length = total // ranks
    rows = [sum(lane.width(rank) for lane in lanes) for rank in range(ranks)]
    send_SBR = _side_by_side(tensors_BShD, lanes, me)
    received = send_SBR.new_empty(length * batch * sum(rows))
    tokens = length * batch
    dist.all_to_all_single(received, send_SBR.view(-1), [tokens * row for row in rows], [tokens * rows[me]] * ranks, group=group)
    return _unpack(received, lanes, rows, batch, length)


def _pack(send: Tensor, tensors_BLHD: list[Tensor], lanes: list[Lane], rows: list[int]) -> None:
    """Each destination's block is `[L, B, row]`: its heads of every tensor side by side."""
    batch, length = tensors_BLHD[0].shape[:2]
    blocks = _blocks(send, rows, batch, length)
    column = [0] * len(rows)
    for tensor, lane in zip(tensors_BLHD, lanes, strict=True):
        if lane.even and len(set(rows)) == 1:
            whole_PLBR = send.view(len(rows), length, batch, rows[0])
            part = whole_PLBR[..., column[0] : column[0] + lane.width(0)].unflatten(-1, (-1, lane.size))
            part.copy_(tensor.unflatten(2, (len(rows), -1)).permute(2, 1, 0, 3, 4))
        else:
            for rank, block_LBR in enumerate(blocks):
                start, end = lane.ranges[rank]
                part = block_LBR[..., column[rank] : column[rank] + lane.width(rank)].unflatten(-1, (-1, lane.size))
                part.copy_(tensor[:, :, start:end].transpose(0, 1))
        column = [at + lane.width(rank) for rank, at in enumerate(column)]


def _unpack(received: Tensor, lanes: list[Lane], rows: list[int], batch: int, length: int) -> list[Tensor]:
    blocks = _blocks(received, rows, batch, length)
    column = [0] * len(rows)
    outputs: list[Tensor] = []
    for lane in lanes:
        shape = (batch, length, lane.heads, lane.size)
        if lane.even and len(set(rows)) == 1:
            whole_PLBR = received.view(len(rows), length, batch, rows[0])
            part = whole_PLBR[..., column[0] : column[0] + lane.width(0)].unflatten(-1, (-1, lane.size))
            outputs.append(part.permute(2, 1, 0, 3, 4).reshape(shape))
        else:
            outputs.append(_gather_lane(blocks, lane, column, received.new_empty(shape)))
        column = [at + lane.width(rank) for rank, at in enumerate(column)]
    return outputs


def _gather_lane(blocks: list[Tensor], lane: Lane, column: list[int], out_BLHD: Tensor) -> Tensor:
    # fp32 is where copies of one kv head meet; fp64 stays fp64.
    exact = torch.promote_types(out_BLHD.dtype, torch.float32)
    target = out_BLHD if lane.covers_once else torch.zeros_like(out_BLHD, dtype=exact)
    for rank, block_LBR in enumerate(blocks):
        start, end = lane.ranges[rank]
        part = block_LBR[..., column[rank] : column[rank] + lane.width(rank)].unflatten(-1, (-1, lane.size))
        if lane.covers_once:
            target[:, :, start:end].copy_(part.transpose(0, 1))
        else:
            target[:, :, start:end] += part.transpose(0, 1)
    return target.to(out_BLHD.dtype)


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
