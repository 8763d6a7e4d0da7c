"""A whole batch in, shards out: documents, positions and targets survive the cut, and bad batches are refused.

The cases are those that went wrong in silence elsewhere: a shard's last token not learning its successor, a
document trained on the next one's first token, padding attended or counted, a mask dropped.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError, UnsupportedError
from ithaca.sequence.batch import Shard, count_targets, cut_batch

CPU = torch.device("cpu")
N = IGNORE_INDEX


def cut(batch: dict[str, Any], shards: int = 1, rank: int = 0, **options: Any) -> Shard:
    return cut_batch(batch, shards, rank, CPU, **options)


def whole(batch: dict[str, Any], shards: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, targets and real of all shards, put together again."""
    pieces = [cut(batch, shards, rank) for rank in range(shards)]
    assert len({piece.layout for piece in pieces}) == 1
    assert len({piece.count for piece in pieces}) == 1
    names = ("input_ids", "position_ids")
    inputs = [torch.cat([piece.inputs[name] for piece in pieces], 1) for name in names]
    return (*inputs, torch.cat([p.targets for p in pieces], 1), torch.cat([p.real for p in pieces], 1))  # type: ignore[return-value]


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


TOKENS = ids([11, 12, 13, 14, 15, 16, 17])
POSITIONS = ids([0, 1, 2, 0, 1, 0, 0])
SPANS = ((0, 3), (3, 5), (5, 6), (6, 7))


@pytest.mark.parametrize(
    "documents",
    [
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS[0]},
        {"cu_seqlens": torch.tensor([0, 3, 5, 6, 7], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([[0, 3, 5, 6, 7]])},
        {"cu_seq_lens_q": [0, 3, 5, 6, 7], "cu_seq_lens_k": [0, 3, 5, 6, 7], "max_length_q": 3, "max_length_k": 3},
        {"document_ids": ids([4, 4, 4, 0, 0, 9, 1])},
        {"seq_idx": ids([0, 0, 0, 1, 1, 2, 3]), "position_ids": POSITIONS},
    ],
    ids=lambda d: "+".join(d),
)
def test_document_keys_give_equal_layouts(documents: dict[str, Any]) -> None:
    """One-token documents among them."""
    shard = cut({"input_ids": TOKENS, **documents})
    assert shard.layout.documents == (SPANS,)
    assert shard.inputs["position_ids"].tolist() == POSITIONS.tolist()
    assert shard.targets.tolist() == [[12, 13, N, 15, N, N, N]]
    assert shard.count == count_targets({"input_ids": TOKENS, **documents}) == 3


