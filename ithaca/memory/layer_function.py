"""Interface between activation checkpointing and the model: how a replay runs one layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Result of one run of a layer: its output, its side outputs (router logits), and its anchors."""

    output: Any
    side_outputs: list[Tensor]
    anchors: list[Tensor]


class LayerFunction(Protocol):
    """Runs one layer; implemented in models/layers, by a class that has the model."""

    def run(self, args: Any, kwargs: Any, anchors: list[Tensor] | None, *, value: bool) -> LayerResult:
        """Run the layer, its attention from `anchors` if there are any. `value=False`: no caller reads the output."""

    def emit_side_outputs(self, tensors: list[Tensor]) -> None:
        """Pass the side outputs on to the model."""

    def accounting(self) -> AbstractContextManager[None]:
        """Return a context that explains an out-of-memory error by the memory plan."""
