"""Whole logits of a model that takes whole batches: at padding as in transformers, beside a loss when they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from ithaca.integrations.model_hooks import WholeBatches
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import collate_left_masked, config, examples, reset
from tests.ranks import run_ranks
from tests.tolerances import FAULT, FP64

SLOW = pytest.mark.slow
KINDS = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("mistral", "eager"),
    ("mistral", "sdpa"),
    ("gemma2", "eager"),
    ("gpt_oss", "eager"),
]


def _batch(side: str) -> dict[str, torch.Tensor]:
    batch = collate_left_masked(examples(3))
    return batch if side == "left" else {name: value.flip(1) for name, value in batch.items()}


def steps(sp: int | None, kind: str, attention: str, side: str, count: int = 2, **overrides: Any) -> list[Any]:
    """Losses over all logits beside the loss of the labels: read from the first call on, so both ways are taken."""
    reset()
    with compute_in_fp64():
        model: Any = small_model(kind, **overrides)
        model.set_attn_implementation(attention)
        if sp is not None:
            model = Accelerator(cpu=True, parallelism_config=config(sp)).prepare(model)
        made = []
        for _ in range(count):
            model.zero_grad()
            torch.manual_seed(1)
            output = model(**_batch(side))
            loss = output.loss + torch.logsumexp(output.logits, -1).square().mean()
            loss.backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            made.append((output.logits.detach().clone(), loss.detach(), norm.detach()))
    return made


def _farthest(got: list[Any], expected: list[Any]) -> float:
    pairs = [(a, b) for mine, truth in zip(got, expected, strict=True) for a, b in zip(mine, truth, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("kind", "attention"), [KINDS[0], *(pytest.param(*k, marks=SLOW) for k in KINDS[1:])])
def test_logits_at_padding_equal_transformers(kind: str, attention: str, side: str) -> None:
    expected = steps(None, kind, attention, side)
    for got in run_ranks(2, steps, 2, kind, attention, side):
        assert _farthest(got, expected) < FP64


def _without_padding(*args: Any) -> list[Any]:
    """Planted: padding attends to nothing."""
    original = WholeBatches._padding
    WholeBatches._padding = lambda self: "zero"  # type: ignore[method-assign]
    try:
        return steps(*args)
    finally:
        WholeBatches._padding = original  # type: ignore[method-assign]


def test_unattended_padding_changes_logits() -> None:
    expected = steps(None, "llama", "sdpa", "right")
    assert _farthest(run_ranks(2, _without_padding, 2, "llama", "sdpa", "right")[0], expected) > FAULT


def _calls(sp: int) -> list[int]:
    """Count the decoder's runs for a loss alone, for logits that are read, and for the two calls after that."""
    reset()
    model: Any = Accelerator(cpu=True, parallelism_config=config(sp)).prepare(small_model("llama"))
    ran: list[int] = []
    model.model.register_forward_hook(lambda *_: ran.append(1))
    seen = []
    for reads in (False, True, True, False, False):
        before = len(ran)
        output = model(**_batch("right"))
        if reads:
            output.logits.sum()
        seen.append(len(ran) - before)
    return seen


def test_unread_logits_run_no_decoder() -> None:
    """Read for the first time they take a pass of their own, then none."""
    assert run_ranks(2, _calls, 2) == [[1, 2, 1, 1, 1]] * 2


def _dropped(sp: int) -> tuple[float, bool]:
    """The pass made again has the dropout of the first; the random numbers drawn after it are as if it never ran."""
    reset()
    model: Any = small_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.4, embd_pdrop=0.4)
    model = Accelerator(cpu=True, parallelism_config=config(sp)).prepare(model)
    torch.manual_seed(1)
    output = model(**_batch("right"))
    after = torch.get_rng_state()
    logits = output.logits[:, :-1].flatten(0, 1)
    undisturbed = torch.equal(after, torch.get_rng_state())
    again = torch.nn.functional.cross_entropy(logits, _batch("right")["labels"][:, 1:].flatten(), ignore_index=-100)
    return float((again - output.loss).abs().detach()), undisturbed


def test_late_logits_have_dropout_of_their_loss() -> None:
    for difference, undisturbed in run_ranks(2, _dropped, 2):
        assert difference < FAULT
        assert undisturbed
