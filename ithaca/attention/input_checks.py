"""Refusals of attention inputs, before the first collective."""

from __future__ import annotations

import math

from torch import Tensor

from ithaca.arguments import check_flag, check_kind, shown
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.errors import ArgumentError, BatchError, MeshError, UnsupportedError
from ithaca.heads import split_heads
from ithaca.mesh import Mesh, largest_divisor
from ithaca.quantities import finite_or_nan
from ithaca.sequence.layout import SequenceLayout


def check_tensors(**tensors: object) -> None:
    """Refuse q, k or v that is not a floating-point tensor of four dims."""
    for name, tensor in tensors.items():
        check_kind(name, tensor, Tensor, "pass a tensor [B, L, heads, head size] of this rank's tokens")
        assert isinstance(tensor, Tensor)
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise BatchError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype}: floating-point numbers [B, L, heads, head size] are needed"
            )


def check_options(layout: object, causal: object, window: object, sinks_H: object, **numbers: object) -> None:
    """Refuse options of other types than `ulysses_attention` takes; `numbers` are numbers or None."""
    check_kind("layout", layout, SequenceLayout, "pass the SequenceLayout of the batch, as shard_batch gives it")
    check_flag("causal", causal)
    for name, number in numbers.items():
        if number is not None and math.isnan(finite_or_nan(number)):
            raise ArgumentError(f"{name}={shown(number)}: pass a number, or None")
    if window is not None:
        check_kind("window", window, int, "pass a whole number of tokens, or None")
    if sinks_H is not None:
        check_kind("sinks_H", sinks_H, Tensor, "pass a tensor of one score a head, or None")


def check_heads(heads: int, kv_heads: int, mesh: Mesh) -> None:
    """Refuse a degree that the heads cannot be split over, naming one that they can."""
    if mesh.ring > 1:
        raise UnsupportedError(f"ring={mesh.ring} is not built yet: use ring=1 with sp up to the head count, {heads}")
    if mesh.sp > heads:
        best = largest_divisor(mesh.world, heads)
        raise MeshError(
            f"{heads} heads over sp={mesh.sp}: every rank needs a head, use sp={best} with dp={mesh.world // best}"
        )
    split_heads(heads, kv_heads, mesh.sp)


def check_shards(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
    """Refuse shards of other shapes than the layout's, or that do not fit together."""
    expected = (layout.batch, layout.shard_length)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if tuple(x.shape[:2]) != expected:
            raise BatchError(
                f"{name} has shape {list(x.shape)}: the layout says [B, L] = {list(expected)} on every rank"
            )
    if k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        raise BatchError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k has v's heads and q's head size")
    if not q.dtype == k.dtype == v.dtype:
        raise BatchError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: one dtype is needed, they travel together")


def check_spec(heads: int, spec: AttentionSpec, sinks_H: Tensor | None) -> None:
    """Refuse a window, softcap or sinks that no attention has."""
    if spec.window is not None and spec.window < 1:
        raise BatchError(f"window={spec.window}: a query sees at least itself, use window >= 1 or None")
    if spec.softcap is not None and not spec.softcap > 0:
        raise BatchError(f"softcap={spec.softcap}: scores are divided by it, use softcap > 0 or None")
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise BatchError(f"sinks_H has shape {list(sinks_H.shape)}: one score for each of the {heads} heads is needed")
