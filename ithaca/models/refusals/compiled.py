"""torch.compile on a model or a part of it, which is refused before parallelize and after it.

Hooks, collectives and layers that are run again are no part of what a graph keeps, and no parity run covers it.
"""

from __future__ import annotations

from torch import nn

from ithaca.errors import UnsupportedError


def refuse_compiled(model: nn.Module) -> None:
    """torch.compile on a bound model."""
    if compiled_within(model) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} was compiled after parallelize, which no parity run covers: pass the model itself; "
            "parallelize compiles norms, activations and rotary embeddings already (fuse=True)"
        )


def compiled_within(model: nn.Module) -> str | None:
    """The name of the first module that torch.compile was put on, "" for the model itself; None where it is on none."""
    compiled = (
        key for key, m in model.named_modules() if "_orig_mod" in m._modules or m._compiled_call_impl is not None
    )
    return next(compiled, None)
