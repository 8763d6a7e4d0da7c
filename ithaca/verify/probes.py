"""Probes of a sharded step: tensors that attention sees, exchanges, and bytes that autograd saves for backward.

A parallelism that silently does nothing gives the right loss. So the calls themselves are recorded, for the time of a
context and in this process alone.
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
class AttentionCalls:
    """Attention calls of one rank, layer by layer, as (tokens, heads).

    `from_model`: shapes of the model's queries. `in_kernel`: shapes of the kernel's queries, after the exchange.
    `with_gradient`: layers whose attention takes part in backward.
    """

    from_model: list[tuple[int, int]] = field(default_factory=list)
    in_kernel: list[tuple[int, int]] = field(default_factory=list)
    exchanges: int = 0
    with_gradient: int = 0


@contextmanager
def recorded_attention() -> Iterator[AttentionCalls]:
    """Record every attention call and every exchange inside the context."""
    calls = AttentionCalls()
    attend_sharded, attend, exchange = binding.attend_sharded, LocalAttention.attend, dist.all_to_all_single

    def record_model(q_BLHD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.from_model.append((q_BLHD.shape[1], q_BLHD.shape[2]))
        out = attend_sharded(q_BLHD, *args, **kwargs)
        calls.with_gradient += out.requires_grad
        return out

    def record_kernel(self: LocalAttention, qkv: QKV, *args: Any, **kwargs: Any) -> Any:
        calls.in_kernel.append((qkv.q.shape[1], qkv.q.shape[2]))
        return attend(self, qkv, *args, **kwargs)

    def record_exchange(*args: Any, **kwargs: Any) -> Any:
        calls.exchanges += 1
        return exchange(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(binding, "attend_sharded", record_model))
        stack.enter_context(patch.object(LocalAttention, "attend", record_kernel))
        stack.enter_context(patch.object(dist, "all_to_all_single", record_exchange))
        yield calls


@dataclass(slots=True)
class SavedTensors:
    """Storages that autograd saves for backward, each counted once; weights are left out."""

    model: nn.Module
    storages: dict[int, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor; the hook of autograd's saved tensors."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        address = local.untyped_storage().data_ptr()
        # FSDP2 puts gathered weights on a layer only while it runs, so weights are looked up here and not beforehand.
        if address not in self.storages and address not in self._weight_addresses():
            self.storages[address] = local.detach()
        return tensor

    def _weight_addresses(self) -> set[int]:
        weights = (p for module in self.model.modules() for p in module._parameters.values() if p is not None)
        shards = (p.to_local() if isinstance(p, DTensor) else p for p in weights)
        return {p.untyped_storage().data_ptr() for p in shards}


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[SavedTensors]:
    """Count what forward passes of `model` inside the context save for backward."""
    saved = SavedTensors(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved
