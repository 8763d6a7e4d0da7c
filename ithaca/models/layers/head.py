"""The head and the loss in one, inside the model's own forward.

A call with `loss_targets` (and `loss_smoothing`, `loss_z`, `loss_each`) runs the decoder, then head and cross-entropy
tile by tile, and gives `(sum, count)`; any other call is the model's own. It has to happen inside the model's forward,
where FSDP2 has gathered the head's weight, and give a plain tuple: FSDP2 of torch 2.11 hooks tensors in tuples, lists
and dicts only, and without a hook the root's weights would not be gathered for backward. The scale and the softcap that
an architecture puts on its logits are read from its own forward (`logits.py`); one that does anything else keeps its
whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ithaca.handle import Handle
from ithaca.memory.head_loss import LossSpec, head_loss
from ithaca.models.discover.logits_path import numbers_read, read_logits
from ithaca.models.layers.hooks import hooked

TARGETS, SMOOTHING, Z, EACH = "loss_targets", "loss_smoothing", "loss_z", "loss_each"


@dataclass(eq=False)
class HeadForward:
    """In place of the model's forward. `head`, `spec`: as `head_spec` found them; `numbers`: what they follow from."""

    model: PreTrainedModel
    head: Any
    forward: Callable[..., Any]
    tile: int
    spec: LossSpec
    fuse: bool
    handle: Handle
    numbers: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self.numbers = numbers_read(self.model)

    @property
    def reads_weight(self) -> bool:
        """Whether the head is still its weight and no more: hooks, adapters, another softcap may come at any time."""
        same = self.model.get_output_embeddings() is self.head and numbers_read(self.model) == self.numbers
        return same and _is_bare(self.head)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        targets_BL = kwargs.pop(TARGETS, None)
        if targets_BL is None:
            return self.forward(*args, **kwargs)
        spec = replace(self.spec, smoothing=kwargs.pop(SMOOTHING, 0.0), z=kwargs.pop(Z, 0.0))
        each = kwargs.pop(EACH, None)
        hidden_BLC = self.model.base_model(*args, **kwargs).last_hidden_state
        bias = getattr(self.head, "bias", None)
        with self.handle.accounting():
            return head_loss(hidden_BLC, self.head.weight, bias, targets_BL, self.tile, spec, fuse=self.fuse, each=each)


def bare_head(model: PreTrainedModel) -> Any | None:
    """The output head, where it is a weight and no more: no hooks, no forward of its own, no adapter."""
    head: Any = model.get_output_embeddings()
    # A head with an adapter is more than its weight, though not yet while the adapter is new and adds nothing.
    if head is None or getattr(head, "weight", None) is None or hasattr(head, "base_layer") or not _is_bare(head):
        return None
    return head


def head_spec(model: PreTrainedModel) -> LossSpec | None:
    """What the model's forward does to the product of hidden states and head; None where logits are computed whole."""
    head = bare_head(model)
    return None if head is None else read_logits(model, head)


def _is_bare(head: nn.Module) -> bool:
    return "forward" not in head.__dict__ and not hooked(head)
