"""Validation: the token mean of the loss over held-out rows, sharded over the ranks as in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ithaca.constants import IGNORE_INDEX
from ithaca.data.rows.feed import Feed
from ithaca.loss.by_position import LossByPosition
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.training.session import Session


def validate(session: Session, feed: Feed, rows: int) -> dict[str, Any]:
    """Return the loss over at most `rows` rows of `feed`, None if no token of them is learned, and its parts."""
    mesh = session.mesh
    rows = min(rows, feed.rows_per_epoch or rows)
    # Every data-parallel rank takes as many rows as any other, because each forward pass has collectives of all ranks.
    padded = -(-rows // mesh.dp) * mesh.dp
    batches = [_row_or_filler(feed, at, rows) for at in range(mesh.dp_rank, padded, mesh.dp)]
    session.model.eval()
    targets = count_tokens(batches, mesh)
    by_position = LossByPosition(session.stage.length, mesh.device)
    loss = torch.zeros((), device=mesh.device)
    with torch.no_grad():
        for batch in batches:
            loss += causal_loss(session.model, batch, mesh, count=targets, by_position=by_position)
    session.model.train()
    mean = float(loss) if targets else None
    return {"loss": mean, "rows": rows, "targets": targets, "loss_by_position": by_position.means(mesh)}


def _row_or_filler(feed: Feed, at: int, rows: int) -> dict[str, Tensor]:
    """Return row `at`; past the end, the last row with labels of -100 alone."""
    row: dict[str, Tensor] = feed.row(min(at, rows - 1))
    return row if at < rows else {**row, "labels": torch.full_like(row["labels"], IGNORE_INDEX)}
