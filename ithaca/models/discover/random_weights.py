"""Random weights for a model on the meta device, so that the model can run on a few tokens before loading.

    with randomized(model, layers, torch.device("cpu")):
        model(input_ids=few_tokens(model))          # 70B parameters, memory for one layer, embeddings and head

Discovery runs the model (`roles.py`), and its findings do not depend on the weights' values. Layers of equal shapes
share one set of random weights.

Invariant: the numbers are the same on every rank. Afterwards the weights are on the meta device again, and the buffers
are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.models.discover.roles import shapes

# Random numbers drawn for one weight. A larger weight repeats them; a prime period keeps its rows different.
_PERIOD = 2**22 - 3


@contextmanager
def randomized(model: nn.Module, layers: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, tensors of the meta device have random values on `device`; afterwards buffers are restored."""
    # A run changes some buffers: spectral norm advances its power iteration, batch norm updates its statistics.
    kept = [(store, key, tensor, tensor.clone()) for store, key, tensor in _buffers(model) if not tensor.is_meta]
    empty = list(_meta_tensors(model, layers))
    draw = torch.Generator(device).manual_seed(0)
    made: dict[Any, Tensor] = {}
    for store, key, tensor, sharing in empty:
        if sharing not in made:
            made[sharing] = _random_like(tensor, draw)
        store[key] = made[sharing]
    try:
        yield
    finally:
        for store, key, tensor, _ in empty:
            store[key] = tensor
        with torch.no_grad():
            for store, key, tensor, before in kept:
                tensor.copy_(before)
                store[key] = tensor


def _buffers(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for module in model.modules():
        yield from ((module._buffers, key, each) for key, each in module._buffers.items() if each is not None)


def _meta_tensors(
    model: nn.Module, layers: list[nn.Module]
) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, Any]]:
    """Yield each tensor on the meta device with its dict and key; tensors with an equal fourth item share random values."""
    within = {module: (shapes(layer), name) for layer in layers for name, module in layer.named_modules()}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for key, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    yield store, key, tensor, (*within[module], key) if module in within else tensor


def _random_like(empty: Tensor, draw: torch.Generator) -> Tensor:
    """Return a matrix that keeps the norm of its input, or a vector around 1, as the weights of a norm are."""
    # Half precision is slow on many CPUs.
    half = draw.device.type == "cpu" and empty.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half else empty.dtype
    block = torch.randn(min(empty.numel(), _PERIOD), generator=draw, device=draw.device, dtype=torch.float32)
    block = (block * empty.shape[-1] ** -0.5 if empty.dim() > 1 else 1 + 0.1 * block).to(dtype)
    times = -(-empty.numel() // _PERIOD)
    real = block.repeat(times)[: empty.numel()].view(empty.shape)
    return nn.Parameter(real, requires_grad=empty.requires_grad) if isinstance(empty, nn.Parameter) else real
