"""Refusals for parts of a parallelized model that are called by themselves: the decoder, the embeddings, the head.

    model(ids)            runs
    model.model(ids)      UnsupportedError: call the whole model ...

FSDP2 gathers the parts' weights in a forward of the whole model only, and only there the attention has the layout of the
shards. Without these hooks `model.model(ids)` would fail inside torch, in an error about DTensors. If weights and
sequences are whole, the parts may be called as usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.models.bound import Binding

_INSTEAD = (
    "call the whole model, which inside `with ithaca.unsharded(model):` gives the logits and, with "
    "output_hidden_states=True, the hidden states of whole sequences"
)


def refuse_parts_alone(model: PreTrainedModel, binding: Binding) -> list[Any]:
    """Register the refusing hooks on the parts; return the hooks' handles."""
    embeddings, head, decoder = model.get_input_embeddings(), model.get_output_embeddings(), model.base_model
    hooked_parts: list[tuple[Any, Any, Binding | None]] = [(embeddings, embeddings, None), (head, head, None)]
    if decoder is not model:
        hooked_parts.append((decoder, embeddings, binding))
    return [
        part.register_forward_pre_hook(_RefuseAlone(gathered_with, attention_of))
        for part, gathered_with, attention_of in hooked_parts
        if part is not None
    ]


@dataclass(eq=False, slots=True)
class _RefuseAlone:
    """The forward pre-hook of one part.

    `gathered_with`: the module whose weights are gathered together with the part's. `attention_of`: the binding, for a
    part with attention, or None.
    """

    gathered_with: nn.Module
    attention_of: Binding | None

    def __call__(self, part: nn.Module, args: Any) -> None:
        if isinstance(next(self.gathered_with.parameters(), None), DTensor):
            raise UnsupportedError(
                f"{type(part).__name__} was called by itself, and its weights are spread over ranks: {_INSTEAD}; for "
                "values without gradients, call model.unshard() before, model.reshard() after it"
            )
        if self.attention_of is not None and self.attention_of.sharded and self.attention_of.call is None:
            raise UnsupportedError(
                f"{type(part).__name__} was called by itself, and attends to shards in a pass of the whole model alone: "
                f"{_INSTEAD}"
            )
