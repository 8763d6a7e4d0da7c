"""The user's model, cut until it runs beside itself: fewer layers, the same widths and the same code.

At least one layer of every kind stays (sliding and full attention, dense and experts, with and without RoPE). Windows
are shortened until they matter within the sample, and dropout is off. A model that is still large loses most of its
vocabulary, then all but one layer of each kind, then fp64 for fp32. `Subject.notes` lists what was cut; a model that
still does not fit into memory is refused.

Invariant: `Subject.build` returns the same weights on every rank and on every call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ithaca.config.schema import LoraSettings
from ithaca.constants import GIB
from ithaca.errors import ConfigError, UnsupportedError
from ithaca.models.discover.roles import shapes
from ithaca.models.files.pretrained import add_adapters, build_causal
from ithaca.models.support import decoder_layers
from ithaca.verify.small_models.features import build as build_random

LEAST_LAYERS = 2
# With more weights a step over the CPU's links takes tens of seconds.
LARGE = 100_000_000
# Looking up and training 4,096 tokens of vocabulary runs the same code as any other number.
SMALL_VOCABULARY = 4096
# Copies of the weights while verifying: one a rank before it is sharded, the whole one with its gradients, and the
# shards of weights, gradients and two moments.
_COPIES = 6
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Large enough that an adapter moves the logits, small enough that the model computes as before.
_ADAPTER_STD = 0.05


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is verified. `folder`: the source of its weights; None for random ones.

    `lora`: the run's adapters, drawn from `seed`, with the base frozen; None if all weights are trained.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    folder: Path | None
    notes: tuple[str, ...]
    lora: LoraSettings | None = None
    seed: int = 0

    @property
    def exact(self) -> bool:
        """True if the model is in fp64, and computed in fp64 throughout."""
        return self.dtype == torch.float64

    def build(self) -> PreTrainedModel:
        """Return the whole model on the host, in training mode; with adapters, the PEFT model around it."""
        model = build_random(self.config, dtype=self.dtype) if self.folder is None else self._load()
        return model if self.lora is None else with_adapters(model, self.lora, seed=self.seed)

    def _load(self) -> PreTrainedModel:
        config = copy.deepcopy(self.config)
        config._experts_implementation = "eager"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.folder, config=config, dtype=self.dtype, attn_implementation="eager", trust_remote_code=False
        )
        return model.train()


def make_subject(
    config: PreTrainedConfig,
    *,
    length: int,
    ranks: int,
    memory: int,
    layers: int | None = None,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float64,
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> Subject:
    """Cut `config` for a sample of `length` tokens on `ranks` ranks that share `memory` bytes.

    `layers`: how many to keep. `folder`: use its weights if the kept layers are its first ones and the vocabulary is whole.
    """
    cut, are_first, notes = cut_layers(config, layers)
    text = cut.get_text_config()
    if _count_weights(cut) > LARGE and text.vocab_size > SMALL_VOCABULARY:
        notes.append(f"{SMALL_VOCABULARY:,} of {text.vocab_size:,} tokens of vocabulary")
        _cut_vocabulary(text, SMALL_VOCABULARY)
    if _count_weights(cut) > LARGE and layers is None:
        vocabulary_notes = notes[1:]
        cut, are_first, notes = cut_layers(config, least=1)
        notes += vocabulary_notes
        text = cut.get_text_config()
        _cut_vocabulary(text, min(text.vocab_size, SMALL_VOCABULARY))
    if _count_weights(cut) > LARGE and dtype == torch.float64:
        dtype = torch.float32
        notes.append("fp32, because fp64 would take long")
    notes += _shorten_windows(text, length)
    needed = _count_weights(cut) * dtype.itemsize * (ranks + _COPIES)
    if needed > memory:
        raise UnsupportedError(
            f"{text.num_hidden_layers} layers of this model need about {needed / GIB:.1f} GiB to be verified and "
            f"{memory / GIB:.1f} GiB are free: use fewer ranks (--sp), or a machine with more memory"
        )
    if not are_first or text.vocab_size != config.get_text_config().vocab_size:
        folder = None
    notes.append("random weights" if folder is None else "weights of the folder")
    if lora is not None:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        notes.append(f"LoRA of rank {lora.rank} on {targets}, B drawn, all else frozen")
        notes += [f"lora.dropout 0 for {lora.dropout:g}"] if lora.dropout else []
    return Subject(cut, dtype, folder, tuple(notes), lora, seed)


def cut_layers(
    config: PreTrainedConfig, layers: int | None = None, *, least: int = LEAST_LAYERS
) -> tuple[Any, bool, list[str]]:
    """Return a config with few layers, True if they are the model's first ones, and notes on what was cut.

    Keep the first layer of each kind if lists in the config describe each layer; else the first layers, until every kind
    is among them.
    """
    text = config.get_text_config()
    whole = int(text.num_hidden_layers)
    lists = _layer_lists(text)
    kinds = _layer_kinds(config, lists)
    if not kinds:
        raise UnsupportedError(
            f"{config.model_type}: no causal language model of it can be built here: verify the folder of its language "
            "model alone"
        )
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if layers is not None and not len(firsts) <= layers <= whole:
        raise ConfigError(
            f"--layers {layers}: this model has {whole} layers of {len(firsts)} kind{'s' * (len(firsts) > 1)}, and one of "
            f"each is needed; use {len(firsts)} to {whole}"
        )
    count = min(whole, max(layers or least, len(firsts)))
    chosen = sorted([*firsts, *[i for i in range(whole) if i not in firsts][: count - len(firsts)]])
    for kept in (chosen, list(range(max(firsts) + 1)), list(range(whole))):
        for cut in _configs_with_layers(config, lists, kept):
            if _layer_kinds(cut, lists) == [kinds[i] for i in kept]:
                notes = [f"{len(kept)} of {whole} layers"] if len(kept) < whole else []
                return cut, kept == list(range(len(kept))), notes
    raise UnsupportedError(f"{config.model_type}: its layers cannot be cut; verify it whole with --layers {whole}")


def _layer_lists(text: Any) -> list[str]:
    """Return the names of settings that have a value for every layer."""
    named = {key: value for key, value in vars(text).items() if key not in ("architectures", *_TOKENS)}
    return [key for key, value in named.items() if isinstance(value, list) and len(value) == text.num_hidden_layers]


def _configs_with_layers(config: PreTrainedConfig, lists: list[str], kept: list[int]) -> Iterator[PreTrainedConfig]:
    """Yield configs that may describe exactly the layers `kept`; the caller checks."""
    for dense in (None, 1):
        cut = copy.deepcopy(config)
        text = cut.get_text_config()
        for key in lists:
            setattr(text, key, [getattr(text, key)[i] for i in kept])
        text.num_hidden_layers = len(kept)
        if dense is not None and getattr(text, "first_k_dense_replace", None):
            text.first_k_dense_replace = dense
        yield cut


def _layer_kinds(config: PreTrainedConfig, lists: list[str]) -> list[Any]:
    """Return the kind of each layer: shapes of its weights, settings of its modules, its values in the config's lists.

    An empty list means that no model can be built, or that the lists describe other layers (of an image tower, say).
    """
    try:
        layers = decoder_layers(empty_of(config))
    except (UnsupportedError, ValueError, IndexError, KeyError, TypeError):
        return []
    text = config.get_text_config()
    values = [[str(value) for value in getattr(text, key)] for key in lists]
    if any(len(each) != len(layers) for each in values):
        return []
    return [(shapes(layer), _settings(layer), tuple(each[i] for each in values)) for i, layer in enumerate(layers)]


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """Return windows, scales and switches of a layer's modules, without the layer's own number."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and not key.startswith("_") and "idx" not in key and "layer" not in key
    )


