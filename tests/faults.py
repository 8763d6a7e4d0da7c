"""Planted faults: each is a context manager that breaks one thing the way existing systems have broken it.

A parity test that passes with a fault planted proves nothing, so every property has one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ithaca.attention import exchange, local, ulysses
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.loss import causal
from ithaca.models import binding, experts
from ithaca.sequence import batch as batch_module
from ithaca.sequence.batch import Shard, cut_batch
from ithaca.sequence.layout import SequenceLayout


@contextmanager
def _changed_shard(change: Callable[[Shard], Shard]) -> Iterator[None]:
    original = cut_batch

    def changed(*args: Any, **kwargs: Any) -> Shard:
        return change(original(*args, **kwargs))

    with _cutting(changed):
        yield


@contextmanager
def _cutting(changed: Callable[..., Shard]) -> Iterator[None]:
    """Cut batches by `changed`, in `causal_loss` and in the loop that agrees on all micro-batches of a step."""
    with patch.object(batch_module, "cut_batch", changed), patch.object(causal, "cut_batch", changed):
        yield


def _with_inputs(shard: Shard, **inputs: Any) -> Shard:
    return replace(shard, inputs=shard.inputs | inputs)


def positions_not_offset() -> AbstractContextManager[None]:
    """Every shard counts its positions from 0."""

    def change(shard: Shard) -> Shard:
        positions = shard.inputs["position_ids"]
        return _with_inputs(shard, position_ids=torch.arange(positions.shape[1]).expand_as(positions))

    return _changed_shard(change)


def document_leak() -> AbstractContextManager[None]:
    """All documents of a row are one."""

    def change(shard: Shard) -> Shard:
        old = shard.layout
        merged = tuple(((row[0][0], row[-1][1]),) if row else () for row in old.documents)
        return _with_inputs(shard, sequence_layout=replace(old, documents=merged))

    return _changed_shard(change)


def _changed_documents(change: Callable[[SequenceLayout], tuple[tuple[tuple[int, int], ...], ...]]) -> Any:
    def replaced(shard: Shard) -> Shard:
        return _with_inputs(shard, sequence_layout=replace(shard.layout, documents=change(shard.layout)))

    return _changed_shard(replaced)


def joined_on_shard_bounds() -> AbstractContextManager[None]:
    """A document that begins exactly on a shard's bound is one with what stands before it."""

    def joined(row: tuple[tuple[int, int], ...], size: int) -> tuple[tuple[int, int], ...]:
        spans: list[tuple[int, int]] = []
        for start, end in row:
            if spans and start % size == 0 and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((start, end))
        return tuple(spans)

    return _changed_documents(lambda old: tuple(joined(row, old.shard_length) for row in old.documents))


def bounds_of_the_first_row() -> AbstractContextManager[None]:
    """All rows of a packed batch are given the first one's documents."""
    return _changed_documents(lambda old: (old.documents[0],) * old.batch if old.batch > 1 else old.documents)


