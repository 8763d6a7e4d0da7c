"""What of a model's training state is in host memory by now: a plan that is made later must not want room for it twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ithaca.handle import handle_of


def held_on_host(model: nn.Module) -> int:
    """Bytes of this rank's weights, gradients and optimizer state that are on the host."""
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
    # torchao's 8-bit moments show the shape and type that they stand for.
    return int(local.codes.nbytes + local.scale.nbytes if hasattr(local, "codes") else local.nbytes)
