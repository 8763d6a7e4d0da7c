"""Parameters of one decoder layer, counted from the config: attention, MLP or experts, norms.

    Llama layer, hidden C, MLP width F, H query and K key-value heads of size D     a linear layer is an (inputs, outputs) pair

        attention   (C, H*D)  (C, K*D)  (C, K*D)  (H*D, C)        2*C*(H + K)*D parameters
        MLP         (C, F)  (C, F)  (F, C)                        3*C*F
        norms       C  C                                          2*C

Experts multiply the MLP, biases and norms of queries and keys add to attention. Facts that a config does not hold come
from the survey, by type (`architectures.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ithaca.planning.model.architectures import EXPERT_COUNTS, ArchitectureFacts, facts_of

Config = Mapping[str, Any]
# A linear layer as (inputs, outputs).
Edge = tuple[int, int]


class InputsNeeded(NamedTuple):
    """Linear layers whose input must be saved for backward: those with a trained weight or adapter.

    `queries`: the first layers of attention. `projection`: its output layer. `mlp`: the first layers of the MLP. `down`:
    its output layer.
    """

    queries: bool = True
    projection: bool = True
    mlp: bool = True
    down: bool = True


ALL_NEEDED = InputsNeeded()


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Parameters of one layer, and a token's share of its work.

    `width`: intermediate values of a token in the MLP, over all experts that the token visits. `active`: MLP parameters
    that a token is multiplied by. `linear_edges`: inputs + outputs of all linear layers, the parameters of a LoRA of rank
    1. `normed`: a token's values that norms inside attention read (queries and keys, or latents). `last`: parameters of
    the MLP's output layer if its output is only added to the residual stream, so that no gradient needs the output.
    `sandwiched`, `one_norm`, `norms_in_fp32`, `centred`: as in `ArchitectureFacts`. `adapted`: summed input widths of the
    adapters in attention, and in the MLP. `inputs_needed`: linear layers whose input is saved for backward.
    """

    attention: int
    mlp: int
    norms: int
    width: int
    active: int
    gated: bool
    experts: int
    experts_per_token: int
    window: int | None
    linear_edges: int
    normed: int = 0
    last: int = 0
    sandwiched: bool = False
    one_norm: bool = False
    norms_in_fp32: bool = False
    centred: bool = False
    adapted: tuple[int, int] = (0, 0)
    inputs_needed: InputsNeeded = ALL_NEEDED

    @property
    def parameters(self) -> int:
        return self.attention + self.mlp + self.norms


def layer_sizes(config: Config, index: int, key_size: int, value_size: int) -> LayerSizes:
    """Return the sizes of layer `index`."""
    facts, hidden = _facts(config), int(config["hidden_size"])
    edges, extras = _attention(config, key_size, value_size)
    block = _experts(config) if _has_experts(config, index) else _dense(config, int(config["intermediate_size"]))
    return LayerSizes(
        attention=_weights(edges) + extras,
        mlp=block.parameters,
        norms=hidden * (4 if facts.sandwiched or facts.biased else 2),
        width=block.width,
        active=block.active,
        gated=facts.gated,
        experts=block.experts,
        experts_per_token=block.per_token,
        window=window_of(config, index),
        linear_edges=sum(map(sum, edges)) + sum(map(sum, block.edges)),
        normed=_normed(config, key_size),
        last=0 if block.experts or facts.norm_after_mlp else block.width * hidden,
        sandwiched=facts.sandwiched,
        one_norm=facts.one_norm,
        norms_in_fp32=facts.norms_in_fp32,
        centred=facts.centred,
    )


def _facts(config: Config) -> ArchitectureFacts:
    return facts_of(str(config.get("model_type", "")))


def _normed(config: Config, key: int) -> int:
    """Return the number of a token's values that norms inside attention read."""
    if config.get("kv_lora_rank") is not None:
        return int(config["kv_lora_rank"]) + int(config.get("q_lora_rank") or 0)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return (heads + kv_heads) * key if _facts(config).head_norms else 0


def window_of(config: Config, index: int) -> int | None:
    """Return the sliding window of layer `index`; None if the layer has full attention."""
    window = config.get("sliding_window")
    types, facts = config.get("layer_types"), _facts(config)
    if not window or not config.get("use_sliding_window", bool(types) or not facts.slides_if_set):
        return None
    if types:
        slides = types[index] == "sliding_attention"
    elif facts.full_last:
        slides = (index + 1) % int(config.get("sliding_window_pattern") or facts.full_last) != 0
    elif facts.full_first:
        slides = index % facts.full_first != 0
    else:
        slides = not facts.slides_if_set or index >= int(config.get("max_window_layers", 28) or 0)
    return int(window) if slides else None


