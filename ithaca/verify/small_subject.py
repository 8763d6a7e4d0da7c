"""The user's model, made small enough to be run beside itself: fewer layers, the same widths and the same code.

Of every kind of layer (sliding and full attention, dense and experts, with and without RoPE) at least one stays.
Windows are shortened so that they bite within the sample, dropout is off. Of a model that is large even so the
vocabulary is cut, then layers down to one of each kind, then fp64 to fp32. What was cut is told; what still does not
fit into memory is refused.

Invariant: `Subject.build` gives the same weights on every rank and on every call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ithaca.config.schema import LoraSettings
from ithaca.constants import GIB
from ithaca.errors import ConfigError, UnsupportedError
from ithaca.models.discover.roles import shapes
from ithaca.models.files.pretrained import build_causal
from ithaca.models.support import decoder_layers
from ithaca.verify.adapters import adapted, notes_on
from ithaca.verify.small_models.features import build as build_random

LEAST_LAYERS = 2
# Weights beyond which a step over the CPU's links takes tens of seconds.
LARGE = 100_000_000
# Four thousand tokens of vocabulary are looked up and learned like any other number of them.
SMALL_VOCABULARY = 4096
# Copies of the weights while verifying: one a rank before it is cut, the whole one with its gradients, and the shards
# of weights, gradients and two moments.
_COPIES = 6
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is verified. `folder`: where its weights are read from; None for random ones.

    `lora`: the run's adapters, drawn from `seed`, all else frozen; None where all weights are trained.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    folder: Path | None
    notes: tuple[str, ...]
    lora: LoraSettings | None = None
    seed: int = 0

    @property
    def exact(self) -> bool:
        """Whether it is in fp64, and to be computed in fp64 throughout."""
        return self.dtype == torch.float64

    def build(self) -> PreTrainedModel:
        """Whole, on the host, in training mode; with adapters, the PEFT model around it."""
        plain = self._plain()
        return plain if self.lora is None else adapted(plain, self.lora, seed=self.seed)

    def _plain(self) -> PreTrainedModel:
        if self.folder is None:
            return build_random(self.config, dtype=self.dtype)
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
    room: int,
    layers: int | None = None,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float64,
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> Subject:
    """Cut `config` for a sample of `length` tokens on `ranks` ranks that share `room` bytes.

    `layers`: how many to keep. `folder`: take its weights where what is kept are the first layers of a whole vocabulary.
    `lora` and `seed`: the adapters of the run.
    """
    cut, first, notes = cut_layers(config, layers)
    text = cut.get_text_config()
    if _weights(cut) > LARGE and text.vocab_size > SMALL_VOCABULARY:
        notes.append(f"{SMALL_VOCABULARY:,} of {text.vocab_size:,} tokens of vocabulary")
        _cut_vocabulary(text, SMALL_VOCABULARY)
    if _weights(cut) > LARGE and layers is None:
        kept = notes[1:]
        cut, first, notes = cut_layers(config, least=1)
        notes += kept
        text = cut.get_text_config()
        _cut_vocabulary(text, min(text.vocab_size, SMALL_VOCABULARY))
    if _weights(cut) > LARGE and dtype == torch.float64:
        dtype = torch.float32
        notes.append("fp32, because fp64 would take long")
    notes += _quieten(text, length)
    needed = _weights(cut) * dtype.itemsize * (ranks + _COPIES)
    if needed > room:
        raise UnsupportedError(
            f"{text.num_hidden_layers} layers of this model need about {needed / GIB:.1f} GiB to be verified and "
            f"{room / GIB:.1f} GiB are free: use fewer ranks (--sp), or a machine with more memory"
        )
    own = folder is not None and first and _same_vocabulary(config, cut)
    notes.append("weights of the folder" if own else "random weights")
    if lora is not None:
        notes += notes_on(lora)
    return Subject(cut, dtype, folder if own else None, tuple(notes), lora, seed)


def cut_layers(
    config: PreTrainedConfig, layers: int | None = None, *, least: int = LEAST_LAYERS
) -> tuple[Any, bool, list[str]]:
    """A copy with few layers, whether those are the model's first ones, and a note of what was cut.

    The first layer of each kind where lists in the config say what each layer is, else as many of the first layers
    as it takes to have every kind.
    """
    text = config.get_text_config()
    whole = int(text.num_hidden_layers)
    lists = _lists(text)
    kinds = _kinds(config, lists)
    if not kinds:
        raise UnsupportedError(
            f"{config.model_type}: no causal language model of it can be built here: verify the folder of its language "
            "model alone"
        )
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if layers is not None and not len(firsts) <= layers <= whole:
        raise ConfigError(
            f"--layers {layers}: this model has {whole} layers of {len(firsts)} kind{'s' * (len(firsts) > 1)}, and one of "
            "each is needed; "
            f"use {len(firsts)} to {whole}"
        )
    count = min(whole, max(layers or least, len(firsts)))
    chosen = sorted([*firsts, *[i for i in range(whole) if i not in firsts][: count - len(firsts)]])
    for keep in (chosen, list(range(max(firsts) + 1)), list(range(whole))):
        for cut in _with_layers(config, lists, keep):
            if _kinds(cut, lists) == [kinds[i] for i in keep]:
                note = [f"{len(keep)} of {whole} layers"] if len(keep) < whole else []
                return cut, keep == list(range(len(keep))), note
    raise UnsupportedError(f"{config.model_type}: its layers cannot be cut; verify it whole with --layers {whole}")


def _lists(text: Any) -> list[str]:
    """Settings that say something of every layer."""
    named = {key: value for key, value in vars(text).items() if key not in ("architectures", *_TOKENS)}
    return [key for key, value in named.items() if isinstance(value, list) and len(value) == text.num_hidden_layers]


def _with_layers(config: PreTrainedConfig, lists: list[str], keep: list[int]) -> Iterator[PreTrainedConfig]:
    """Configs that may have just the layers `keep`; the caller looks whether they do."""
    for dense in (None, 1):
        cut = copy.deepcopy(config)
        text = cut.get_text_config()
        for key in lists:
            setattr(text, key, [getattr(text, key)[i] for i in keep])
        text.num_hidden_layers = len(keep)
        if dense is not None and getattr(text, "first_k_dense_replace", None):
            text.first_k_dense_replace = dense
        yield cut


def _kinds(config: PreTrainedConfig, lists: list[str]) -> list[Any]:
    """What each layer is: its weights' names and shapes, its settings, and what lists in the config say of it; nothing
    where no model can be built of it, or one with other layers than those (of a picture's, say)."""
    try:
        layers = decoder_layers(empty_of(config))
    except (UnsupportedError, ValueError, IndexError, KeyError, TypeError):
        return []
    text = config.get_text_config()
    said = [[str(one) for one in getattr(text, key)] for key in lists]
    if any(len(one) != len(layers) for one in said):
        return []
    return [(shapes(layer), _settings(layer), tuple(one[i] for one in said)) for i, layer in enumerate(layers)]


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """Windows, scales and switches of a layer, but for its number."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and not key.startswith("_") and "idx" not in key and "layer" not in key
    )


def empty_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Its model on the meta device, at no cost; the config is left alone."""
    with torch.device("meta"):
        return build_causal(copy.deepcopy(config))


def _weights(config: PreTrainedConfig) -> int:
    return sum(p.numel() for p in empty_of(config).parameters())


def _quieten(text: Any, length: int) -> list[str]:
    """Windows that bite, and no dropout: attention's own is left for `parallelize` to refuse."""
    notes = []
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window > length // 3:
        text.sliding_window = length // 3
        notes.append(f"window {length // 3} for {window}")
    for key, value in list(vars(text).items()):
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


def _same_vocabulary(config: PreTrainedConfig, cut: PreTrainedConfig) -> bool:
    return config.get_text_config().vocab_size == cut.get_text_config().vocab_size
