"""Refusal of torch.compile on a model or a part of it, before and after parallelize.

A compiled graph does not contain hooks, collectives and recomputed layers, and no parity test covers it.
"""

from __future__ import annotations

from torch import nn

from ithaca.errors import UnsupportedError


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a bound model that was compiled."""
    if compiled_within(model) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} was compiled after parallelize, which no parity run covers: pass the model itself; "
            "parallelize compiles norms, activations and rotary embeddings already (fuse=True)"
        )


def compiled_within(model: nn.Module) -> str | None:
    """Return the name of the first compiled module, "" for the model itself; None if there is none."""
    compiled = (
        key for key, m in model.named_modules() if "_orig_mod" in m._modules or m._compiled_call_impl is not None
    )
    return next(compiled, None)
