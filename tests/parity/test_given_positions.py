"""Positions and packing against transformers' eager attention with the same call: logits, loss and gradients in fp64.

The reference is given the whole batch at once, as it is: no document is run apart for it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.sequence.batch import shard_batch
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.parity import gradient_errors
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

LENGTH = 18
# RoPE, RoPE beside a window, positions that are learned (BioGPT's begin at 2 in their table), RoPE in one layer of two.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "smollm3": {},
}
_COUNT = torch.arange(LENGTH)
ONE_DOCUMENT = {
    "spaced": 2 * _COUNT,
    "gapped": _COUNT + 30 * (_COUNT >= 7),
    "repeated": _COUNT // 2,
    "constant": torch.full((LENGTH,), 3),
    "decreasing": _COUNT.flip(0),
    "offset": _COUNT + 40,
}
DOCUMENTS = {
    "packed": torch.cat([torch.arange(n) for n in (7, 1, 4, 6)]),
    "from two": torch.cat([torch.arange(n) + 2 for n in (5, 9, 4)]),
    "goes on": torch.cat([torch.arange(9) + 50, torch.arange(9)]),
}


def _batches() -> dict[str, dict[str, Tensor]]:
    """The calls, by name; labels of documents' first tokens are -100, for Ithaca learns none of them."""
    plain = small_batch(2, LENGTH, seed=3)
    ones = {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    calls = {name: plain | ones | {"position_ids": ids.expand(2, LENGTH)} for name, ids in ONE_DOCUMENT.items()}
    calls["one row of positions for all"] = plain | ones | {"position_ids": (2 * _COUNT)[None]}
    for name, ids in DOCUMENTS.items():
        # Rows of unequal structure: the second is one document.
        both = torch.stack([ids, _COUNT])
        first = torch.nn.functional.pad(both.diff(dim=1) != 1, (1, 0))
        calls[name] = plain | {"position_ids": both, "labels": plain["labels"].masked_fill(first, -100)}
    left = torch.ones(2, LENGTH, dtype=torch.long)
    left[0, :5] = 0
    counted = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
    labels = plain["labels"].masked_fill(left == 0, -100)
    labels[0, 5] = -100
    calls["left-padded"] = plain | {"attention_mask": left, "position_ids": counted, "labels": labels}
    return calls


def _errors(kind: str, degree: int, memory: Any) -> dict[str, float]:
    """The worst of loss, logits and gradients, by call."""
    mesh = init_mesh(sp=degree)
    found = {}
    for name, batch in _batches().items():
        if kind in NEVER_PACKS and name in DOCUMENTS:
            continue
        truth = small_model(kind, **FAMILIES[kind])
        model = parallelize(copy.deepcopy(truth), mesh, memory=memory)
        with compute_in_fp64():
            expected = truth(**batch, use_cache=False)
            expected.loss.backward()
            loss = causal_loss(model, batch, mesh)
            loss.backward()
            with torch.no_grad():
                shard = shard_batch(batch, mesh)
                logits = model(**shard.inputs).logits
        piece = expected.logits.detach()[:, shard.layout.shard(mesh.sequence_rank)]
        real = shard.real[:, : piece.shape[1]]
        gradients = {key: p.grad for key, p in truth.named_parameters() if p.grad is not None}
        found[name] = max(
            abs(float(loss.detach() - expected.loss.detach())),
            relative_error(logits[:, : piece.shape[1]][real], piece[real]),
            *gradient_errors(model, gradients).values(),
        )
    return found


# In transformers BioGPT takes every row for one document; here documents are kept apart in every architecture, which
# the matrix holds document by document.
NEVER_PACKS = ("biogpt",)
# It does not name its layers.
MEMORY: dict[str, Any] = {"biogpt": None}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "smollm3")]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "biogpt", *SLOW])
def test_positions_given_equal_transformers(kind: str) -> None:
    for rank in run_ranks(2, _errors, kind, 2, MEMORY.get(kind, "auto")):
        assert {name: error for name, error in rank.items() if not error < FP64} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "degree"), [("llama", 1), ("biogpt", 1), ("gpt2", 4), ("llama", 3)])
def test_positions_given_other_degrees_equal_transformers(kind: str, degree: int) -> None:
    for rank in run_ranks(degree, _errors, kind, degree, None):
        assert {name: error for name, error in rank.items() if not error < FP64} == {}


def _beyond(kind: str) -> float:
    mesh = init_mesh(sp=2)
    model = parallelize(small_model(kind, **FAMILIES[kind]), mesh, memory=MEMORY.get(kind, "auto"))
    positions = {"position_ids": _COUNT[None] + 112, "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}
    return float(causal_loss(model, small_batch(1, LENGTH) | positions, mesh).detach())


@pytest.mark.parametrize("kind", ["gpt2", "biogpt"])
def test_position_beyond_the_table_is_refused_on_all_ranks(kind: str) -> None:
    """The last shard alone has it."""
    match = "has the position 129, this model has learned 128: pass position_ids of 0 to 127"
    expect_refusal(2, _beyond, kind, error="BatchError", match=match)


def test_position_of_rope_has_no_limit() -> None:
    assert run_ranks(2, _beyond, "llama")
