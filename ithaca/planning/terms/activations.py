"""The bytes of activations on one rank: what a layer saves, and what lives while it is worked on.

A `Flow` holds the tensors' sizes once: B*L tokens of a shard, B*S of the whole sequence, heads of a rank and of a
head group. Everything else is a sum of them, given as `Piece(name, bytes, formula)`; formulas use the design's
letters, `X` the residual stream `B*L*hidden*c`, `c` the bytes of a computed value, `g` of a head group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ithaca.planning.memory_plan import Job, LayerMode
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes

FP32 = 4


class Piece(NamedTuple):
    """One named share of memory."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of one rank's tensors. `q`, `kv`, `out`: all heads, its tokens. `*_g`: one head group, all tokens."""

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
    def of(cls, sizes: ModelSizes, job: Job, groups: int) -> Flow:
        split = sizes.split(job.sp)
        heads, kv_heads = split.most
        key, value, c = sizes.key_size, sizes.value_size, job.compute_bytes
        groups = min(groups, split.most_groups)
        kv_g = -(-kv_heads // groups)
        h_g = min(heads, kv_g * (sizes.heads // sizes.kv_heads))
        # cuDNN's backward adds dq up in fp32 and, where kv heads are shared, has dk and dv of every query head.
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
            # What adapters take is cast to what they compute in, and kept for their weights' gradients.
            cast=job.tokens * job.adapter_bytes if sizes.adapters and job.adapter_bytes > c else 0,
        )

    @property
    def anchor(self) -> int:
        return self.out + self.lse

    @property
    def arrives(self) -> bool:
        """Whether heads travel between ranks, all in one group."""
        return not self.alone and self.groups == 1


def saved(flow: Flow, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> tuple[int, ...]:
    """The tensors that a layer leaves for its backward, in bytes each."""
    if mode == "save":
        return flow.x, flow.out, flow.lse
    if mode == "rebuild":
        return flow.out, flow.lse
    if mode == "recompute":
        return (flow.x,)
    # Of one group among ranks q, k, v are kept as they arrived, and the output is there twice: as attention's backward
    # wants it, and as the projection after it does.
    qkv = flow.q_g + flow.kv_g if flow.arrives else flow.q + flow.kv
    attention = (qkv, flow.out, flow.lse, _normed(flow, layer), _into_projection(flow, layer))
    # What the first norm leaves: q, k, v are made of its output, where there is but one the MLP too.
    wanted = layer.wants.queries or (layer.one_norm and (layer.wants.mlp or not _keeps_mlp(layer, mode, tiled=tiled)))
    norms = _norm(flow, layer, wanted, tiled=tiled) + _mlp_norm(flow, layer, mode, tiled=tiled)
    return norms, *attention, _kept_wide(flow, layer, mode, tiled=tiled)


def _mlp_norm(flow: Flow, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """What the norm before the MLP leaves, if it has its own: all of it, or the input where it runs again."""
    if layer.one_norm:
        return 0
    return _norm(flow, layer, layer.wants.mlp, tiled=tiled) if _keeps_mlp(layer, mode, tiled=tiled) else flow.x


def _kept_wide(flow: Flow, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """What a layer saves for its MLP alone: gate, up, activation (kept by autograd alone) and product; without a gate
    the activation and what goes in. The last only where something wants it."""
    if not _keeps_mlp(layer, mode, tiled=tiled):
        return 0
    wide = (2 if flow.fused else 3) if layer.gated else 1
    if flow.cast:
        return wide * layer.width * flow.tokens * flow.c + flow.cast * layer.adapted[1]
    return (wide + layer.wants.down) * layer.width * flow.tokens * flow.c


def _into_projection(flow: Flow, layer: LayerSizes) -> int:
    """What the projection after attention wants of its input, beside attention's own. Adapters that compute in more bytes
    keep their inputs in those, and what is frozen beside them none."""
    if flow.cast:
        return flow.cast * layer.adapted[0]
    return flow.out if flow.arrives and layer.wants.projection else 0


def gone_before_attention(flow: Flow, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """What a layer saves for what comes after its attention, whose backward finds it gone: the MLP's, with its norm,
    and the projection's input where that is not attention's own output."""
    if mode != "keep":
        return 0
    wide, norm = _kept_wide(flow, layer, mode, tiled=tiled), _mlp_norm(flow, layer, mode, tiled=tiled)
    return wide + norm + (0 if flow.cast else _into_projection(flow, layer))


def _norm(flow: Flow, layer: LayerSizes, wanted: bool, *, tiled: bool) -> int:
    """What the norm before attention, or before the MLP, leaves: its input, and its output where that is wanted; one
    after them its input. A LayerNorm is one operator, and in tiles a norm runs again."""
    norms, output = 2 if layer.sandwiched else 1, flow.x if wanted and not flow.cast else 0
    if flow.fused or tiled or not layer.gated:
        return norms * flow.x + output
    return norms * flow.tokens * flow.hidden * _uncompiled(flow, layer) + output


def _uncompiled(flow: Flow, layer: LayerSizes) -> int:
    """Bytes that a norm which is not compiled leaves of each value: its input in fp32 (less its mean, for the variance
    and for the quotient) and, where its weight is trained, what that is multiplied with."""
    return FP32 * (1 + layer.centred) + (FP32 if layer.norms_in_fp32 else flow.c) * flow.trains


def _keeps_mlp(layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> bool:
    """Whether an MLP's values are kept for backward; tiles and experts always run again."""
    return mode == "keep" and not tiled and not layer.experts


def _normed(flow: Flow, layer: LayerSizes) -> int:
    """What norms of queries and keys leave."""
    return flow.tokens * layer.normed * (flow.c if flow.fused else _uncompiled(flow, layer))


def attention_work(flow: Flow, layer: LayerSizes, mode: LayerMode) -> list[Piece]:
    """What lives beside the saved tensors while a layer's attention runs backward."""
    lasting = _lasting(_ATTENTION_STREAMS, layer, mode)
    pieces = [Piece("residual stream", len(lasting) * flow.x, f"{len(lasting)} X: {', '.join(lasting)}")]
    if mode != "keep":
        pieces += _queries(flow, layer)
    gradients, formula = flow.out, "B*L*H*E*c for the output's"
    if flow.groups > 1:
        # The groups' results come together in these; one group's are made when its kernel is through.
        gradients += _returned(flow)
        formula += " + q, k, v (and fp32 of k, v where ranks share them)"
    pieces.append(Piece("gradients of attention", gradients, formula))
    return [*pieces, *_group_work(flow, kept=mode == "keep")]


def _returned(flow: Flow) -> int:
    """Gradients of q, k, v as their tokens' owner has them."""
    return flow.q + flow.kv + (flow.kv * FP32 // flow.c if flow.shares_kv else 0)


def _queries(flow: Flow, layer: LayerSizes) -> list[Piece]:
    """What a layer that is run again makes for its attention."""
    pieces = [Piece("q, k, v", flow.q + flow.kv, "B*L*(H*D + K*(D+E))*c")]
    if flow.cast:
        pieces.append(Piece("inputs of adapters", flow.cast * layer.adapted[0], "B*L*inputs*4"))
    if layer.normed:
        pieces.append(Piece("norms of q, k", _normed(flow, layer), "B*L*(H+K)*D*c, uncompiled (4 + c)"))
    return pieces


def group_bytes(flow: Flow) -> int:
    """What head groups cut: buffers over the whole sequence and the kernel's own."""
    return sum(piece.bytes for piece in _group_work(flow))


_ATTENTION_STREAMS = "the layer's gradient", "that after attention"


def _group_work(flow: Flow, *, kept: bool = False) -> list[Piece]:
    """One head group in backward: q, k, v, output and its gradient over the whole sequence, and the kernel's results."""
    bundle, results = flow.q_g + flow.kv_g + 2 * flow.out_g, flow.q_g + flow.kv_g
    row = "B*S*(h*(D+2*E) + k*(D+E))*c"
    if flow.arrives:
        copies = [_one_exchange(flow, kept=kept)]
    elif flow.groups > 1 and not flow.alone:
        # Of two groups the first has no results before it, the second no buffers behind it.
        returning = 2 * results if flow.groups > 2 else 0
        formula = f"4 {row}: received, dense, the next group's two; of three groups on 2 of dq, dk, dv returning"
        copies = [Piece("exchange", 4 * bundle + returning, formula)]
    else:
        # One group on one rank: the kernel takes the tensors as they are.
        copies = [Piece("head group", bundle, f"{row}: dense")] if flow.groups > 1 else []
    if flow.ring > 1:
        # Around the ring go k, v and their gradients in fp32, this turn's and the next one's; dq is summed meanwhile.
        turning = 2 * flow.kv_g + (2 * flow.kv_g + flow.q_g) * FP32 // flow.c
        copies.append(Piece("ring blocks", turning, "B*S/ring*(2*k*(D+E)*(c+4) + h*D*4)"))
    return [
        *copies,
        Piece("kernel's gradients", results, "B*S*(h*D + k*(D+E))*c"),
        Piece("kernel workspace", flow.workspace_g, "B*S*h*(4*D + c*(D+E)), where h = k only 4*D"),
    ]


def _one_exchange(flow: Flow, *, kept: bool) -> Piece:
    """Buffers of a layer whose heads all travel at once: while the kernel runs, or when its results go back, whichever
    takes more beside the workspace that only the kernel has."""
    results = flow.q_g + flow.kv_g
    if kept:
        # q, k, v and the output lie here, the first three side by side as they came. One row's gradient comes dense.
        received, dense = flow.out_g, results + (flow.out_g if flow.rows > 1 else 0)
        formula = "B*S*h*E*c received, B*S*(h*D + k*(D+E))*c dense"
    else:
        received = dense = results + 2 * flow.out_g
        formula = "2 B*S*(h*(D+2*E) + k*(D+E))*c: received, dense"
    returning = 2 * results + _returned(flow) - flow.workspace_g
    return Piece("exchange", received + max(dense, returning), f"{formula}; or received, and dq, dk, dv returning")


def mlp_work(flow: Flow, layer: LayerSizes, mode: LayerMode, tile: int, *, trains: bool, reduces: bool) -> list[Piece]:
    """What lives beside the saved tensors while a layer's MLP runs backward, tile by tile.

    `reduces`: gradients wait to be reduced over ranks, and are counted there.
    """
    tokens = min(tile, flow.tokens)
    tiled = tokens < flow.tokens
    # Forward values that are kept are already among the saved ones.
    kept = _keeps_mlp(layer, mode, tiled=tiled)
    lasting = _lasting(_MLP_STREAMS[mode == "keep"], layer, mode)[: None if tiled or kept else -1]
    pieces = [Piece("residual stream", len(lasting) * flow.x, f"{len(lasting)} X: {', '.join(lasting)}")]
    if mode != "keep":
        pieces += _queries(flow, layer)
    # Compiled, or without a norm of its own, one tile of all tokens has only its input beside the wide values, no copy.
    narrow = 1 if kept or (not tiled and (flow.fused or layer.one_norm)) else 4
    values = _wide_values(layer, fused=flow.fused, kept=kept)
    wide = (values * layer.width + narrow * flow.hidden) * flow.c
    tile_bytes, formula = tokens * wide, f"{tokens} tokens * ({values} * intermediate + {narrow} * hidden) * c"
    if layer.experts:
        tile_bytes, formula = _expert_tile(flow, layer, tokens, trains=trains)
    pieces.append(Piece("MLP tile", tile_bytes, formula))
    if flow.cast and not kept:
        pieces.append(Piece("MLP's adapters", flow.cast * layer.adapted[1] * tokens // flow.tokens, "tokens*inputs*4"))
    each = (0 if reduces else flow.c) + (FP32 if tiled else 0)
    if trains and each:
        pieces.append(Piece("MLP weight gradients", layer.mlp * each, "a tile's, and their sum in fp32"))
    return pieces


# The last of them is there from the start where tiles fill it one by one.
_MLP_STREAMS = {
    True: ("the MLP's gradient", "its input's"),
    False: ("the MLP's input", "the layer's gradient", "the MLP's input gradient"),
}


def _lasting(streams: tuple[str, ...], layer: LayerSizes, mode: LayerMode) -> tuple[str, ...]:
    """A layer that is run again has what its first norm gives too, as long as something wants it; where that is the
    MLP's input, once."""
    if mode == "keep" or not layer.wants.queries:
        return streams
    return "norm's output", *(stream for stream in streams if stream != "the MLP's input" or not layer.one_norm)


def _wide_values(layer: LayerSizes, *, fused: bool, kept: bool) -> int:
    """Intermediate values a token has at once in an MLP's backward, gradients included."""
    forward = 3 if layer.gated else 2
    if fused:
        # Compiled code writes gradients over values: gate, up, product and one gradient more.
        return 1 if kept else forward + 1
    return forward if kept else 2 * forward


def _expert_tile(flow: Flow, layer: LayerSizes, tokens: int, *, trains: bool) -> tuple[int, str]:
    """A tile of an expert block in backward, beside its weights' gradients.

    Tokens are copied for each expert they visit. Most copies are there when the experts' outputs are weighed: what goes
    in and comes out, the output's gradient, that times the weights, that times the output. The weights' gradients come
    when two of them are left, so that only what is more than those counts here. Of five intermediate values four are
    known by name; that there is one more is what an H200 shows from 32K to 128K tokens (rehearsals.json).
    """
    copy, width, x = (tokens * n * flow.c for n in (layer.experts_per_token * flow.hidden, layer.width, flow.hidden))
    first, late = 5 * copy + 5 * width + 4 * x, 2 * copy + 3 * width + 4 * x
    formula = f"{tokens} tokens * (5 * experts a token * hidden + 5 * intermediate + 4 * hidden) * c"
    if not trains:
        return first, formula
    return max(first - layer.mlp * flow.c, late), f"{formula} - weight gradients"


def _logits(flow: Flow, *, one: bool) -> tuple[int, str]:
    """Bytes that live for each logit of a tile: it and its gradient; uncompiled what that is made of, in fp32, and a mark
    of each target. `one`: the tile goes through torch's own operations, whose backward takes most."""
    if one:
        return 3 * FP32, "3 * 4"
    if flow.loss_in_place:
        return flow.c, "c"
    return (2 * flow.c, "2 * c") if flow.fused else (flow.c + 5 * FP32 + 1, "(c + 5 * 4 + 1)")


def loss_work(flow: Flow, sizes: ModelSizes, tile: int, *, trains: bool) -> list[Piece]:
    """What lives while the head and the loss run, forward and backward, tile by tile."""
    if flow.whole_logits:
        pieces = [
            Piece("residual stream", 3 * flow.x, "3 X: the last layer's output, its norm, their gradient"),
            Piece("whole logits", flow.tokens * sizes.vocabulary * (flow.c + 2 * FP32), "B*L*V*(c + 2 * 4)"),
        ]
        return [*pieces, Piece("head weight gradient", sizes.embedding * flow.c, "V*hidden*c")] if trains else pieces
    tokens = min(tile, flow.tokens)
    one = tokens == flow.tokens and not flow.fused
    each, formula = _logits(flow, one=one)
    lasting = ("the last layer's output", "its norm", "their gradient")[: 2 if one else 3]
    pieces = [
        Piece("residual stream", len(lasting) * flow.x, f"{len(lasting)} X: {', '.join(lasting)}"),
        Piece("loss tile", tokens * sizes.vocabulary * each, f"{tokens} tokens * V * {formula}"),
    ]
    if trains:
        # Its sum; where products are not added to it as they are made, once a tile its own, while the logits are gone.
        own = 0 if flow.fused else max(0, sizes.embedding * flow.c - tokens * sizes.vocabulary * (each - flow.c))
        total, formula = (
            (0, "V*hidden*c, less logits") if one else (sizes.embedding * FP32, "V*hidden*4, summed over tiles")
        )
        pieces.append(Piece("head weight gradient", total + own, formula))
    return pieces
