"""Sizes of a model, from its config alone: widths, heads, and parameters layer by layer.

    ModelSizes.from_config(json.load(open("config.json"))).total        8_030_261_248

Counts of parameters are exact to a percent for the types that `architectures.json` marks as `counted`. Other types are
counted as a Llama of the same widths, which may be off by half: `models/planner/counted_sizes.py` builds their modules
and counts those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ithaca.errors import UnsupportedError
from ithaca.heads import HeadSplit, split_heads
from ithaca.planning.model.architectures import facts_of
from ithaca.planning.model.config_names import common_config, layer_config, widest
from ithaca.planning.model.layer_parameters import LayerSizes, layer_sizes

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of one causal language model.

    `key_size`: the head size D of queries and keys. `value_size`: E of values. `final_norm`: parameters of the last norm
    and of learned positions. `adapters`: trained parameters if the rest is frozen, 0 if all are trained; of those,
    `beside` are outside the layers, `in_place` are weights of the model itself, and `trained_head` are in the head.
    `linked`: each layer's input is the output of the layer before, so that a replay can rebuild it from there.
    `kv_stores`: layers whose keys and values later layers use.

    Derived: `kinds` has an equal number for equal layers, so that a search over thousands of plans computes each kind
    once. `layers_trainable`: trained parameters of each layer. `widest`: the most intermediate values of a token in any
    layer's MLP.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerSizes, ...]
    final_norm: int
    adapters: int = 0
    beside: int = 0
    in_place: int = 0
    trained_head: int = 0
    linked: bool = True
    kv_stores: int = 0
    kinds: tuple[int, ...] = field(init=False, compare=False, repr=False)
    layer_parameters: int = field(init=False, compare=False, repr=False)
    layers_trainable: tuple[int, ...] = field(init=False, compare=False, repr=False)
    largest_layer: int = field(init=False, compare=False, repr=False)
    widest: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        numbers: dict[LayerSizes, int] = {}
        kinds = tuple(numbers.setdefault(layer, len(numbers)) for layer in self.layers)
        object.__setattr__(self, "kinds", kinds)
        counts = [layer.parameters for layer in self.layers]
        object.__setattr__(self, "layer_parameters", sum(counts))
        trained = (self._layer_adapters,) * len(counts) if self.adapters else tuple(counts)
        object.__setattr__(self, "layers_trainable", trained)
        object.__setattr__(self, "largest_layer", max(counts) + self._layer_adapters)
        object.__setattr__(self, "widest", max((3 if each.gated else 2) * each.width for each in numbers))

    @classmethod
    def from_config(cls, config: Config) -> ModelSizes:
        """Return the sizes of the model, or of a multimodal model's text model, that `config` describes."""
        config = common_config(config)
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if missing := [key for key in needed if not config.get(key)]:
            raise UnsupportedError(
                f"the config has no {', '.join(missing)}: a causal language model's config.json is needed"
            )
        kind = str(config.get("model_type", ""))
        facts = facts_of(kind)
        layers = range(int(config["num_hidden_layers"]))
        config, configs = widest(config), [layer_config(config, index) for index in layers]
        heads = int(config["num_attention_heads"])
        key, value = _head_sizes(config)
        latent = config.get("kv_lora_rank") is not None
        tied = config.get("tie_word_embeddings")
        positions = int(config["max_position_embeddings"]) if facts.learned_positions else 0
        return cls(
            name=kind,
            hidden=int(config["hidden_size"]),
            heads=heads,
            # Latent attention makes keys and values for every head.
            kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
            key_size=key,
            value_size=value,
            vocabulary=int(config["vocab_size"]),
            tied=facts.tied if tied is None else bool(tied),
            layers=tuple(
                layer_sizes(own, index, *_head_sizes(own)) for index, own in zip(layers, configs, strict=True)
            ),
            final_norm=int(config["hidden_size"]) * ((2 if facts.biased else 1) + positions),
            linked=facts.linked,
            # Later layers use the keys and values of the last unshared layer of their own kind.
            kv_stores=len(set(config.get("layer_types") or ())) if config.get("num_kv_shared_layers") else 0,
        )

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Return the output head's own parameters: 0 if the head is the embedding."""
        return 0 if self.tied else self.embedding

    @property
    def root(self) -> int:
        """Return the number of parameters outside the decoder layers."""
        return self.embedding + self.head + self.final_norm

    @property
    def total(self) -> int:
        return self.root + self.layer_parameters + self.adapters - self.in_place

    @property
    def trainable(self) -> int:
        return self.adapters or self.total

    @property
    def trainable_share(self) -> float:
        return self.trainable / self.total

    @property
    def head_trainable(self) -> int:
        """Return the number of head parameters that get a gradient from the loss."""
        return self.trained_head if self.adapters else self.head or self.embedding

    def split(self, sp: int) -> HeadSplit:
        """Return the heads of every rank in attention."""
        return split_heads(self.heads, self.kv_heads, sp)

    @property
    def _layer_adapters(self) -> int:
        return (self.adapters - self.beside) // len(self.layers)

    def with_lora(self, rank: int) -> ModelSizes:
        """Return the sizes with all weights frozen and adapters of `rank` on every linear layer, without fused experts."""
        if rank < 1:
            raise UnsupportedError(f"LoRA of rank {rank}: a rank of at least 1 is needed")
        return replace(self, adapters=rank * sum(layer.linear_edges for layer in self.layers))


def _head_sizes(config: Config) -> tuple[int, int]:
    if config.get("kv_lora_rank") is not None:
        return int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"]), int(config["v_head_dim"])
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return size, size