def test_cu_seqlens_over_rows_give_documents() -> None:
    shard = cut({"input_ids": ids([1, 2, 3], [4, 5, 6]), "cu_seqlens": torch.tensor([0, 2, 3, 6])})
    assert shard.layout.documents == (((0, 2), (2, 3)), ((0, 3),))
    assert shard.inputs["position_ids"].tolist() == [[0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("mask", "spans", "targets"),
    [
        ([1, 1, 1, 1, 1, 1, 1], ((0, 7),), [12, 13, 14, 15, 16, 17, N]),
        ([0, 0, 1, 1, 1, 1, 1], ((2, 7),), [N, N, 14, 15, 16, 17, N]),
        ([1, 1, 1, 1, 0, 0, 0], ((0, 4),), [12, 13, 14, N, N, N, N]),
        ([0, 1, 1, 1, 0, 0, 0], ((1, 4),), [N, 13, 14, N, N, N, N]),
        ([0, 0, 0, 1, 0, 0, 0], ((3, 4),), [N] * 7),
        ([0, 0, 0, 0, 0, 0, 0], (), [N] * 7),
    ],
    ids=["full", "left", "right", "both", "one", "none"],
)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_padding_mask_gives_documents(
    mask: list[int], spans: tuple[Any, ...], targets: list[int], dtype: torch.dtype
) -> None:
    shard = cut({"input_ids": TOKENS, "attention_mask": ids(mask).to(dtype)})
    assert shard.layout.documents == (spans,)
    assert shard.targets.tolist() == [targets]
    assert shard.real.tolist() == [[bool(m) for m in mask]]
    assert shard.count == sum(t != N for t in targets)
    # As transformers does in training: without position ids a padded row counts from its first column.
    assert shard.inputs["position_ids"].tolist() == [list(range(7))]


def test_padding_positions_begin_no_document() -> None:
    """A collator's padded positions stay 0: that must not number documents, left nor right."""
    left = {"attention_mask": ids([0, 0, 0, 1, 1, 1, 1]), "position_ids": ids([0, 0, 0, 0, 1, 2, 3])}
    right = {"attention_mask": ids([1, 1, 1, 1, 0, 0, 0]), "position_ids": ids([0, 1, 2, 3, 0, 0, 0])}
    packed = {"document_ids": ids([0, 0, 1, 1, -1, -1, -1]), "position_ids": ids([0, 1, 0, 1, 0, 0, 0])}
    ones = {"attention_mask": ids([0, 0, 1, 1, 1, 1, 1]), "position_ids": ids([1, 1, 0, 1, 2, 3, 4])}
    assert cut({"input_ids": TOKENS, **left}).layout.documents == (((3, 7),),)
    assert cut({"input_ids": TOKENS, **right}).layout.documents == (((0, 4),),)
    assert cut({"input_ids": TOKENS, **packed}).layout.documents == (((0, 2), (2, 4)),)
    assert cut({"input_ids": TOKENS, **ones}).layout.documents == (((2, 7),),)
    assert cut({"input_ids": TOKENS, **left, "document_ids": ids([0] * 7)}).layout.documents == (((3, 7),),)


def test_document_ids_negative_are_padding() -> None:
    shard = cut({"input_ids": TOKENS, "document_ids": ids([-1, 0, 0, 1, 1, -1, -1])})
    assert shard.layout.documents == (((1, 3), (3, 5)),)
    assert shard.targets.tolist() == [[N, 13, N, 15, N, N, N]]
    assert shard.inputs["position_ids"].tolist()[0][1:5] == [0, 1, 0, 1]


def test_row_of_padding_has_no_documents() -> None:
    batch = {"input_ids": ids([1, 2, 3], [4, 5, 6]), "attention_mask": ids([1, 1, 1], [0, 0, 0])}
    shard = cut(batch)
    assert shard.layout.documents == (((0, 3),), ())
    assert shard.count == 2


def test_documents_with_continued_positions_keep_them() -> None:
    shard = cut({"input_ids": TOKENS, "position_ids": ids(list(range(7))), "cu_seqlens": [0, 3, 7]})
    assert shard.layout.documents == (((0, 3), (3, 7)),)
    assert shard.inputs["position_ids"].tolist() == [list(range(7))]
    assert shard.targets.tolist() == [[12, 13, N, 15, 16, 17, N]]


SPREAD = {
    "spaced": [0, 2, 4, 6, 8, 10, 12],
    "gapped": [0, 1, 2, 50, 51, 52, 53],
    "repeated": [0, 1, 1, 2, 2, 2, 3],
    "constant": [4] * 7,
    "decreasing": [6, 5, 4, 3, 2, 1, 0],
    "zigzag": [3, 4, 5, 4, 3, 4, 5],
    "far": [900, 901, 902, 903, 904, 905, 906],
}


@pytest.mark.parametrize("name", list(SPREAD))
@pytest.mark.parametrize("beside", [{"attention_mask": ids([1] * 7)}, {"document_ids": ids([3] * 7)}])
def test_positions_beside_mask_name_no_documents(name: str, beside: dict[str, Any]) -> None:
    positions = ids(SPREAD[name])
    shard = cut({"input_ids": TOKENS, "position_ids": positions, **beside})
    assert shard.layout.documents == (((0, 7),),)
    assert shard.inputs["position_ids"].tolist() == positions.tolist()
    assert shard.count == 6


def test_positions_from_nonzero_start_give_documents() -> None:
    """A row that goes on with the last one's document, and collators for models whose positions begin at 2."""
    goes_on, from_two = ids([90, 91, 92, 0, 1, 0, 1]), ids([2, 3, 4, 2, 2, 2, 3])
    assert cut({"input_ids": TOKENS, "position_ids": goes_on}).layout.documents == (((0, 3), (3, 5), (5, 7)),)
    assert cut({"input_ids": TOKENS, "position_ids": from_two}).layout.documents == (((0, 3), (3, 4), (4, 5), (5, 7)),)


def test_row_of_equal_positions_is_accepted() -> None:
    """A packed batch with a row that is padding alone: nothing is to be learned there."""
    batch = {"position_ids": ids(list(range(7)), [0] * 7), "labels": ids([1] * 7, [N] * 7)}
    assert cut({"input_ids": TOKENS.expand(2, 7), **batch}).count == 6


def test_positions_unsigned_restart_gives_documents() -> None:
    shard = cut({"input_ids": TOKENS, "position_ids": POSITIONS.to(torch.uint8)})
    assert shard.layout.documents == (SPANS,)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8])
