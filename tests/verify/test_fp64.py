"""`compute_in_fp64` leaves nothing behind when it ends."""

from __future__ import annotations

import torch
from torch.utils._device import _device_constructors

from ithaca.verify.fp64 import compute_in_fp64


def test_promoted_device_context_works_afterwards() -> None:
    """The first device context of a process caches torch's factory functions, which `compute_in_fp64` replaces."""
    _device_constructors.cache_clear()
    with compute_in_fp64(), torch.device("meta"):
        inside = torch.empty(2, dtype=torch.float32)
    with torch.device("meta"):
        after = [torch.empty(2), torch.zeros(2), torch.full((2,), 1.0), torch.arange(2)]
    assert (inside.is_meta, inside.dtype) == (True, torch.float64)
    assert all(x.is_meta for x in after)
    _device_constructors.cache_clear()
