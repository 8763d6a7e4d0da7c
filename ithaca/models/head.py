"""The head and the loss in one, inside the model's own forward.

A call with `loss_targets` (and `loss_smoothing`, `loss_z`, `loss_each`) runs the decoder, then head and cross-entropy
tile by tile, and gives `(sum, count)`; any other call is the model's own. It has to happen inside the model's forward,
where FSDP2 has gathered the head's weight, and give a plain tuple: FSDP2 of torch 2.11 hooks tensors in tuples, lists
and dicts only, and without a hook the root's weights would not be gathered for backward. What an architecture does to
its logits (a scale, a softcap) is read off its config and then tried against its own logits on a few tokens; one that
does something else keeps its whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ithaca.memory.loss import LossSpec, head_loss
from ithaca.models.hooks import hooked
from ithaca.models.roles import few_tokens

TARGETS, SMOOTHING, Z, EACH = "loss_targets", "loss_smoothing", "loss_z", "loss_each"


@dataclass(eq=False)
class HeadForward:
    """In place of the model's forward. `head`: the module that was tried, see `head_is_plain`."""

    model: PreTrainedModel
    head: Any
    forward: Callable[..., Any]
    tile: int
    spec: LossSpec
    fuse: bool
    account: Callable[[torch.OutOfMemoryError], torch.OutOfMemoryError]

    @property
    def reads_weight(self) -> bool:
        """Whether the head is still its weight and no more: hooks, adapters, another softcap may come at any time."""
        same = self.model.get_output_embeddings() is self.head and logits_spec(self.model) == self.spec
        return same and _is_bare(self.head)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        targets_BL = kwargs.pop(TARGETS, None)
        if targets_BL is None:
            return self.forward(*args, **kwargs)
        spec = replace(self.spec, smoothing=kwargs.pop(SMOOTHING, 0.0), z=kwargs.pop(Z, 0.0))
        each = kwargs.pop(EACH, None)
        hidden_BLC = self.model.base_model(*args, **kwargs).last_hidden_state
        bias = getattr(self.head, "bias", None)
        try:
            return head_loss(hidden_BLC, self.head.weight, bias, targets_BL, self.tile, spec, fuse=self.fuse, each=each)
        except torch.OutOfMemoryError as error:
            raise self.account(error) from error


def logits_spec(model: PreTrainedModel) -> LossSpec:
    """What this architecture does to its logits, by its config."""
    config: Any = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return LossSpec(scale=scale / divisor, softcap=getattr(config, "final_logit_softcapping", None))


def head_is_plain(model: PreTrainedModel) -> bool:
    """Whether hidden states, head and `logits_spec` give the model's own logits, tried on a few tokens."""
    head: Any = model.get_output_embeddings()
    # A head with an adapter is more than its weight, though not yet while the adapter is new and adds nothing.
    if head is None or getattr(head, "weight", None) is None or hasattr(head, "base_layer") or not _is_bare(head):
        return False
    ids = few_tokens(model).to(head.weight.device)
    spec = logits_spec(model)
    seen: list[Any] = []
    handle = model.base_model.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits.float()
            hidden = seen[-1].last_hidden_state
            logits = F.linear(hidden, head.weight, getattr(head, "bias", None)).float() * spec.scale
    finally:
        handle.remove()
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    room = 0.02 * float(expected.abs().max()) + 1e-6
    return logits.shape == expected.shape and bool((logits - expected).abs().max() < room)


def _is_bare(head: nn.Module) -> bool:
    return "forward" not in head.__dict__ and not hooked(head)
