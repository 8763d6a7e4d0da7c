"""RoPE kinds that look at the length must see the whole sequence's, not the shard's.

`dynamic` and `longrope` pick their frequencies by the largest position of the call. On a shard that is the local
maximum, which gives other frequencies on other ranks. The pin adds one token at the global maximum to the
positions and cuts its values off again, so transformers' own code decides, and decides alike everywhere.

Positions are `[B, L]`, or `[3, B, L]` and `[4, B, L]` where the architecture has a row of positions for each axis of an
image; the cosines and sines that come out have the tokens in their last dimension but one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
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
            return args, kwargs | {"position_ids": self._with_last(module, kwargs["position_ids"], layout)}
        if len(args) < 2:
            raise UnsupportedError(
                f"{type(module).__name__} is called without position_ids, and its RoPE depends on the longest: use "
                "rope_type 'default', 'linear', 'yarn' or 'llama3'"
            )
        return (args[0], self._with_last(module, args[1], layout), *args[2:]), kwargs

    def cut(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        layout = self.layout()
        if layout is None:
            return output
        if isinstance(output, Tensor):
            return self._without_last(module, output, layout)
        return tuple(self._without_last(module, values, layout) for values in output)

    def _with_last(self, module: nn.Module, position_ids: Tensor, layout: SequenceLayout) -> Tensor:
        if position_ids.ndim not in (2, 3) or position_ids.shape[-1] != layout.shard_length:
            raise _unknown(module, "takes positions", position_ids)
        return torch.cat([position_ids, torch.full_like(position_ids[..., :1], layout.max_position)], dim=-1)

    def _without_last(self, module: nn.Module, values: Tensor, layout: SequenceLayout) -> Tensor:
        if values.ndim not in (3, 4) or values.shape[-2] != layout.shard_length + 1:
            raise _unknown(module, "gives values", values)
        return values[..., :-1, :]


def _unknown(module: nn.Module, what: str, given: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"{type(module).__name__} {what} of shape {list(given.shape)}, and its RoPE depends on the longest position: "
        "positions [B, L] or [3, B, L] and values [..., L, D] can be pinned to the whole sequence's; use rope_type "
        "'default', 'linear', 'yarn' or 'llama3'"
    )
