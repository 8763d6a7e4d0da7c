"""Parts of a parallelized model that are called by themselves: the decoder, the embeddings, the head.

FSDP2 gathers their weights in a forward of the whole model alone, and only there the decoder's attention knows where a
shard lies in its sequence. `model.model(ids)` would end in torch's words about DTensors; it ends in one sentence that
says what to call instead. Where weights are whole and sequences too, parts may be called as ever.
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


def watch_parts(model: PreTrainedModel, binding: Binding) -> list[Any]:
    """Hook the parts; gives the hooks' handles."""
    embeddings, head, decoder = model.get_input_embeddings(), model.get_output_embeddings(), model.base_model
    watched: list[tuple[Any, Any, Binding | None]] = [(embeddings, embeddings, None), (head, head, None)]
    if decoder is not model:
        watched.append((decoder, embeddings, binding))
    return [
        part.register_forward_pre_hook(RefuseAlone(held, attends))
        for part, held, attends in watched
        if part is not None
    ]


@dataclass(eq=False, slots=True)
class RefuseAlone:
    """A hook on one part. `held`: the module whose weights tell whether the part's are gathered. `attends`: the binding,
    for a part with attention in it."""

    held: nn.Module
    attends: Binding | None

    def __call__(self, part: nn.Module, args: Any) -> None:
        if isinstance(next(self.held.parameters(), None), DTensor):
            raise UnsupportedError(
                f"{type(part).__name__} was called by itself, and its weights are spread over ranks: {_INSTEAD}; for "
                "values without gradients, call model.unshard() before, model.reshard() after it"
            )
        if self.attends is not None and self.attends.sharded and self.attends.call is None:
            raise UnsupportedError(
                f"{type(part).__name__} was called by itself, and attends to shards in a pass of the whole model alone: "
                f"{_INSTEAD}"
            )
