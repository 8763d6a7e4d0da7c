"""RoPE that depends on the length, in architectures whose positions have a row for each axis of an image."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.rope import pin_length
from ithaca.parallelize import parallelize
from ithaca.sequence.layout import SequenceLayout
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import build, small_batch
from ithaca.verify.small_models.types import survey_config
from tests.batches import packed
from tests.ranks import run_ranks
from tests.tolerances import FP64

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip


def _off(rope: dict[str, Any], sp: int) -> float:
    mesh = init_mesh(sp=sp)
    settings = {"sliding_attention": rope, "full_attention": None}
    model = build(survey_config("cohere_compass_text", rope_parameters=settings, max_position_embeddings=8))
    worst = 0.0
    for batch in (small_batch(2, 13), small_batch(1, 6), packed(1, 14)):
        with compute_in_fp64():
            expected = reference(copy.deepcopy(model), [[batch]])
            parallel = parallelize(copy.deepcopy(model), mesh)
            loss = causal_loss(parallel, batch, mesh)
            loss.backward()
        errors = gradient_errors(parallel, expected.gradients).values()
        worst = max(worst, abs(float(loss) - expected.loss), *errors)
    return worst


@pytest.mark.few(2)
@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("sp", [1, 2])
def test_rope_positions_of_three_axes_are_exact(rope: dict[str, Any], sp: int) -> None:
    assert max(run_ranks(sp, _off, rope, sp)) < FP64


class Rotary(nn.Module):
    """Frequencies by the largest position; gives `[..., L, D]`, or tokens elsewhere."""

    rope_type = "dynamic"

    def __init__(self, *, tokens_first: bool = False) -> None:
        super().__init__()
        self.tokens_first = tokens_first

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        angles = position_ids[..., None] * torch.ones(6) / (position_ids.max() + 1)
        angles = angles.movedim(-2, 0) if self.tokens_first else angles
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("rows", [(2,), (3, 2), (4, 2)], ids=str)
def test_rope_shard_has_frequencies_of_whole_sequence(rows: tuple[int, ...]) -> None:
    layout = SequenceLayout.whole_rows(2, 12, 3)
    model: Any = nn.Sequential(Rotary())
    positions = torch.arange(12).expand(*rows, -1)
    whole = model[0](torch.zeros(1), positions)
    pin_length(model, lambda: layout)
    shard = model[0](torch.zeros(1), position_ids=positions[..., :4])
    assert all(torch.equal(ours, theirs[..., :4, :]) for ours, theirs in zip(shard, whole, strict=True))


@pytest.mark.parametrize("wrong", ["positions", "values", "none"])
def test_rope_unknown_shapes_are_refused(wrong: str) -> None:
    layout = SequenceLayout.whole_rows(2, 12, 3)
    model: Any = nn.Sequential(Rotary(tokens_first=wrong == "values"))
    pin_length(model, lambda: layout)
    given = (
        () if wrong == "none" else (torch.zeros(5 if wrong == "positions" else 4, dtype=torch.long).expand(3, 2, -1),)
    )
    with pytest.raises(UnsupportedError, match=r"Rotary .*use rope_type 'default'"):
        model[0](torch.zeros(1), *given)
