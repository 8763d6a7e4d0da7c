"""RoPE kinds that look at the length must see the whole sequence's, not the shard's.

`dynamic` and `longrope` pick their frequencies by the largest position of the call. On a shard that is the local
maximum, which gives other frequencies on other ranks. The pin adds one token at the global maximum to the
positions and cuts its values off again, so transformers' own code decides, and decides alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.sequence.layout import SequenceLayout

_BY_LENGTH = ("dynamic", "longrope")


def pin_length(model: PreTrainedModel, layout: Callable[[], SequenceLayout | None]) -> list[Any]:
    """Hook the rotary modules that look at the length; gives the hooks' handles."""
    handles: list[Any] = []
    for module in model.modules():
        if depends_on_length(module):
            pin = _Pin(layout)
            handles += [
                module.register_forward_pre_hook(pin.append, with_kwargs=True),
                module.register_forward_hook(pin.cut),
            ]
    return handles


def depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    values = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and any(name in kind for name in _BY_LENGTH) for kind in values)


class _Pin:
    def __init__(self, layout: Callable[[], SequenceLayout | None]) -> None:
        self.layout = layout

    def append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layout = self.layout()
        if layout is None:
            return args, kwargs
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": _with_last(kwargs["position_ids"], layout.max_position)}
        return (args[0], _with_last(args[1], layout.max_position), *args[2:]), kwargs

    def cut(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.layout() is None:
            return output
        if isinstance(output, Tensor):
            return output[:, :-1]
        return tuple(values[:, :-1] for values in output)


def _with_last(position_ids: Tensor, last: int) -> Tensor:
    return torch.cat([position_ids, torch.full_like(position_ids[:, :1], last)], dim=1)
