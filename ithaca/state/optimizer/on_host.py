"""Bytes of training state that are in host memory already, so that a later memory plan does not count them twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ithaca.handle import handle_of


def held_on_host(model: nn.Module) -> int:
    """Return the bytes of this rank's weights, gradients and optimizer state in host memory."""
    return sum(_bytes(tensor) for tensor in _tensors(model))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    handle = handle_of(model)
    for optimizer in () if handle is None else handle.living_optimizers():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if local.device.type != "cpu":
        return 0
    # torchao's 8-bit moments (private attributes, torchao 0.16 and newer) report the shape and dtype of what they encode.
    return int(local.codes.nbytes + local.scale.nbytes if hasattr(local, "codes") else local.nbytes)
