"""RoPE whose frequencies depend on the length: every shard gets those of the whole sequence.

`dynamic` and `longrope` choose their frequencies by the largest position of the call. On a shard that is the shard's own
maximum, so ranks would rotate differently. One more token at the largest position of the whole batch decides instead:

    rank 0 of 2, 8 tokens     position_ids  0 1 2 3                  -> frequencies for 4 tokens: wrong
                              position_ids  0 1 2 3 | 7              -> frequencies for 8 tokens, by transformers' own code
                              cos, sin      c0 c1 c2 c3 | c7  ->  c0 c1 c2 c3

Positions are `[B, L]`, or `[3, B, L]` and `[4, B, L]` in architectures with a row of positions for each axis of an image;
the tokens of cosines and sines are in their last dim but one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.sequence.layout import SequenceLayout

_BY_LENGTH = ("dynamic", "longrope")
_INSTEAD = "use rope_type 'default', 'linear', 'yarn' or 'llama3'"


def pin_length(model: PreTrainedModel, layout: Callable[[], SequenceLayout | None]) -> list[Any]:
    """Hook the rotary modules whose frequencies depend on the length; return the hooks' handles."""
    handles: list[Any] = []
    for module in model.modules():
        if depends_on_length(module):
            pin = _LengthPin(layout)
            handles += [
                module.register_forward_pre_hook(pin.append, with_kwargs=True),
                module.register_forward_hook(pin.cut),
            ]
    return handles


def depends_on_length(module: nn.Module) -> bool:
    """True if a module is a RoPE that chooses its frequencies by the largest position."""
    kinds = getattr(module, "rope_type", None)
    values = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and any(name in kind for name in _BY_LENGTH) for kind in values)


@dataclass(frozen=True, slots=True)
class _LengthPin:
    """Hooks around one rotary module; outside a sharded forward, where `layout` returns None, they do nothing."""

    layout: Callable[[], SequenceLayout | None]

    def append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Append a token at the largest position to the module's position_ids."""
        layout = self.layout()
        if layout is None:
            return args, kwargs
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": _with_last(module, kwargs["position_ids"], layout)}
        if len(args) < 2:
            raise UnsupportedError(
                f"{type(module).__name__} is called without position_ids, and its RoPE depends on the longest: {_INSTEAD}"
            )
        return (args[0], _with_last(module, args[1], layout), *args[2:]), kwargs

    def cut(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cut that token off the cosines and sines again."""
        layout = self.layout()
        if layout is None:
            return output
        if isinstance(output, Tensor):
            return _without_last(module, output, layout)
        return tuple(_without_last(module, values, layout) for values in output)


def _with_last(module: nn.Module, position_ids: Tensor, layout: SequenceLayout) -> Tensor:
    if position_ids.ndim not in (2, 3) or position_ids.shape[-1] != layout.shard_length:
        raise _unknown_shape(module, "takes positions", position_ids)
    return torch.cat([position_ids, torch.full_like(position_ids[..., :1], layout.max_position)], dim=-1)


def _without_last(module: nn.Module, values: Tensor, layout: SequenceLayout) -> Tensor:
    if values.ndim not in (3, 4) or values.shape[-2] != layout.shard_length + 1:
        raise _unknown_shape(module, "gives values", values)
    return values[..., :-1, :]


def _unknown_shape(module: nn.Module, what: str, given: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"{type(module).__name__} {what} of shape {list(given.shape)}, and its RoPE depends on the longest position: "
        f"positions [B, L] or [3, B, L] and values [..., L, D] can be pinned to the whole sequence's; {_INSTEAD}"
    )
