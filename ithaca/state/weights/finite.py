"""Refusal of weights that cannot be trained: numbers that are not finite, and dtypes without gradients.

A NaN in one weight makes every later loss NaN, so that every step would be skipped. Weights are therefore checked while
they are read, and again before a model is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ithaca.errors import CheckpointError

# safetensors' names of the types that a weight can be trained from.
_TRAINED = ("F64", "F32", "F16", "BF16")


def is_finite(tensor: Tensor) -> bool:
    """True unless a floating-point tensor has NaN or infinity; reads the tensor once, without a copy."""
    if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def check_finite(tensor: Tensor, key: str, where: object) -> Tensor:
    """Raise CheckpointError if `tensor` has NaN or infinity; return the tensor unchanged."""
    if not is_finite(tensor):
        raise CheckpointError(
            f"{where} has NaN or infinite numbers in {key}: copy the model anew, or take an earlier checkpoint of it"
        )
    return tensor


def check_types(folder: object, found: Mapping[str, str], trained: Iterable[str]) -> None:
    """Refuse trained weights that a file holds in a dtype without gradients; `found`: the dtypes by name."""
    wrong = [f"{key} as {found[key]}" for key in trained if found[key] not in _TRAINED]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{folder} holds {', '.join(wrong[:3])}{more}, which cannot be trained: weights as {', '.join(_TRAINED[1:])} are "
            "needed; name the model that these were quantized or converted from"
        )
