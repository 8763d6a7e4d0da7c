"""The bytes of activations on one rank: the tensors that a layer saves for backward, and the work of its backward.

A `TensorBytes` holds the tensors' sizes once: B*L tokens of a shard, B*S of the whole sequence, heads of a rank and of a
head group. Everything else is a sum of them, given as `Allocation(name, bytes, formula)`. In formulas `X` is the residual
stream `B*L*hidden*c`, `c` the bytes of a computed value; a name that ends in `_g` is of one head group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ithaca.planning.memory_plan import Job, LayerMode
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes

FP32 = 4


class Allocation(NamedTuple):
    """One named allocation of a step; `formula` says how its bytes are counted."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of one rank's tensors. `q`, `kv`, `out`: all heads, the rank's tokens. `*_g`: one head group, all tokens."""

    tokens: int
    hidden: int
    c: int
    x: int
    q: int
    kv: int
    out: int
    lse: int
    q_g: int
    kv_g: int
    out_g: int
    largest_g: int
    workspace_g: int
    groups: int
    rows: int
    alone: bool
    shares_kv: bool
    fused: bool
    loss_in_place: bool
    whole_logits: bool
    ring: int
    trains: bool
    cast: int

    @classmethod
    def of(cls, sizes: ModelSizes, job: Job, groups: int) -> TensorBytes:
        split = sizes.split(job.sp)
        heads, kv_heads = split.most
        key, value, c = sizes.key_size, sizes.value_size, job.compute_bytes
        groups = min(groups, split.most_groups)
        kv_g = -(-kv_heads // groups)
        h_g = min(heads, kv_g * (sizes.heads // sizes.kv_heads))
        # cuDNN's backward sums dq in fp32 and, where query heads share kv heads, holds dk and dv of every query head.
        repeated = h_g * (key + value) * c if h_g > kv_g else 0
        return cls(
            tokens=job.tokens,
            hidden=sizes.hidden,
            c=c,
            x=job.tokens * sizes.hidden * c,
            q=job.tokens * sizes.heads * key * c,
            kv=job.tokens * sizes.kv_heads * (key + value) * c,
            out=job.tokens * sizes.heads * value * c,
            lse=job.whole * heads * FP32,
            q_g=job.whole * h_g * key * c,
            kv_g=job.whole * kv_g * (key + value) * c,
            out_g=job.whole * h_g * value * c,
            largest_g=job.whole * h_g * max(key, value),
            workspace_g=job.whole * (h_g * key * FP32 + repeated),
            groups=groups,
            rows=job.batch,
            alone=job.sp == 1,
            shares_kv=split.kv_copies > sizes.kv_heads,
            fused=job.fused,
            loss_in_place=job.loss_in_place,
            whole_logits=job.whole_logits,
            ring=job.ring,
            trains=not sizes.adapters,
            # Adapters' inputs are cast to their computing dtype, and kept for the gradients of their weights.
            cast=job.tokens * job.adapter_bytes if sizes.adapters and job.adapter_bytes > c else 0,
        )

    @property
    def anchor(self) -> int:
        """The saved attention output and its log-sum-exp."""
        return self.out + self.lse

    @property
    def arrives(self) -> bool:
        """True if heads travel between ranks, all in one group."""
        return not self.alone and self.groups == 1


def saved(tensors: TensorBytes, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> tuple[int, ...]:
    """Return the bytes of each tensor that a layer saves for its backward."""
    if mode == "save":
        return tensors.x, tensors.out, tensors.lse
    if mode == "rebuild":
        return tensors.out, tensors.lse
    if mode == "recompute":
        return (tensors.x,)
    # With one group over ranks q, k, v are kept by heads, as they arrived, and the output is kept twice: by heads for
    # attention's backward and by tokens for the projection's.
    qkv = tensors.q_g + tensors.kv_g if tensors.arrives else tensors.q + tensors.kv
    attention = (qkv, tensors.out, tensors.lse, _normed(tensors, layer), _into_projection(tensors, layer))
    # The first norm's output is the input of q, k, v and, where the layer has one norm, of the MLP.
    needed = layer.inputs_needed.queries or (
        layer.one_norm and (layer.inputs_needed.mlp or not _keeps_mlp(layer, mode, tiled=tiled))
    )
    norms = _norm(tensors, layer, needed, tiled=tiled) + _mlp_norm(tensors, layer, mode, tiled=tiled)
    return norms, *attention, _kept_wide(tensors, layer, mode, tiled=tiled)


def _mlp_norm(tensors: TensorBytes, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """Return the bytes saved for the MLP's own norm: input and output, or the input alone where the norm runs again."""
    if layer.one_norm:
        return 0
    return (
        _norm(tensors, layer, layer.inputs_needed.mlp, tiled=tiled)
        if _keeps_mlp(layer, mode, tiled=tiled)
        else tensors.x
    )


def _kept_wide(tensors: TensorBytes, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """Return the bytes saved inside the MLP: gate, up, activation and product, or without a gate input and activation."""
    if not _keeps_mlp(layer, mode, tiled=tiled):
        return 0
    # Compiled code recomputes the activation. The product is saved only where the down projection's weight is trained.
    wide = (2 if tensors.fused else 3) if layer.gated else 1
    if tensors.cast:
        return wide * layer.width * tensors.tokens * tensors.c + tensors.cast * layer.adapted[1]
    return (wide + layer.inputs_needed.down) * layer.width * tensors.tokens * tensors.c


def _into_projection(tensors: TensorBytes, layer: LayerSizes) -> int:
    """Return the bytes saved for the projection after attention, beside attention's own output."""
    # Adapters in a wider dtype keep their inputs in that dtype; the frozen weights beside them keep none.
    if tensors.cast:
        return tensors.cast * layer.adapted[0]
    return tensors.out if tensors.arrives and layer.inputs_needed.projection else 0


def freed_before_attention(tensors: TensorBytes, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """Return the saved bytes that are freed before attention's backward: of the MLP, its norm and the projection."""
    if mode != "keep":
        return 0
    wide, norm = _kept_wide(tensors, layer, mode, tiled=tiled), _mlp_norm(tensors, layer, mode, tiled=tiled)
    return wide + norm + (0 if tensors.cast else _into_projection(tensors, layer))


def _norm(tensors: TensorBytes, layer: LayerSizes, needed: bool, *, tiled: bool) -> int:
    """Return the bytes saved for the norms around attention, or around the MLP: inputs, and the first one's output."""
    # A LayerNorm is one operator and saves its input alone; in tiles a norm runs again.
    norms, output = 2 if layer.sandwiched else 1, tensors.x if needed and not tensors.cast else 0
    if tensors.fused or tiled or not layer.gated:
        return norms * tensors.x + output
    return norms * tensors.tokens * tensors.hidden * _uncompiled(tensors, layer) + output


def _uncompiled(tensors: TensorBytes, layer: LayerSizes) -> int:
    """Return the bytes that an uncompiled norm saves of each value."""
    # The input in fp32, a second time where the mean is subtracted, and the weight's factor where the weight is trained.
    return FP32 * (1 + layer.centred) + (FP32 if layer.norms_in_fp32 else tensors.c) * tensors.trains


def _keeps_mlp(layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> bool:
    """True if the MLP's values are kept for backward; tiles and experts always run again."""
    return mode == "keep" and not tiled and not layer.experts


def _normed(tensors: TensorBytes, layer: LayerSizes) -> int:
    """Return the bytes saved for norms of queries and keys."""
    return tensors.tokens * layer.normed * (tensors.c if tensors.fused else _uncompiled(tensors, layer))


def attention_work(tensors: TensorBytes, layer: LayerSizes, mode: LayerMode) -> list[Allocation]:
    """Return what the backward of a layer's attention allocates beside all saved tensors."""
    lasting = _lasting(_ATTENTION_STREAMS, layer, mode)
    allocations = [Allocation("residual stream", len(lasting) * tensors.x, f"{len(lasting)} X: {', '.join(lasting)}")]
    if mode != "keep":
        allocations += _queries(tensors, layer)
    gradients, formula = tensors.out, "B*L*H*E*c for the output's"
    if tensors.groups > 1:
        # The groups' results are gathered in these; one group's are made after its kernel.
        gradients += _returned(tensors)
        formula += " + q, k, v (and fp32 of k, v where ranks share them)"
    allocations.append(Allocation("gradients of attention", gradients, formula))
    return [*allocations, *_group_work(tensors, kept=mode == "keep")]


def _returned(tensors: TensorBytes) -> int:
    """Return the bytes of the gradients of q, k, v on the rank that owns the tokens."""
    return tensors.q + tensors.kv + (tensors.kv * FP32 // tensors.c if tensors.shares_kv else 0)


def _queries(tensors: TensorBytes, layer: LayerSizes) -> list[Allocation]:
    """Return the inputs of attention, which a layer that runs again makes anew."""
    allocations = [Allocation("q, k, v", tensors.q + tensors.kv, "B*L*(H*D + K*(D+E))*c")]
    if tensors.cast:
        allocations.append(Allocation("inputs of adapters", tensors.cast * layer.adapted[0], "B*L*inputs*4"))
    if layer.normed:
        allocations.append(Allocation("norms of q, k", _normed(tensors, layer), "B*L*(H+K)*D*c, uncompiled (4 + c)"))
    return allocations


def group_bytes(tensors: TensorBytes) -> int:
    """Return the bytes that grow smaller with more head groups: buffers over the whole sequence and the kernel's own."""
    return sum(allocation.bytes for allocation in _group_work(tensors))


_ATTENTION_STREAMS = "the layer's gradient", "that after attention"


def _group_work(tensors: TensorBytes, *, kept: bool = False) -> list[Allocation]:
    """Return one head group's buffers in backward: q, k, v, output and its gradient, and the kernel's results."""
    bundle, results = tensors.q_g + tensors.kv_g + 2 * tensors.out_g, tensors.q_g + tensors.kv_g
    row = "B*S*(h*(D+2*E) + k*(D+E))*c"
    if tensors.arrives:
        copies = [_one_exchange(tensors, kept=kept)]
    elif tensors.groups > 1 and not tensors.alone:
        # With two groups no results return beside another group's buffers: the first has none before, the second none after.
        returning = 2 * results if tensors.groups > 2 else 0
        formula = f"4 {row}: received, dense, the next group's two; of three groups on 2 of dq, dk, dv returning"
        copies = [Allocation("exchange", 4 * bundle + returning, formula)]
    else:
        # With one group on one rank the kernel reads the tensors where they are.
        copies = [Allocation("head group", bundle, f"{row}: dense")] if tensors.groups > 1 else []
    if tensors.ring > 1:
        # The ring passes k, v and their gradients in fp32, this turn's and the next turn's, while dq is summed.
        turning = 2 * tensors.kv_g + (2 * tensors.kv_g + tensors.q_g) * FP32 // tensors.c
        copies.append(Allocation("ring blocks", turning, "B*S/ring*(2*k*(D+E)*(c+4) + h*D*4)"))
    return [
        *copies,
        Allocation("kernel's gradients", results, "B*S*(h*D + k*(D+E))*c"),
        Allocation("kernel workspace", tensors.workspace_g, "B*S*h*(4*D + c*(D+E)), where h = k only 4*D"),
    ]


def _one_exchange(tensors: TensorBytes, *, kept: bool) -> Allocation:
    """Return the buffers of an exchange of all heads at once: during the kernel, or while its results return.

    The larger of the two counts, less the workspace that is freed before the results return.
    """
    results = tensors.q_g + tensors.kv_g
    if kept:
        # q, k, v and the output are saved on this rank, the first three side by side. One row's gradient arrives dense.
        received, dense = tensors.out_g, results + (tensors.out_g if tensors.rows > 1 else 0)
        formula = "B*S*h*E*c received, B*S*(h*D + k*(D+E))*c dense"
    else:
        received = dense = results + 2 * tensors.out_g
        formula = "2 B*S*(h*(D+2*E) + k*(D+E))*c: received, dense"
    returning = 2 * results + _returned(tensors) - tensors.workspace_g
    return Allocation("exchange", received + max(dense, returning), f"{formula}; or received, and dq, dk, dv returning")


def mlp_work(
    tensors: TensorBytes, layer: LayerSizes, mode: LayerMode, tile: int, *, trains: bool, reduces: bool
) -> list[Allocation]:
    """Return what the backward of a layer's MLP allocates beside all saved tensors, tile by tile.

    `reduces`: FSDP2 reduces the gradients, which then count as unreduced gradients.
    """
    tokens = min(tile, tensors.tokens)
    tiled = tokens < tensors.tokens
    # Kept forward values are among the saved tensors.
    kept = _keeps_mlp(layer, mode, tiled=tiled)
    lasting = _lasting(_MLP_STREAMS[mode == "keep"], layer, mode)[: None if tiled or kept else -1]
    allocations = [Allocation("residual stream", len(lasting) * tensors.x, f"{len(lasting)} X: {', '.join(lasting)}")]
    if mode != "keep":
        allocations += _queries(tensors, layer)
    # One tile of all tokens, compiled or without a norm of the MLP's own, has only its input beside the wide values.
    narrow = 1 if kept or (not tiled and (tensors.fused or layer.one_norm)) else 4
    values = _wide_values(layer, fused=tensors.fused, kept=kept)
    wide = (values * layer.width + narrow * tensors.hidden) * tensors.c
    tile_bytes, formula = tokens * wide, f"{tokens} tokens * ({values} * intermediate + {narrow} * hidden) * c"
    if layer.experts:
        tile_bytes, formula = _expert_tile(tensors, layer, tokens, trains=trains)
    allocations.append(Allocation("MLP tile", tile_bytes, formula))
    if tensors.cast and not kept:
        allocations.append(
            Allocation("MLP's adapters", tensors.cast * layer.adapted[1] * tokens // tensors.tokens, "tokens*inputs*4")
        )
    each = (0 if reduces else tensors.c) + (FP32 if tiled else 0)
    if trains and each:
        allocations.append(Allocation("MLP weight gradients", layer.mlp * each, "a tile's, and their sum in fp32"))
    return allocations


# By whether the layer is kept. Tiles fill the last stream one by one, so with tiles it is allocated from the start.
_MLP_STREAMS = {
    True: ("the MLP's gradient", "its input's"),
    False: ("the MLP's input", "the layer's gradient", "the MLP's input gradient"),
}


def _lasting(streams: tuple[str, ...], layer: LayerSizes, mode: LayerMode) -> tuple[str, ...]:
    """Return the residual streams of a layer's backward, with the first norm's output where the layer runs again."""
    # With one norm for attention and MLP that output is the MLP's input, and counts once.
    if mode == "keep" or not layer.inputs_needed.queries:
        return streams
    return "norm's output", *(stream for stream in streams if stream != "the MLP's input" or not layer.one_norm)


def _wide_values(layer: LayerSizes, *, fused: bool, kept: bool) -> int:
    """Return how many intermediate values of a token an MLP's backward holds at once, gradients included."""
    forward = 3 if layer.gated else 2
    if fused:
        # Compiled code writes gradients over values: gate, up, product and one more gradient.
        return 1 if kept else forward + 1
    return forward if kept else 2 * forward


def _expert_tile(tensors: TensorBytes, layer: LayerSizes, tokens: int, *, trains: bool) -> tuple[int, str]:
    """Return the bytes of a tile of an expert block in backward, beside its weights' gradients, and their formula."""
    # Tokens are copied for each expert they visit. Five copies are there when the experts' outputs are weighed: input,
    # output, the output's gradient, that times the weights, that times the output. When the weights' gradients come, two
    # copies are left: only what the five take beyond those gradients counts. Of five intermediate values four are known
    # by name; an H200 shows a fifth from 32K to 128K tokens (rehearsals.json).
    copy, width, x = (
        tokens * n * tensors.c for n in (layer.experts_per_token * tensors.hidden, layer.width, tensors.hidden)
    )
    first, late = 5 * copy + 5 * width + 4 * x, 2 * copy + 3 * width + 4 * x
    formula = f"{tokens} tokens * (5 * experts a token * hidden + 5 * intermediate + 4 * hidden) * c"
    if not trains:
        return first, formula
    return max(first - layer.mlp * tensors.c, late), f"{formula} - weight gradients"


def sum_bytes(allocations: Sequence[Allocation]) -> int:
    return sum(allocation.bytes for allocation in allocations)