def test_shards_concatenated_equal_padded_batch(shards: int) -> None:
    batch = {
        "input_ids": torch.stack([TOKENS[0], TOKENS[0] + 10]),
        "position_ids": torch.stack([POSITIONS[0], torch.arange(7)]),
        "labels": ids([11, 12, N, 14, 15, 16, 17], [21, N, 23, 24, 25, 26, 27]),
    }
    padded = -(-7 // shards) * shards
    pad = padded - 7
    got_ids, positions, targets, real = whole(batch, shards)
    assert got_ids.tolist() == [[*row, *row[-1:] * pad] for row in batch["input_ids"].tolist()]
    assert positions.tolist() == [[*row, *[0] * pad] for row in batch["position_ids"].tolist()]
    assert targets.tolist() == [[12, N, N, 15, N, N, N, *[N] * pad], [N, 23, 24, 25, 26, 27, N, *[N] * pad]]
    assert real.tolist() == [[True] * 7 + [False] * pad] * 2


def test_targets_of_last_shard_token_are_next_shards() -> None:
    first, second = (cut({"input_ids": ids([1, 2, 3, 4])}, 2, rank) for rank in (0, 1))
    assert first.targets.tolist() == [[2, 3]]
    assert second.targets.tolist() == [[4, N]]
    # Each knows the targets of the whole row, its successor's included.
    assert first.count == second.count == 3


def test_shards_beyond_tokens_are_padding() -> None:
    got_ids, _, targets, real = whole({"input_ids": ids([5, 6])}, 8)
    assert got_ids.tolist() == [[5, 6, 6, 6, 6, 6, 6, 6]]
    assert targets.tolist() == [[6, N, N, N, N, N, N, N]]
    assert real.sum() == 2


def test_labels_give_targets_within_documents() -> None:
    """Labels are shifted, shift_labels are not; without labels the ids are learned."""
    assert cut({"input_ids": ids([1, 2, 3])}).targets.tolist() == [[2, 3, N]]
    assert cut({"input_ids": ids([1, 2, 3]), "labels": ids([7, 8, N])}).targets.tolist() == [[8, N, N]]
    given = {"input_ids": ids([1, 2, 3]), "labels": ids([7, 8, 9]), "shift_labels": ids([8, N, 4])}
    assert cut(given).targets.tolist() == [[8, N, 4]]
    assert cut(given | {"attention_mask": ids([1, 1, 0])}).targets.tolist() == [[8, N, N]]
    assert cut({"input_ids": ids([1, 2]), "labels": ids([N, N])}).count == 0


def test_ids_of_any_integer_dtype_become_int64() -> None:
    for dtype in (torch.int32, torch.int16, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint32):
        shard = cut({"input_ids": ids([1, 2, 3]).to(dtype), "labels": ids([1, 2, 3]).to(dtype)}, vocab_size=20)
        assert shard.inputs["input_ids"].dtype == torch.int64
        assert shard.inputs["input_ids"].tolist() == [[1, 2, 3]]
        assert shard.targets.dtype == torch.int64
        assert shard.targets.tolist() == [[2, 3, N]]


def test_batch_of_other_type_is_refused() -> None:
    with pytest.raises(BatchError, match="the batch is a list: a dict with input_ids"):
        cut([1, 2, 3])  # type: ignore[arg-type]


def test_embeddings_give_shards_with_gradient() -> None:
    embeds = torch.arange(24.0).view(2, 3, 4)
    batch = {"inputs_embeds": embeds, "labels": ids([1, 2, 3], [4, 5, 6])}
    pieces = [cut(batch, 2, rank) for rank in (0, 1)]
    together = torch.cat([piece.inputs["inputs_embeds"] for piece in pieces], 1)
    assert torch.equal(together[:, :3], embeds)
    assert together.shape == (2, 4, 4)
    assert torch.equal(together[:, 3], embeds[:, 2])
    assert pieces[0].targets.tolist() == [[2, 3], [5, 6]]
    assert "input_ids" not in pieces[0].inputs
    with pytest.raises(BatchError, match="without labels: pass labels"):
        cut({"inputs_embeds": embeds})


def test_max_position_is_of_whole_row() -> None:
    assert [cut({"input_ids": TOKENS}, 4, rank).layout.max_position for rank in range(4)] == [6] * 4
    far = {"input_ids": ids([1, 2, 3]), "position_ids": ids([90, 91, 92])}
    assert [cut(far, 3, rank).layout.max_position for rank in range(3)] == [92] * 3


def test_flags_are_inputs_redundant_keys_are_not() -> None:
    shard = cut({"input_ids": TOKENS, "output_router_logits": True, "use_cache": False, "num_items_in_batch": 3})
    assert sorted(shard.inputs) == ["input_ids", "output_router_logits", "position_ids", "sequence_layout"]
    assert shard.inputs["output_router_logits"] is True
    assert cut({"input_ids": TOKENS, "token_type_ids": None}).count == 6


GOOD = {"input_ids": ids([1, 2, 3, 4], [5, 6, 7, 8])}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input_ids": torch.empty(0, 4, dtype=torch.long)},
        BatchError,
        r"input_ids has shape \[0, 4\]: the batch is empty",
    ),
    ({"input_ids": torch.empty(2, 0, dtype=torch.long)}, BatchError, r"\[2, 0\]: the batch is empty"),
    ({"input_ids": torch.tensor([1, 2])}, BatchError, r"input_ids has shape \[2\]: \[B, S\] is needed"),
    ({"input_ids": None, "inputs_embeds": torch.ones(2, 3)}, BatchError, r"\[2, 3\]: \[B, S, hidden\] is needed"),
    ({"input_ids": [[1, 2]]}, BatchError, "input_ids is a list: a tensor is needed"),
    ({"input_ids": torch.ones(2, 4)}, BatchError, "input_ids is of torch.float32: ids are whole numbers"),
    ({"labels": [[1] * 4] * 2}, BatchError, "labels is a list: a tensor is needed"),
    ({"labels": torch.ones(2, 4, dtype=torch.bool)}, BatchError, "labels is of torch.bool: ids are whole numbers"),
    ({"input_ids": None}, BatchError, "neither input_ids nor inputs_embeds: pass one of them"),
    ({"inputs_embeds": torch.ones(2, 4, 3)}, BatchError, "input_ids and inputs_embeds: pass one of them"),
    ({"pixel_values": torch.ones(2)}, UnsupportedError, "'pixel_values', which cannot be sharded: known are input_ids"),
    ({"token_type_ids": ids([0] * 4, [0] * 4)}, UnsupportedError, "'token_type_ids'"),
    ({"labels": ids([1, 2, 3])}, BatchError, r"labels has shape \[1, 3\]: it needs that of the tokens, \[2, 4\]"),
    ({"shift_labels": ids([1, 2, 3])}, BatchError, r"shift_labels has shape \[1, 3\]"),
    (
        {"labels": ids([1, 2, 3, 50], [1, 2, 3, 4])},
        BatchError,
        "labels has the id 50: this model's vocabulary is 0 to 19",
    ),
    ({"labels": ids([1, 2, 3, -1], [1, 2, 3, 4])}, BatchError, "labels has the id -1: .* 0 to 19"),
    ({"input_ids": ids([1, 20])}, BatchError, "input_ids has the id 20: .* 0 to 19"),
    ({"input_ids": ids([1, -3])}, BatchError, "input_ids has the id -3: .* 0 to 19"),
    ({"input_ids": ids([1, N])}, BatchError, "input_ids has the id -100"),
    ({"attention_mask": torch.ones(2, 1, 4, 4)}, UnsupportedError, r"attention_mask is 4-D, \[2, 1, 4, 4\]: only 2-D"),
    (
        {"attention_mask": torch.ones(2, 4, 4)},
        UnsupportedError,
        r"is 3-D, .* as position_ids, cu_seqlens or document_ids",
    ),
    ({"attention_mask": {"full_attention": None}}, UnsupportedError, "attention_mask is dict: only 2-D"),
    ({"attention_mask": ids([1, 1, 2, 2], [1, 1, 1, 1])}, BatchError, "value 2: it takes 0 and 1; .* as document_ids"),
    ({"attention_mask": torch.full((2, 4), -1)}, BatchError, "value -1: it takes 0 and 1"),
    ({"attention_mask": ids([1, 1, 1])}, BatchError, r"attention_mask has shape \[1, 3\]: it needs .* \[2, 4\]"),
    ({"attention_mask": ids([1, 0, 1, 1], [1, 1, 1, 1])}, BatchError, "row 0: document 0 is not in one piece"),
    ({"position_ids": ids([0, 1, 2])}, BatchError, r"position_ids has shape \[1, 3\]: \[B, S\] = \[2, 4\] is needed"),
    ({"position_ids": torch.zeros(3, 2, 4, dtype=torch.long)}, BatchError, r"position_ids has shape \[3, 2, 4\]"),
    ({"position_ids": ids([-1, 0, 1, 2])}, BatchError, "position_ids has the value -1: positions count from 0"),
    ({"cu_seqlens": [0, 4, 7]}, BatchError, r"cu_seqlens must rise from 0 to 8 .*got \[0, 4, 7\]"),
    ({"cu_seqlens": [1, 4, 8]}, BatchError, "must rise from 0 to 8"),
    ({"cu_seqlens": [0, 4, 4, 8]}, BatchError, "must rise from 0 to 8"),
    ({"cu_seqlens": [0, 6, 4, 8]}, BatchError, "must rise from 0 to 8"),
    ({"cu_seqlens": [0]}, BatchError, "must rise from 0 to 8"),
    ({"cu_seqlens": [0, 3, 6, 8]}, BatchError, "a document crosses from one row into the next; end documents at 4"),
    ({"document_ids": ids([0, 0, 1])}, BatchError, r"document_ids has shape \[1, 3\]: it needs .* \[2, 4\]"),
    ({"document_ids": ids([0, 1, 0, 0], [0] * 4)}, BatchError, "row 0: document 0 is not in one piece"),
    ({"document_ids": ids([0] * 4, [1] * 4), "cu_seqlens": [0, 4, 8]}, BatchError, "given in one way only"),
    (
        {"document_ids": ids([0] * 4, [0] * 4), "position_ids": ids([0, 1, 0, 1])},
        BatchError,
        "restart inside a document",
    ),
    ({"cu_seqlens": [0, 4, 8], "position_ids": ids([5, 6, 5, 6])}, BatchError, "restart inside .*: they disagree"),
    ({"position_ids": torch.ones(4)}, BatchError, "position_ids is of torch.float32: whole numbers"),
    # Without a mask each of these jumps begins a document for transformers, which nobody asked for.
    ({"position_ids": ids([0, 2, 4, 6])}, BatchError, "row 0 go from 0 to 2 at token 1, .* an attention_mask of ones"),
    ({"position_ids": ids([0, 1, 2, 3], [0, 1, 5, 6])}, BatchError, "row 1 go from 1 to 5 at token 2"),
    ({"position_ids": ids([0, 1, 1, 2])}, BatchError, "row 0 go from 1 to 1 at token 2"),
    ({"position_ids": ids([3, 2, 1, 0])}, BatchError, "row 0 go from 3 to 2 at token 1"),
    ({"position_ids": ids([0, 0, 0, 0])}, BatchError, "row 0 go from 0 to 0 at token 1"),
    ({"position_ids": ids([0, 1, 0, 1]), "use_cache": True}, BatchError, "restart beside use_cache=True"),
    # Under a mask a packed row is one document to eager attention, several to flash attention.
    *[
        ({"attention_mask": ids(mask, [1] * 4), "position_ids": positions}, BatchError, f"row {row} restart beside")
        for mask, positions, row in (
            ([1, 1, 1, 1], ids([0, 1, 0, 1]), 0),
            ([1, 1, 1, 1], ids([0, 1, 2, 3], [2, 3, 4, 2]), 1),
            ([1, 1, 1, 0], ids([0, 0, 1, 0], [0, 1, 2, 3]), 0),
        )
    ],
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:44] for _, _, message in BAD])
def test_bad_batch_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    assert cut(GOOD, 2, 1, vocab_size=20).count == 6
    for rank in (0, 1):
        with pytest.raises(error, match=message):
            cut(GOOD | change, 2, rank, vocab_size=20)


