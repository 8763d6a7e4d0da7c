"""Whether attention really is sharded: which tensors it saw, how many exchanges there were, what backward keeps.

A parallelism that silently does nothing gives the right loss. So the calls themselves are watched for the time of a
context, in this process alone, and the bytes that autograd keeps are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.attention.kernels import QKV
from ithaca.attention.local import LocalAttention
from ithaca.models import binding


@dataclass(slots=True)
class Seen:
    """On one rank, layer by layer: (tokens, heads) that the model brought, (tokens, heads) that the kernel took.

    `learned`: layers whose attention takes part in backward.
    """

    brought: list[tuple[int, int]] = field(default_factory=list)
    attended: list[tuple[int, int]] = field(default_factory=list)
    exchanges: int = 0
    learned: int = 0


@contextmanager
def watched() -> Iterator[Seen]:
    """Inside, attention and exchanges are noted."""
    seen = Seen()
    attend_sharded, attend, exchange = binding.attend_sharded, LocalAttention.attend, dist.all_to_all_single

    def bring(q_BLHD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.brought.append((q_BLHD.shape[1], q_BLHD.shape[2]))
        out = attend_sharded(q_BLHD, *args, **kwargs)
        seen.learned += out.requires_grad
        return out

    def take(self: LocalAttention, qkv: QKV, *args: Any, **kwargs: Any) -> Any:
        seen.attended.append((qkv.q.shape[1], qkv.q.shape[2]))
        return attend(self, qkv, *args, **kwargs)

    def count(*args: Any, **kwargs: Any) -> Any:
        seen.exchanges += 1
        return exchange(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(binding, "attend_sharded", bring))
        stack.enter_context(patch.object(LocalAttention, "attend", take))
        stack.enter_context(patch.object(dist, "all_to_all_single", count))
        yield seen


@dataclass(slots=True)
class Kept:
    """What autograd keeps for backward, without weights; a storage that is kept twice counts once."""

    model: nn.Module
    storages: dict[int, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())

    def pack(self, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.untyped_storage().data_ptr()
        # FSDP2 puts gathered weights on the modules for the time of a layer: they are looked up when it runs.
        if place not in self.storages and place not in self._weights():
            self.storages[place] = local.detach()
        return tensor

    def _weights(self) -> set[int]:
        weights = (p for module in self.model.modules() for p in module._parameters.values() if p is not None)
        locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in weights)
        return {p.untyped_storage().data_ptr() for p in locals_}


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[Kept]:
    """Inside, what forward passes of `model` save is counted."""
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        yield kept