def empty_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device, at no cost; the config stays unchanged."""
    with torch.device("meta"):
        return build_causal(copy.deepcopy(config))


def _count_weights(config: PreTrainedConfig) -> int:
    return sum(p.numel() for p in empty_of(config).parameters())


def _shorten_windows(text: Any, length: int) -> list[str]:
    """Set windows to a third of the sample at most and dropout to 0; return notes on both."""
    notes = []
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window > length // 3:
        text.sliding_window = length // 3
        notes.append(f"window {length // 3} for {window}")
    for key, value in list(vars(text).items()):
        # Attention's own dropout stays, for `parallelize` to refuse.
        noise = ("drop" in key and "att" not in key) or key.endswith("jitter_noise")
        if noise and isinstance(value, float) and value > 0:
            setattr(text, key, 0.0)
            notes.append(f"{key} 0 for {value:g}")
    return notes


def _cut_vocabulary(text: Any, size: int) -> None:
    text.vocab_size = size
    for key in _TOKENS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value >= size:
            setattr(text, key, None)


def with_adapters(model: PreTrainedModel, lora: LoraSettings, *, seed: int) -> PreTrainedModel:
    """Return the PEFT model around `model`, its adapters in the same dtype and drawn from `seed`."""
    dtype = next(model.parameters()).dtype
    # Two processes draw different numbers, so dropout is off.
    adapted: Any = add_adapters(model, lora.model_copy(update={"dropout": 0.0}), seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            # A fresh adapter's B is zero, and so are all gradients of its A: there would be nothing to compare.
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _ADAPTER_STD)
    return cast(PreTrainedModel, adapted.train())


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def load_adapters(plain: Any, folder: Path) -> Any:
    """Return a copy of `plain` with the adapters of `folder`, loaded by peft itself."""
    from peft import PeftModel

    base = copy.deepcopy(plain).unload()
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True, autocast_adapter_dtype=False)
