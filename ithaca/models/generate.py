"""`model.generate` of a parallelized model: tokens come one by one, so there is no sequence to split.

Every rank runs the whole prompt with the model's own attention and cache, and returns what the plain model returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ithaca.models.binding_state import Binding, unsharded

# Positional arguments before `synced_gpus` in transformers' generate (checked on 5.23).
_BEFORE_SYNCED = 5


@dataclass(eq=False)
class WholeGenerate:
    """Replacement of the model's own `generate`."""

    binding: Binding
    generate: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        placement = self.binding.placement
        shards = placement is not None and bool(placement.groups) and self.binding.mesh.world > 1
        if shards and len(args) <= _BEFORE_SYNCED and kwargs.get("synced_gpus") is None:
            # FSDP2 gathers layers on all ranks together: a rank whose prompts are done goes on until all others are.
            kwargs["synced_gpus"] = True
        with unsharded(self.binding.model):
            return self.generate(*args, **kwargs)