def test_random_packed_batches_equal_reference() -> None:
    """Any documents, padding and shard count: cut, put together, compared token by token with a plain loop."""
    draw = random.Random(1)
    for _ in range(100):
        length, rows, shards = draw.randint(1, 30), draw.randint(1, 3), draw.randint(1, 6)
        documents = [_random_documents(draw, length) for _ in range(rows)]
        tokens = torch.randint(1, 99, (rows, length))
        labels = tokens.masked_fill(torch.rand(rows, length) < 0.3, N)
        batch = {"input_ids": tokens, "labels": labels, "document_ids": torch.tensor(documents)}
        _, positions, targets, real = whole(batch, shards)
        for b, row in enumerate(documents):
            expected = []
            for t, number in enumerate(row):
                follows = t + 1 < length and row[t + 1] == number >= 0
                expected.append(int(labels[b, t + 1]) if follows else N)
                if number >= 0:
                    assert positions[b, t] == t - row.index(number)
            assert targets[b].tolist() == expected + [N] * (targets.shape[1] - length)
            assert real[b].tolist() == [number >= 0 for number in row] + [False] * (targets.shape[1] - length)
        assert cut(batch, shards, 0).count == int((targets != N).sum()) == count_targets(batch)


def _random_documents(draw: random.Random, length: int) -> list[int]:
    row: list[int] = []
    for number in range(length):
        row += [-1] * draw.choice([0, 0, 1]) + [number] * draw.randint(1, 6)
    return row[:length]