def single_tokens_joined() -> AbstractContextManager[None]:
    """A document of one token is one with what stands after it."""

    def joined(row: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        spans: list[tuple[int, int]] = []
        for start, end in row:
            if spans and spans[-1] == (start - 1, start):
                spans[-1] = (start - 1, end)
            else:
                spans.append((start, end))
        return tuple(spans)

    return _changed_documents(lambda old: tuple(joined(row) for row in old.documents))


def documents_end_after_two_shards() -> AbstractContextManager[None]:
    """A document that began two shards before is not attended any more."""

    def cut(row: tuple[tuple[int, int], ...], size: int) -> Iterator[tuple[int, int]]:
        for start, end in row:
            middle = (start // size + 2) * size
            yield from ((start, end),) if middle >= end else ((start, middle), (middle, end))

    return _changed_documents(lambda old: tuple(tuple(cut(row, old.shard_length)) for row in old.documents))


def padded_shards_attended() -> AbstractContextManager[None]:
    """A padding mask that covers a whole shard is dropped there."""

    def grown(row: tuple[tuple[int, int], ...], size: int) -> tuple[tuple[int, int], ...]:
        return ((0, row[0][1]), *row[1:]) if row and row[0][0] and row[0][0] % size == 0 else row

    return _changed_documents(lambda old: tuple(grown(row, old.shard_length) for row in old.documents))


@contextmanager
def targets_over_shard_bounds() -> Iterator[None]:
    """A shard's last token learns the next shard's first, whosever document that begins."""
    original = cut_batch

    def changed(batch: Any, shards: int, rank: int, device: Any, **options: Any) -> Shard:
        shard = original(batch, shards, rank, device, **options)
        labels, end = batch["labels"], shard.layout.shard(rank).stop
        if end >= labels.shape[1] or "position_ids" not in batch:
            return shard
        targets = shard.targets.clone()
        targets[:, -1] = labels[:, end]
        return replace(shard, targets=targets)

    with _cutting(changed):
        yield


def padding_attended() -> AbstractContextManager[None]:
    """The padding mask is dropped."""

    def change(shard: Shard) -> Shard:
        old = shard.layout
        whole = SequenceLayout.whole_rows(old.batch, old.length, old.shards)
        return _with_inputs(shard, sequence_layout=whole)

    return _changed_shard(change)


def labels_shifted_after_cutting() -> AbstractContextManager[None]:
    """A shard's last token does not learn its successor on the next rank."""

    def change(shard: Shard) -> Shard:
        targets = shard.targets.clone()
        targets[:, -1] = -100
        return replace(shard, targets=targets)

    return _changed_shard(change)


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Each rank divides by its own count, and the ranks' means are averaged."""
    original = causal.loss_of

    def own_mean(bound: Any, shard: Shard, output: Any, **options: Any) -> Tensor:
        return original(bound, shard, output, **options) / (shard.targets != -100).sum().clamp(min=1)

    with (
        patch.object(causal, "loss_of", own_mean),
        patch.object(causal, "agree", lambda mesh, cuts, *_: [1] * len(cuts)),
    ):
        yield


@contextmanager
def gradients_times_world() -> Iterator[None]:
    """Gradients too large by the number of ranks, which AdamW hides until clipping."""
    with patch.object(causal, "averages_gradients", lambda model: True):
        yield


@contextmanager
def dropped_head() -> Iterator[None]:
    """One query head never arrives."""
    original = ulysses.UlyssesPlan.to_heads

    def lossy(plan: ulysses.UlyssesPlan, tensors: list[Tensor], ranges: list[Any]) -> list[Tensor]:
        coming = original(plan, tensors, ranges)
        arrived = coming.wait() if isinstance(coming, exchange.Pending) else coming
        arrived[0][:, :, -1].zero_()
        return arrived

    with patch.object(ulysses.UlyssesPlan, "to_heads", lossy):
        yield


@contextmanager
def kv_gradients_of_one_copy() -> Iterator[None]:
    """Where several ranks used a kv head, only the last one's gradient is kept."""

    def keep_last(target: Tensor, blocks: list[Tensor], lane: Any, column: list[int]) -> None:
        for rank, block in enumerate(blocks):
            start, end = lane.ranges[rank]
            target[:, :, start:end].copy_(exchange._part(block, lane, rank, column[rank]).transpose(0, 1))

    with patch.object(exchange, "_add", keep_last):
        yield


@contextmanager
def _changed_spec(**changes: Any) -> Iterator[None]:
    def spec(**settings: Any) -> AttentionSpec:
        return AttentionSpec(**(settings | changes))

    with patch.object(binding, "AttentionSpec", spec):
        yield


def window_dropped() -> AbstractContextManager[None]:
    return _changed_spec(window=None)


def softcap_dropped() -> AbstractContextManager[None]:
    return _changed_spec(softcap=None)


def not_causal() -> AbstractContextManager[None]:
    return _changed_spec(causal=False)


@contextmanager
def sinks_not_sliced() -> Iterator[None]:
    """Every rank takes the first heads' sinks."""

    def first(plan: Any, sinks: Tensor | None, part: Any) -> Tensor | None:
        start, end = part.q[plan.rank]
        return None if sinks is None else sinks[: end - start]

    with patch.object(ulysses.UlyssesPlan, "own_sinks", first):
        yield


@contextmanager
def sinks_without_gradient() -> Iterator[None]:
    with patch.object(local.LocalAttention, "sinks_backward", lambda self, dout, out, lse, sinks: sinks * 0):
        yield


@contextmanager
def rope_sees_the_shard() -> Iterator[None]:
    """Length-dependent RoPE takes the largest local position."""
    with patch.object(binding, "pin_length", lambda model, layout: []):
        yield


@contextmanager
def auxiliary_loss_of_the_shard() -> Iterator[None]:
    """The router's loss over the local tokens alone."""

    def alone(counts: Tensor, group: Any = None) -> None:
        counts.mul_(torch.distributed.get_world_size(group))

    with patch.object(experts, "dist", SimpleNamespace(all_reduce=alone)):
        yield


@contextmanager
def nan_on_masked_shards() -> Iterator[None]:
    """A mean over no tokens."""
    original = causal.loss_of

    def mean(bound: Any, shard: Shard, output: Any, **options: Any) -> Tensor:
        count = (shard.targets != -100).sum()
        return original(bound, shard, output, **options) / count * count

    with patch.object(causal, "loss_of", mean):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        positions_not_offset, document_leak, padding_attended, labels_shifted_after_cutting, mean_of_means,
        gradients_times_world, dropped_head, kv_gradients_of_one_copy, window_dropped, softcap_dropped, not_causal,
        sinks_not_sliced, sinks_without_gradient, rope_sees_the_shard, auxiliary_loss_of_the_shard, nan_on_masked_shards,
        joined_on_shard_bounds, bounds_of_the_first_row, single_tokens_joined, documents_end_after_two_shards,
        padded_shards_attended, targets_over_shard_bounds,
    )
}  # fmt: skip
