"""Weights for a model that has none yet, so that it can be tried on a few tokens before its own are loaded.

What the parts of a layer do is found by running them (`roles.py`), and does not depend on the weights' values. Layers
of equal shapes share one set of random weights, so that a model of any depth needs memory for one layer of each kind
besides its embeddings and head.

Invariant: the numbers are the same on every rank, and afterwards the model is as empty, and its buffers are, as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.models.discover.roles import shapes

# Numbers drawn for one weight; a larger one has them again and again, no two rows alike, as this is prime.
_DRAWN = 2**22 - 3


@contextmanager
def randomized(model: nn.Module, layers: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, what is on the meta device has random values on `device`; buffers are afterwards as they were."""
    # Spectral norm goes one step of its iteration in every pass, a batch norm takes in what it sees.
    kept = [(store, key, tensor, tensor.clone()) for store, key, tensor in _buffers(model) if not tensor.is_meta]
    places = list(_empty_places(model, layers))
    draw = torch.Generator(device).manual_seed(0)
    made: dict[Any, Tensor] = {}
    for store, key, tensor, name in places:
        if name not in made:
            made[name] = _drawn(tensor, draw)
        store[key] = made[name]
    try:
        yield
    finally:
        for store, key, tensor, _ in places:
            store[key] = tensor
        with torch.no_grad():
            for store, key, tensor, before in kept:
                tensor.copy_(before)
                store[key] = tensor


def _buffers(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for module in model.modules():
        yield from ((module._buffers, key, each) for key, each in module._buffers.items() if each is not None)


def _empty_places(
    model: nn.Module, layers: list[nn.Module]
) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, Any]]:
    """Where empty tensors hang, with a name that those share which may have one stand-in."""
    within = {module: (shapes(layer), name) for layer in layers for name, module in layer.named_modules()}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for key, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    yield store, key, tensor, (*within[module], key) if module in within else tensor


def _drawn(empty: Tensor, draw: torch.Generator) -> Tensor:
    """Matrices that keep the size of what they multiply; vectors around one, as a norm's are. In fp32 where the
    processor may be slow in anything less."""
    short = draw.device.type == "cpu" and empty.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if short else empty.dtype
    block = torch.randn(min(empty.numel(), _DRAWN), generator=draw, device=draw.device, dtype=torch.float32)
    block = (block * empty.shape[-1] ** -0.5 if empty.dim() > 1 else 1 + 0.1 * block).to(dtype)
    times = -(-empty.numel() // _DRAWN)
    real = block.repeat(times)[: empty.numel()].view(empty.shape)
    return nn.Parameter(real, requires_grad=empty.requires_grad) if isinstance(empty, nn.Parameter) else real
