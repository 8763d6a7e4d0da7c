"""Head and loss in one, inside the model's own forward: the logits of a whole shard never exist at once.

    model(input_ids)                          -> the model's own output
    model(input_ids, loss_targets=targets)    -> (sum of losses, count of targets), tile by tile

A call with `loss_targets` (and `loss_smoothing`, `loss_z`, `loss_each`) runs the decoder, then head and cross-entropy
tile by tile (`memory/head_loss.py`). The loss is computed inside the model's forward because FSDP2 gathers the head's
weight there. The result is a plain tuple because FSDP2 of torch 2.11 registers its backward hooks on tensors in tuples,
lists and dicts only; without such a hook the root's weights would not be gathered for backward.

The scale and softcap of an architecture's logits are read from its own forward (`discover/logits_path.py`). A model that
does anything else to its logits keeps its own forward.
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
    """The forward of a model whose head and loss are tiled.

    `head`: the output head. `spec`: scale and softcap of its logits. `numbers`: the config values behind `spec`.
    """

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
        """True if the head is still a plain weight with the same scale and softcap."""
        # Hooks, adapters and another softcap may be set between any two passes.
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
    """Return the output head; None unless it is a plain weight, without hooks, a forward of its own or an adapter."""
    head: Any = model.get_output_embeddings()
    # A new adapter adds zero, so only the attribute of PEFT's wrapper shows it.
    if head is None or getattr(head, "weight", None) is None or hasattr(head, "base_layer") or not _is_bare(head):
        return None
    return head


def head_spec(model: PreTrainedModel) -> LossSpec | None:
    """Return the scale and softcap of the model's logits; None if the model computes its logits whole."""
    head = bare_head(model)
    return None if head is None else read_logits(model, head)


def _is_bare(head: nn.Module) -> bool:
    return "forward" not in head.__dict__ and not hooked(head)
