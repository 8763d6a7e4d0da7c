"""A loss that the model itself was taught to make, which a loss over shards would pass by in silence.

transformers makes the loss inside the model's forward. Over ranks Ithaca makes it, of targets that were shifted before
rows were cut: transformers' causal cross-entropy. A `model.loss_function`, a subclass with a forward or a forward that
somebody put on the model may make another loss, of whole rows, and are refused where a loss is asked for; where logits
alone are asked for they run as they are. Forwards of the libraries make the loss that is made here.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ithaca.errors import UnsupportedError
from ithaca.models.refusals.foreign_code import is_foreign
from ithaca.planning.model.architectures import verdicts


def refuse_own_loss(model: nn.Module, base: PreTrainedModel) -> None:
    """Raise where the loss of a call with labels would not be transformers' own; `model`: `base`, or a PEFT model around."""
    own = _own_function(base) or _own_forward(base) or (None if model is base else _own_forward(model))
    if own is not None:
        raise UnsupportedError(
            f"{own} may make a loss of its own, and over ranks the loss is made outside the model, as transformers' "
            "cross-entropy: make yours from outputs.logits in Trainer's compute_loss, or from the logits of a shard with "
            "ithaca.reduce_mean, and leave the model as transformers has it"
        )


def _own_function(base: PreTrainedModel) -> str | None:
    """A loss function that was set on this model, by itself or by name, or that its class has in place of transformers'."""
    named = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "", ForCausalLMLoss)
    given = base.__dict__.get("_loss_function", named)
    kept: Any = getattr(type(base), "loss_function", None)
    foreign = given is not ForCausalLMLoss or is_foreign(getattr(kept, "fget", kept))
    return "model.loss_function" if foreign else None


def _own_forward(model: nn.Module) -> str | None:
    """The forward that a call would reach, if it is neither a library's nor an architecture's that was never measured."""
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
