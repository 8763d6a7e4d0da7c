"""Loss by position: the means of buckets over all ranks are those of one process's token losses; nothing else changes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from ithaca.loss import by_position
from ithaca.loss.by_position import LossByPosition
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_model
from tests.ranks import run_ranks
from tests.tolerances import EVAL_LOSS, FAULT

IDS = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(2))
# Two documents of 26 and 14 tokens, of the first only part is learned.
PLACES = torch.cat([torch.arange(26), torch.arange(14)])[None]
LABELS = IDS.masked_fill(torch.arange(40)[None] < 9, -100)


def gathered(sp: int, shift: int = 0) -> tuple[dict[str, float], float, float]:
    """Means by bucket of 8, 16, 32; the loss with them and without; `shift` is planted into the positions."""
    mesh = init_mesh(sp=sp)
    model = parallelize(small_model("llama"), mesh)
    batch = {"input_ids": IDS, "labels": LABELS, "position_ids": PLACES}
    with compute_in_fp64(), torch.no_grad(), patch.object(by_position, "FIRST", 8):
        buckets = LossByPosition(32, mesh.device)
        buckets._edges += shift
        loss = causal_loss(model, batch, mesh, by_position=buckets)
        return buckets.means(mesh), float(loss), float(causal_loss(model, batch, mesh))


def expected() -> dict[str, float]:
    """From the logits of each document alone."""
    found: dict[str, list[float]] = {}
    with compute_in_fp64(), torch.no_grad():
        for start, end in ((0, 26), (26, 40)):
            logits = small_model("llama")(input_ids=IDS[:, start:end]).logits[0, :-1]
            targets = LABELS[0, start + 1 : end]
            losses = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
            for place, (target, loss) in enumerate(zip(targets.tolist(), losses.tolist(), strict=True)):
                name = next((f"<{edge}" for edge in (8, 16, 32) if place < edge), ">=32")
                if target != -100:
                    found.setdefault(name, []).append(loss)
    return {name: sum(losses) / len(losses) for name, losses in found.items()}


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_buckets_equal_one_process(sp: int) -> None:
    wanted: Any = expected()
    assert sorted(wanted) == ["<16", "<32", "<8"]
    for means, loss, without in run_ranks(sp, gathered, sp):
        # Each token's own loss is shown in fp32.
        assert means == pytest.approx(wanted, abs=EVAL_LOSS)
        assert loss == without


def test_position_off_by_one_changes_buckets() -> None:
    wanted = expected()
    means = run_ranks(2, gathered, 2, 1)[0][0]
    assert abs(means["<8"] - wanted["<8"]) > 100 * FAULT
