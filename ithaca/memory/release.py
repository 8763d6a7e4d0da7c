"""Release of freed memory before something large is built.

A model is part of reference cycles (modules, hooks, the binding). Its weights stay allocated until Python's garbage
collector runs, which may be after the next model is built.
"""

from __future__ import annotations

import gc
from typing import Any

import torch


def release(device: torch.device) -> None:
    """Collect garbage and empty the allocators' caches of device memory and of pinned host memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # Public in torch 2.13, private in some before it; a torch with neither keeps its cache.
        private = getattr(torch._C, "_host_emptyCache", None)
        empty: Any = getattr(torch.accelerator, "empty_host_cache", private)
        if empty is not None:
            empty()
