"""What nobody needs any more, given back before something as large is built.

A model stands in cycles (modules, hooks, the binding), which Python frees when it happens to look for cycles: until then
its weights stay where they are.
"""

from __future__ import annotations

import gc

import torch


def release(device: torch.device) -> None:
    """Free what only cycles hold, and hand the allocator's empty segments to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
