"""Batches drawn from a seed: any mask with any positions, and what transformers makes of the same call.

The truth is transformers' eager attention on one process with the same keyword arguments, and where that does not look
for packed rows the documents one by one. Labels are left out of it
where Ithaca documents that it learns nothing: on padding, on a row's first token after padding, and on a packed
document's first token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import ithaca
from ithaca.errors import IthacaError
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.small_models.features import small_batch, small_model
from tests.pairs import cover
from tests.ranks import run_ranks
from tests.tolerances import FP64

MODELS = ("llama", "gpt2", "gemma2", "gpt_neox", "qwen3_moe", "gpt_oss")
# Given positions that restart, transformers' flash attention keeps documents apart here too, its eager attention does not.
_LOOKS_FOR_NONE = ("gpt_oss",)

Maker = Callable[[int, int, Random], Tensor | None]


def _rows(make: Callable[[int, Random], list[int]]) -> Maker:
    return lambda rows, length, random: torch.tensor([make(length, random) for _ in range(rows)])


def _left(length: int, random: Random) -> list[int]:
    pads = random.randrange(length)
    return [0] * pads + [1] * (length - pads)


def _both(length: int, random: Random) -> list[int]:
    start = random.randrange(length - 1)
    end = random.randint(start + 1, length)
    return [int(start <= at < end) for at in range(length)]


def _restarting(length: int, random: Random) -> list[int]:
    positions: list[int] = []
    while len(positions) < length:
        positions += range(random.randint(1, length))
    return positions[:length]


MASKS: dict[str, Maker] = {
    "none": lambda rows, length, random: None,
    "ones": lambda rows, length, random: torch.ones(rows, length, dtype=torch.long),
    "left": _rows(_left),
    "right": _rows(lambda length, random: _left(length, random)[::-1]),
    "both": _rows(_both),
    "bool": lambda rows, length, random: _rows(_left)(rows, length, random).bool(),
    "hole": _rows(lambda length, random: [int(random.random() < 0.8) for _ in range(length)]),
    "zeros": lambda rows, length, random: torch.zeros(rows, length, dtype=torch.long),
}
POSITIONS: dict[str, Maker] = {
    "none": lambda rows, length, random: None,
    "counted": lambda rows, length, random: torch.arange(length).expand(rows, length),
    "one row": lambda rows, length, random: torch.arange(length)[None],
    "offset": lambda rows, length, random: torch.arange(length).expand(rows, length) + random.randint(1, 9),
    "spaced": lambda rows, length, random: torch.arange(length).expand(rows, length) * 2,
    "restarting": _rows(_restarting),
    "one row restarting": lambda rows, length, random: _rows(_restarting)(1, length, random),
    "shuffled": _rows(lambda length, random: random.sample(range(length), length)),
    "repeated": lambda rows, length, random: (torch.arange(length) // 2).expand(rows, length),
    "by mask": lambda rows, length, random: None,
}


# Model, mask, positions, degree and memory mode: a seed takes one of them, and draws its rows.
CASES = cover(MODELS, list(MASKS), list(POSITIONS), (2, 3), ("auto", None))


def draw(seed: int) -> tuple[str, str, dict[str, Any]]:
    """Return a model, a description and a batch."""
    random = Random(f"batch {seed}")
    kind, mask, positions, *_ = CASES[seed % len(CASES)]
    rows, length = random.randint(1, 3), random.randint(2, 19)
    batch: dict[str, Any] = small_batch(rows, length, seed=seed)
    batch["attention_mask"] = MASKS[mask](rows, length, random)
    batch["position_ids"] = POSITIONS[positions](rows, length, random)
    if positions == "by mask" and batch["attention_mask"] is not None:
        batch["position_ids"] = (batch["attention_mask"].long().cumsum(1) - 1).clamp(min=0)
    batch = {name: value for name, value in batch.items() if value is not None}
    batch["labels"] = batch["labels"].masked_fill(_unlearned(batch), -100)
    return kind, f"{seed}: {kind}, {rows} x {length}, mask {mask}, positions {positions}", batch


def _unlearned(batch: dict[str, Any]) -> Tensor:
    """Tokens that Ithaca documents as no targets."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    unlearned = ~real
    unlearned[:, 1:] |= ~real[:, :-1]
    positions = batch.get("position_ids")
    if positions is not None and "attention_mask" not in batch:
        unlearned[:, 1:] |= (positions.diff(dim=1) != 1).expand(len(real), -1)
    return unlearned


def _parts(kind: str, batch: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """The batch whole; documents of a type whose eager attention does not look for packed rows one by one, by their share."""
    positions = batch.get("position_ids")
    if kind not in _LOOKS_FOR_NONE or positions is None or "attention_mask" in batch:
        return [(batch, 1.0)]
    ids, labels = batch["input_ids"], batch["labels"]
    found: list[tuple[dict[str, Any], int]] = []
    for row, places in enumerate(positions.expand_as(ids)):
        cuts = [0, *(at for at in range(1, len(places)) if places[at] != places[at - 1] + 1), len(places)]
        for part in (slice(*pair) for pair in pairwise(cuts)):
            wanted = {"input_ids": ids[row : row + 1, part], "labels": labels[row : row + 1, part]}
            count = int((wanted["labels"][:, 1:] != -100).sum())
            found += [(wanted | {"position_ids": places[None, part]}, count)] if count else []
    total = sum(count for _, count in found)
    return [(part, count / total) for part, count in found]


def errors(seed: int, sp: int, memory: str | None) -> str | float:
    """On a rank: the largest error in loss and gradients against one process, or the sentence of a refusal."""
    kind, _, batch = draw(seed)
    mesh = ithaca.init_mesh(sp=sp)
    with compute_in_fp64():
        plain = small_model(kind, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, dropout=0.0, attention_dropout=0.0)
        model = ithaca.parallelize(copy.deepcopy(plain), mesh, memory=memory)
        try:
            loss = ithaca.causal_loss(model, batch, mesh)
            loss.backward()
        except IthacaError as refusal:
            return str(refusal)
        if (batch["labels"][:, 1:] == -100).all():
            # The mean over no token: zero here, nan in transformers.
            return abs(float(loss.detach()))
        truth = sum(plain(**part, use_cache=False).loss * share for part, share in _parts(kind, batch))
        truth.backward()
        worst = abs(float(loss.detach()) - float(truth.detach()))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            got: Any = mine.grad
            if theirs.grad is not None:
                whole = got.full_tensor() if hasattr(got, "full_tensor") else got
                worst = max(worst, relative_error(whole, theirs.grad))
    return worst


def check(seed: int) -> str:
    """Check one case on its ranks and return its outcome."""
    described, (*_, sp, memory) = draw(seed)[1], CASES[seed % len(CASES)]
    results = run_ranks(sp, errors, seed, sp, memory)
    if any(isinstance(result, str) for result in results):
        assert all(isinstance(result, str) for result in results), f"{described}: one rank refuses alone: {results}"
        return f"{described}: refused: {results[0]}"
    worst = max(float(result) for result in results)
    assert worst < FP64, f"{described}, sp={sp}, memory={memory}: off by {worst:.1e}"
    return f"{described}: {worst:.0e}"
