"""Refusal of a model with a loss of its own, which a loss over shards would silently replace.

transformers computes the loss inside the model's forward. Over ranks Ithaca computes transformers' causal cross-entropy
instead, of targets that are shifted before rows are sharded. A `model.loss_function`, a subclass with its own forward or a
replaced forward may compute another loss of whole rows. Such models are refused where a loss is asked for, and run where
only logits are.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ithaca.errors import UnsupportedError
from ithaca.models.refusals.foreign_code import is_foreign
from ithaca.models.support import verdicts


def refuse_own_loss(model: nn.Module, base: PreTrainedModel) -> None:
    """Refuse a model whose call with labels may not return transformers' own loss.

    `model`: `base`, or the PEFT model around it.
    """
    own = _own_function(base) or _own_forward(base) or (None if model is base else _own_forward(model))
    if own is not None:
        raise UnsupportedError(
            f"{own} may make a loss of its own, and over ranks the loss is made outside the model, as transformers' "
            "cross-entropy: make yours from outputs.logits in Trainer's compute_loss, or from the logits of a shard with "
            "ithaca.reduce_mean, and leave the model as transformers has it"
        )


def _own_function(base: PreTrainedModel) -> str | None:
    """Return the name of a loss function that is not transformers', set on the model or by its class; else None."""
    named = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "", ForCausalLMLoss)
    given = base.__dict__.get("_loss_function", named)
    kept: Any = getattr(type(base), "loss_function", None)
    foreign = given is not ForCausalLMLoss or is_foreign(getattr(kept, "fget", kept))
    return "model.loss_function" if foreign else None


def _own_forward(model: nn.Module) -> str | None:
    """Return the name of the forward that a call reaches if it is the user's own; else None."""
    forward: Any = model.__dict__.get("forward")
    while forward is not None and type(forward).__module__.startswith("ithaca."):
        forward = getattr(forward, "forward", None)
    owned = getattr(forward, "__func__", None) is type(model).forward
    if forward is not None and not owned:
        return "a forward that was put on the model" if is_foreign(forward) else None
    measured = not isinstance(model, PreTrainedModel) or str(model.config.model_type) in verdicts()
    return (
        f"{type(model).__name__.removeprefix('FSDP')}.forward" if measured and is_foreign(type(model).forward) else None
    )