@dataclass(frozen=True, slots=True)
class _MlpSizes:
    """Sizes of an MLP or an expert block; `edges`: its plain linear layers, `experts` and `per_token` 0 for an MLP."""

    parameters: int
    active: int
    width: int
    edges: tuple[Edge, ...]
    experts: int = 0
    per_token: int = 0


def _weights(edges: tuple[Edge, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in edges)


def _attention(config: Config, key: int, value: int) -> tuple[tuple[Edge, ...], int]:
    """Return the linear layers of attention, and the number of its other parameters: biases, norms, sinks."""
    facts = _facts(config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", facts.attention_bias))
    if config.get("kv_lora_rank") is not None:
        return _latent_attention(config, key, value, bias=bias)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    outputs = (heads * key, kv_heads * key, kv_heads * value)
    edges = (*((hidden, out) for out in outputs), (heads * value, hidden))
    if facts.biased:
        bias = bool(config.get("use_bias", True))
    qkv_bias = bias or bool(config.get("qkv_bias", facts.qkv_bias))
    extras = sum(outputs) * qkv_bias + hidden * bias
    extras += {"head": 2 * key, "heads": outputs[0] + outputs[1]}.get(facts.head_norms, 0)
    extras += heads if facts.sinks else 0
    return edges, extras


def _latent_attention(config: Config, key: int, value: int, *, bias: bool) -> tuple[tuple[Edge, ...], int]:
    """Return the same as `_attention` for MLA: queries, keys and values are made from low-rank latents."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    q_rank = config.get("q_lora_rank")
    queries: tuple[Edge, ...] = ((hidden, heads * key),)
    if q_rank is not None:
        queries = ((hidden, int(q_rank)), (int(q_rank), heads * key))
    edges = (
        *queries,
        (hidden, kv_rank + rope),
        (kv_rank, heads * (key - rope + value)),
        (heads * value, hidden),
    )
    norms = kv_rank + int(q_rank or 0)
    return edges, norms + bias * (int(q_rank or 0) + kv_rank + rope + hidden)


def _dense(config: Config, width: int) -> _MlpSizes:
    facts, hidden = _facts(config), int(config["hidden_size"])
    edges: tuple[Edge, ...] = (*([(hidden, width)] * (2 if facts.gated else 1)), (width, hidden))
    bias = bool(config.get("use_bias", True)) if facts.biased else bool(config.get("mlp_bias"))
    count = _weights(edges) + bias * sum(outputs for _, outputs in edges)
    return _MlpSizes(count, count, width, edges)


def _has_experts(config: Config, index: int) -> bool:
    if not _expert_count(config):
        return False
    for key in ("first_k_dense_replace", "moe_layer_start_index"):
        if config.get(key) is not None:
            return index >= int(config[key])
    if index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _expert_count(config: Config) -> int:
    return int(next((config[key] for key in EXPERT_COUNTS if config.get(key)), 0))


def _experts(config: Config) -> _MlpSizes:
    facts, hidden = _facts(config), int(config["hidden_size"])
    count = _expert_count(config)
    per_token = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or config.get("moe_k") or 1)
    full = facts.full_width_experts or not config.get("moe_intermediate_size")
    width = int(config["intermediate_size"] if full else config["moe_intermediate_size"])
    # Fused experts are one tensor, not linear layers, so LoRA adds nothing to them and they are no edges.
    expert = 3 * hidden * width + (2 * width + hidden if facts.expert_biases else 0)
    router = count * hidden + (count if facts.expert_biases else 0)
    shared_width = int(
        config.get("shared_expert_intermediate_size")
        or width * int(config.get("n_shared_experts") or config.get("moe_num_shared_experts") or 0)
    )
    edges: tuple[Edge, ...] = ()
    if shared_width:
        edges = ((hidden, shared_width), (hidden, shared_width), (shared_width, hidden))
    if shared_width and config.get("shared_expert_intermediate_size"):
        edges = (*edges, (hidden, 1))
    every_token = router + _weights(edges)
    return _MlpSizes(
        parameters=count * expert + every_token,
        active=per_token * expert + every_token,
        width=per_token * width + shared_width,
        edges=edges,
        experts=count,
        per_token=per_token,
    )
