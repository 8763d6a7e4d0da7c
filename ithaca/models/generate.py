"""`model.generate` of a parallelized model: tokens come one by one, so there is no sequence to split.

Every rank runs the whole prompt with the model's own attention and its own cache, and gives what the plain model gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ithaca.mesh import Mesh
from ithaca.models.layers.method_replacement import looks_like

# How many arguments of transformers' generate stand before `synced_gpus` (seen in 5.23).
_BEFORE_SYNCED = 5


class Bound(Protocol):
    """The model's binding, as far as it is asked here."""

    mesh: Mesh

    @property
    def model(self) -> nn.Module: ...

    @property
    def reduction(self) -> object | None: ...


@dataclass(eq=False)
class WholeGenerate:
    """In place of the model's own. `whole`: inside, the model runs whole sequences."""

    binding: Bound
    generate: Callable[..., Any]
    whole: Callable[[], AbstractContextManager[None]]

    @classmethod
    def of(cls, binding: Bound, whole: Callable[[], AbstractContextManager[None]]) -> WholeGenerate:
        generate: Any = binding.model.generate
        made = cls(binding, generate, whole)
        looks_like(made, generate)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shards = self.binding.reduction is not None and self.binding.mesh.world > 1
        if shards and len(args) <= _BEFORE_SYNCED and kwargs.get("synced_gpus") is None:
            # FSDP2 gathers layers on all ranks together: a rank whose prompts are done goes on until the others' are.
            kwargs["synced_gpus"] = True
        with self.whole():
            return self.generate(*args, **kwargs)
