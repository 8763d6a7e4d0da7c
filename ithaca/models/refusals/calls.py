"""Refusals of a forward pass over shards: arguments, autocast, gradient checkpointing, and calls of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError

# Keyword arguments that transformers passes to every attention function and that change no result: `position_ids` are in
# the layout; the router and cache flags are for other modules.
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "num_items_in_batch", "logits_to_keep", "past_key_values", "position_embeddings",
    "labels", "deterministic", "layer_idx", "input_ids",
}  # fmt: skip


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of a model's call that make no sense for a shard."""
    refusals = {
        "attention_mask": "the layout already carries padding and documents: pass the whole batch to shard_batch",
        "labels": "a shard's labels must be shifted before cutting: use ithaca.causal_loss(model, batch, mesh)",
        "past_key_values": "a key-value cache has no place in a sharded pass: use model.generate",
        "output_attentions": "attention weights are never materialised here",
    }
    for key, reason in refusals.items():
        if kwargs.get(key) is not None and kwargs[key] is not False:
            raise UnsupportedError(f"{key} was passed to a sharded forward: {reason}")
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError(
            "logits_to_keep was passed to a sharded forward: it counts tokens of a whole row, and a rank has a part of one; "
            "leave it out, or run the model whole inside `with ithaca.unsharded(model):`"
        )


def refuse_autocast(model: PreTrainedModel, device: str) -> None:
    """Refuse torch.autocast to another dtype than the model computes in."""
    # FSDP2 has gathered weights by now, so this is the dtype that they compute in.
    own = model.dtype
    if is_autocast_enabled(device) and get_autocast_dtype(device) != own:
        raise UnsupportedError(
            f"torch.autocast to {get_autocast_dtype(device)} is on around a model that computes in {own}, and would not "
            "reach what backward runs again: leave it out, and pass parallelize(..., compute_dtype=torch.bfloat16)"
        )


def checkpoints(model: nn.Module) -> bool:
    """True if transformers recomputes layers (its gradient checkpointing)."""
    return model.training and is_checkpointing(model)


def is_checkpointing(model: nn.Module) -> bool:
    """True if transformers' gradient checkpointing is switched on, in training or not."""
    # The modules' flags, because transformers 5.23 renamed its property.
    return any(module.__dict__.get("gradient_checkpointing", False) for module in model.modules())


def checkpointing_off(model: nn.Module) -> str:
    """Return the name of the method that switches gradient checkpointing off."""
    new = "activation_checkpointing_disable"
    return new if hasattr(model, new) else "gradient_checkpointing_disable"


def refuse_checkpointing(model: nn.Module) -> None:
    """Refuse transformers' gradient checkpointing beside a memory plan: both would recompute layers."""
    if checkpoints(model):
        raise UnsupportedError(
            "transformers' gradient checkpointing is on beside Ithaca's memory modes, which replace it: call "
            f"model.{checkpointing_off(model)}(), or parallelize(..., memory=None)"
        )


def check_call(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BKLD: Tensor,
    mask: Tensor | None,
    dropout: float,
    extra: dict[str, Any],
) -> None:
    """Refuse a call of attention with a mask, dropout, a cache, or unknown arguments."""
    name = type(module).__name__
    if mask is not None:
        raise UnsupportedError(
            f"{name} built an attention mask {list(mask.shape)}; only padding and documents are exact"
        )
    if dropout:
        raise UnsupportedError(f"{name} asks for attention dropout {dropout}: set the config's attention dropout to 0")
    if query_BHLD.shape[2] != key_BKLD.shape[2]:
        raise UnsupportedError(f"{name} attends {query_BHLD.shape[2]} queries to {key_BKLD.shape[2]} keys: a cache or "
                               "cross-attention is not sharded")  # fmt: skip
    unknown = sorted(key for key, value in extra.items() if key not in _HARMLESS and value is not None)
    if unknown:
        raise UnsupportedError(f"{name} passes {unknown[0]!r} to its attention, which Ulysses does not know: refused")
