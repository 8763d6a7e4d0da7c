"""Router's auxiliary loss of mixture-of-experts models, exact over the whole batch.

    loss = E * sum over experts of share[e] * mean_probability[e]       over the tokens of all layers

transformers' load-balancing loss is not a sum over shards, because of the product. The shares of assignments carry no
gradient, so one all-reduce of counts gives every rank the shares of the whole batch. Each rank's term is then linear in
its own probabilities, and the terms of all ranks add up to the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh
from ithaca.planning.model.architectures import EXPERT_COUNTS


def adds_auxiliary_loss(model: PreTrainedModel, flag: bool | None) -> bool:
    """True if the architecture has a load-balancing loss, and the call's `flag` (or else the config) switches it on."""
    config = model.config.get_text_config()
    asked = flag if flag is not None else bool(getattr(config, "output_router_logits", False))
    if not asked or not _has_loss(model):
        return False
    if _coefficient(model) is None:
        raise UnsupportedError(
            f"{type(model).__name__} has a router loss but no coefficient this knows: set output_router_logits=False"
        )
    return True


def has_experts(config: PreTrainedConfig) -> bool:
    """True if the model has experts, so that some weights may be unused on a rank."""
    config = config.get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in EXPERT_COUNTS)


def auxiliary_loss(model: PreTrainedModel, router_logits: Sequence[Tensor], real_BL: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's term of coefficient * loss; the terms of all ranks add up to the loss of the whole batch."""
    coefficient = _coefficient(model)
    assert coefficient is not None
    return coefficient * load_balancing_loss(model, router_logits, real_BL, mesh)


def load_balancing_loss(model: PreTrainedModel, router_logits: Sequence[Tensor], real_BL: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's term of the loss without its coefficient."""
    top_k = int(getattr(model, "num_experts_per_tok", None) or model.config.get_text_config().num_experts_per_tok)
    logits = [x for x in router_logits if x is not None]
    if not logits:
        raise UnsupportedError(f"{type(model).__name__} gave no router logits: its auxiliary loss cannot be computed")
    experts = logits[0].shape[-1]
    mask = real_BL.reshape(-1, 1)
    # Assignments of each expert, and the number of tokens: counts of a million tokens and more need fp64.
    chosen = torch.zeros(experts + 1, dtype=torch.float64, device=mask.device)
    probability = torch.zeros(experts, dtype=torch.promote_types(logits[0].dtype, torch.float32), device=mask.device)
    for layer in logits:
        weights = layer.reshape(-1, experts).softmax(-1)
        assigned = torch.zeros_like(weights).scatter(1, weights.topk(top_k, dim=-1).indices, 1.0)
        chosen[:experts] += (assigned.detach() * mask).sum(0)
        chosen[experts] += mask.sum()
        probability = probability + (weights.to(probability.dtype) * mask).sum(0)
    dist.all_reduce(chosen, group=mesh.world_group)
    rows = chosen[experts].clamp(min=1)
    share = (chosen[:experts] / rows).to(probability.dtype)
    return experts * (share * probability).sum() / rows.to(probability.dtype)


def _has_loss(model: nn.Module) -> bool:
    """True if transformers' modeling file of this architecture has a load-balancing loss."""
    return any(hasattr(sys.modules.get(base.__module__), "load_balancing_loss_func") for base in type(model).__mro__)


def _coefficient(model: nn.Module) -> float | None:
    """Return the weight of the auxiliary loss; None if the model has none."""
    values = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return next((float(value) for value in values if isinstance(value, int | float)), None)
