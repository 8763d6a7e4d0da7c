"""What nobody needs any more, given back before something as large is built.

A model stands in cycles (modules, hooks, the binding), which Python frees when it happens to look for cycles: until then
its weights stay where they are.
"""

from __future__ import annotations

import gc
from typing import Any

import torch


def release(device: torch.device) -> None:
    """Free what only cycles hold, and hand the allocators' empty segments to the device and the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # Pinned memory's cache; a torch that cannot empty it keeps it.
        private = getattr(torch._C, "_host_emptyCache", None)
        empty: Any = getattr(torch.accelerator, "empty_host_cache", private)
        if empty is not None:
            empty()
