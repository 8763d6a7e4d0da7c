"""What the scripts of the plain loop share: one loss and one gradient norm, with Ithaca and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ithaca


def loss_of(model: nn.Module, batch: dict[str, Any], mesh: ithaca.Mesh | None) -> Tensor:
    """The token mean of a batch: transformers' own loss, or Ithaca's."""
    if mesh is None:
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss
    return ithaca.causal_loss(model, batch, mesh)


def norm_of(model: nn.Module) -> float:
    """The norm of all gradients, whole ones or sharded ones."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
