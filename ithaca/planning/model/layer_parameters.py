"""One decoder layer's parameters, counted from the config: attention, MLP or experts, norms.

What tells families apart is a short list of facts (biases, norms of q and k, norms around the MLP, where the
experts are); each is one line below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Config = Mapping[str, Any]
# A linear map as (inputs, outputs).
Edge = tuple[int, int]

_QKV_BIAS_ALWAYS = ("qwen2",)
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3")
_WHOLE_HEAD_NORMS = ("olmo2", "olmo3")
# Those that are not counted otherwise.
_OTHER_HEAD_NORMS = (
    "apertus", "exaone4", "exaone_moe", "flex_olmo", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "nanochat", "olmoe",
)  # fmt: skip
_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3", "glm4")
_NORM_AFTER_MLP = (*_FOUR_NORMS, "olmo2", "olmo3")
# What a norm's weight is multiplied with is rounded afterwards, not before.
_NORMS_IN_FP32 = (
    "flex_olmo", "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "helium", "olmo2", "olmo3", "vaultgemma",
)  # fmt: skip
# Norms that take the mean off, each step of it an operation.
_CENTRED = ("cohere", "cohere2", "cohere2_moe")
# Attention and MLP take the output of the same norm.
_ONE_NORM = (*_CENTRED, "phi")
# Norms and linear maps with biases, and an MLP without a gate.
PLAIN = ("starcoder2", "gpt2", "gpt_bigcode")
# An MLP of two maps, whatever else.
_UNGATED = (*PLAIN, "apertus", "arcee", "biogpt", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi")
# Every so many layers one attends to everything, where a config does not say which: the last of so many, or the first.
_FULL_LAST = {
    "afmoe": 4, "cohere2": 4, "cohere2_moe": 4, "exaone4": 4, "exaone_moe": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6,
    "gemma4": 6, "gemma4_text": 6, "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2,
}  # fmt: skip
_FULL_FIRST = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4, "modernbert-decoder": 3}
# Families that slide only where their config says so.
_SLIDE_IF_TOLD = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
_EXPERTS_OF_FULL_WIDTH = ("mixtral", "gpt_oss")


class Wants(NamedTuple):
    """Which linear maps of a layer want their input in backward: those with a weight, or an adapter, that is trained."""

    queries: bool = True
    projection: bool = True
    mlp: bool = True
    down: bool = True


EVERY = Wants()


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Parameters of one layer, and what a token meets there.

    `width`: intermediate values of a token, over all experts it visits. `active`: MLP parameters it meets.
    `linear_edges`: inputs + outputs of all linear modules, what a LoRA of rank 1 would add. `normed`: values of a token
    that norms inside attention take: of queries and keys, or of what those are made from. `last`: MLP parameters whose
    product only the residual stream takes, so that no gradient needs its value. `sandwiched`: what attention and MLP
    give is normed too, beside what they take. `one_norm`: both take the output of one norm. `norms_in_fp32`: to the
    product with their weight. `centred`: they take the mean off by hand. `adapted`: a token's values that go into
    adapters, of attention and MLP. `wants`: which maps want their input.
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
    wants: Wants = EVERY

    @property
    def parameters(self) -> int:
        return self.attention + self.mlp + self.norms


def layer_sizes(config: Config, index: int, key_size: int, value_size: int) -> LayerSizes:
    """Layer `index` of the model that `config` describes."""
    kind = str(config.get("model_type", ""))
    hidden = int(config["hidden_size"])
    edges, extras = _attention(config, key_size, value_size)
    block = _experts(config) if _has_experts(config, index) else _dense(config, int(config["intermediate_size"]))
    return LayerSizes(
        attention=_weights(edges) + extras,
        mlp=block.parameters,
        norms=hidden * (4 if kind in (*_FOUR_NORMS, *PLAIN) else 2),
        width=block.width,
        active=block.active,
        gated=kind not in _UNGATED,
        experts=block.experts,
        experts_per_token=block.per_token,
        window=window_of(config, index),
        linear_edges=sum(map(sum, edges)) + sum(map(sum, block.edges)),
        normed=_normed(config, key_size),
        last=0 if block.experts or kind in _NORM_AFTER_MLP else block.width * hidden,
        sandwiched=kind in _FOUR_NORMS,
        one_norm=kind in _ONE_NORM,
        norms_in_fp32=kind in (*_NORMS_IN_FP32, *_CENTRED),
        centred=kind in _CENTRED,
    )


def _normed(config: Config, key: int) -> int:
    if config.get("kv_lora_rank") is not None:
        return int(config["kv_lora_rank"]) + int(config.get("q_lora_rank") or 0)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    has = str(config.get("model_type", "")) in (*_HEAD_NORMS, *_WHOLE_HEAD_NORMS, *_OTHER_HEAD_NORMS)
    return (heads + kv_heads) * key if has else 0


def window_of(config: Config, index: int) -> int | None:
    """The sliding window of layer `index`, None where it attends to everything before."""
    window = config.get("sliding_window")
    types, kind = config.get("layer_types"), str(config.get("model_type", ""))
    if not window or not config.get("use_sliding_window", bool(types) or kind not in _SLIDE_IF_TOLD):
        return None
    if types:
        slides = types[index] == "sliding_attention"
    elif kind in _FULL_LAST:
        slides = (index + 1) % int(config.get("sliding_window_pattern") or _FULL_LAST[kind]) != 0
    elif kind in _FULL_FIRST:
        slides = index % _FULL_FIRST[kind] != 0
    else:
        slides = kind not in _SLIDE_IF_TOLD or index >= int(config.get("max_window_layers", 28) or 0)
    return int(window) if slides else None


@dataclass(frozen=True, slots=True)
class _Block:
    parameters: int
    active: int
    width: int
    edges: tuple[Edge, ...]
    experts: int = 0
    per_token: int = 0


def _weights(edges: tuple[Edge, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in edges)


def _attention(config: Config, key: int, value: int) -> tuple[tuple[Edge, ...], int]:
    """The linear maps of attention, and its parameters beside them: biases, norms, sinks."""
    kind = str(config.get("model_type", ""))
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", kind == "gpt_oss"))
    if config.get("kv_lora_rank") is not None:
        return _latent_attention(config, key, value, bias=bias)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    outputs = (heads * key, kv_heads * key, kv_heads * value)
    edges = (*((hidden, out) for out in outputs), (heads * value, hidden))
    if kind in PLAIN:
        bias = bool(config.get("use_bias", True))
    qkv_bias = bias or kind in _QKV_BIAS_ALWAYS or bool(config.get("qkv_bias", kind == "qwen2_moe"))
    extras = sum(outputs) * qkv_bias + hidden * bias
    extras += 2 * key if kind in _HEAD_NORMS else 0
    extras += outputs[0] + outputs[1] if kind in _WHOLE_HEAD_NORMS else 0
    extras += heads if kind == "gpt_oss" else 0
    return edges, extras


def _latent_attention(config: Config, key: int, value: int, *, bias: bool) -> tuple[tuple[Edge, ...], int]:
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


def _dense(config: Config, width: int) -> _Block:
    kind, hidden = str(config.get("model_type", "")), int(config["hidden_size"])
    edges: tuple[Edge, ...] = (*([(hidden, width)] * (1 if kind in _UNGATED else 2)), (width, hidden))
    bias = bool(config.get("use_bias", True)) if kind in PLAIN else bool(config.get("mlp_bias"))
    count = _weights(edges) + bias * sum(outputs for _, outputs in edges)
    return _Block(count, count, width, edges)


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
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return int(next((config[key] for key in keys if config.get(key)), 0))


def _experts(config: Config) -> _Block:
    kind, hidden = str(config.get("model_type", "")), int(config["hidden_size"])
    count = _expert_count(config)
    per_token = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or config.get("moe_k") or 1)
    full = kind in _EXPERTS_OF_FULL_WIDTH or not config.get("moe_intermediate_size")
    width = int(config["intermediate_size"] if full else config["moe_intermediate_size"])
    expert = 3 * hidden * width + (2 * width + hidden if kind == "gpt_oss" else 0)
    router = count * hidden + (count if kind == "gpt_oss" else 0)
    shared_width = int(
        config.get("shared_expert_intermediate_size")
        or width * int(config.get("n_shared_experts") or config.get("moe_num_shared_experts") or 0)
    )
    edges: tuple[Edge, ...] = ()
    if shared_width:
        edges = ((hidden, shared_width), (hidden, shared_width), (shared_width, hidden))
    if shared_width and config.get("shared_expert_intermediate_size"):
        edges = (*edges, (hidden, 1))
    always = router + _weights(edges)
    return _Block(
        parameters=count * expert + always,
        active=per_token * expert + always,
        width=per_token * width + shared_width,
        edges=edges,
        experts=count,
        per_token=per_token,
    )
