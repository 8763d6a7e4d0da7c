"""Properties of an architecture that its source shows, before anything runs.

    static_cause(read_source("mamba"))     ("state", "MambaMixer layers carry a state from token to token ...")
    static_cause(read_source("llama"))     None: measure it

`read_source` reads the modeling file and the config class of a causal-LM type. `static_cause` returns the first property
that rules exactness out. `CAUSES` also holds the causes that only a measurement shows: every refusal has a heading and a
sentence there.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Arguments of a forward that are not tokens: images, audio, states of another model.
_OTHER_INPUTS = {
    "pixel_values", "image_pixel_values", "image_patches", "input_features", "audio_input_features",
    "cross_attention_states", "shared_kv_states",
}  # fmt: skip
_STATE = re.compile(
    r"^class (\w*Mixer|Rwkv\w*Attention|xLSTMModel|\w+DeltaNet|\w+DeltaAttention|\w+ShortConv(?:olution)?"
    r"|\w+RecurrentBlock|\w+LightningAttention|\w+CCAProjection|\w+MambaLayer)\(",
    re.M,
)
_CHOOSES_KEYS = re.compile(r"^class (\w+Indexer|\w+Compressor)\(|\b(block_indices)=\w+,", re.M)
_PATCHES = re.compile(r"^class (\w+Patcher)\(", re.M)
_EXPERTS = re.compile(r"^class \w*(?:Experts?|MoE|Moe|MoeBlock|MOE)\(", re.M)


@dataclass(frozen=True, slots=True)
class Cause:
    """Reason for refusing architectures: the heading of their table, and the sentence in the user's error."""

    heading: str
    sentence: str


CAUSES = {
    "other inputs": Cause(
        "It reads more than text",
        "it takes images, audio or the states of another model beside its tokens, which cannot be cut like them; where "
        "its text part has a model type of its own, that one may be exact",
    ),
    "state": Cause(
        "A state runs along the sequence",
        "{what} layers carry a state from token to token (state space, linear attention, convolution over tokens): on "
        "every shard but the first they would start from nothing",
    ),
    "chosen keys": Cause(
        "It attends to keys it chooses or makes itself",
        "an indexer or compressor ({what}) chooses or makes the keys of each query from the whole sequence, and it would "
        "see one shard only",
    ),
    "patches": Cause(
        "Tokens grouped into patches",
        "{what} groups bytes into patches along the whole sequence, and the layers above run over patches, not tokens",
    ),
    "chunks": Cause(
        "Attention in chunks",
        "its chunked attention layers keep to blocks of attention_chunk_size tokens, and that limit lives in the mask "
        "alone: it never reaches the attention function",
    ),
    "decoder half": Cause(
        "The decoder half of an encoder-decoder model",
        "its positions are counted from the start of what it is given, not taken from position_ids, so every shard would "
        "begin at position 0; and its loss takes labels that are already shifted",
    ),
    "alibi": Cause(
        "ALiBi in attention of its own",
        "attention is computed in its own code, with ALiBi biases, and not through transformers' attention interface, so "
        "there is nowhere to put the exchange",
    ),
    "own attention": Cause(
        "Attention in code of its own",
        "attention is computed in its own code and not through transformers' attention interface, so there is nowhere to "
        "put the exchange",
    ),
    "bias": Cause(
        "A bias or mask of its own in attention",
        "its attention adds {what} to the scores, which would have to be built for the whole sequence",
    ),
    "window in the mask": Cause(
        "A window that lives in the mask alone",
        "its sliding window never reaches the attention function, so it would be dropped without a word",
    ),
    "mask positions": Cause(
        "Positions counted from the padding mask",
        "where no position_ids are given it counts positions from the attention mask, so a left-padded row has other "
        "positions than its place in the row says",
    ),
    "token positions": Cause(
        "Positions counted from the tokens",
        "its positions start behind padding_idx and skip padding tokens, so they are not the position_ids of a row",
    ),
    "tied embeddings": Cause(
        "Tied embeddings that FSDP2 cannot take",
        "its embeddings are both tied to the head and a block of their own, and FSDP2 cannot put one weight into two groups",
    ),
    "router loss": Cause(
        "A router loss that is not computed here",
        "the auxiliary loss of its router is set up in a way of its own, which the loss over shards does not follow",
    ),
    "not finite": Cause(
        "Gradients that are not finite on padding",
        "the gradients of a token of padding are not finite (a standard deviation of zeros), and rows are padded to a "
        "multiple of the ranks",
    ),
    "measured": Cause("Measured, and not exact", "{what}"),
    "no run": Cause("No parity run", "no parity run: {what}"),
}


@dataclass(frozen=True, slots=True)
class ArchitectureSource:
    """Source of an architecture: class name, text of the modeling file, arguments of the forward."""

    kind: str
    cls: str
    text: str
    inputs: frozenset[str]
    encoder_decoder: bool

    @property
    def routes(self) -> bool:
        """True if attention goes through transformers' attention interface."""
        return "ALL_ATTENTION_FUNCTIONS" in self.text

    @property
    def experts(self) -> bool:
        """True if the modeling file has classes for experts."""
        return bool(_EXPERTS.search(self.text))


def kinds() -> list[str]:
    """Return every causal-LM model type of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def aliases(kind: str) -> list[str]:
    """Return the model_type of a multimodal kind's text model, if it differs from every causal-LM type."""
    config = _class(kind).config_class
    return [config.model_type] if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else []


def read_source(kind: str) -> ArchitectureSource:
    """Return the source of `kind`: its class, modeling file and config class."""
    cls = _class(kind)
    text = inspect.getsource(sys.modules[cls.__module__])
    inputs = frozenset(inspect.signature(cls.forward).parameters)
    encoder_decoder = bool(getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))
    return ArchitectureSource(kind, cls.__name__, text, inputs, encoder_decoder)


def static_cause(source: ArchitectureSource) -> tuple[str, str] | None:
    """Return the cause for refusal that the source shows, and its sentence; None if only a run can decide."""
    cause, what = _find_cause(source)
    return (cause, sentence(cause, what)) if cause else None


def sentence(cause: str, what: str) -> str:
    """Return the sentence of a cause; `what` names the part of the architecture that is not exact."""
    return CAUSES[cause].sentence.format(what=what)


def _class(kind: str) -> Any:
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def _find_cause(source: ArchitectureSource) -> tuple[str, str]:
    for cause, pattern in (("state", _STATE), ("patches", _PATCHES), ("chosen keys", _CHOOSES_KEYS)):
        found = pattern.search(source.text)
        if found:
            return cause, next(filter(None, found.groups()))
    if source.cls.endswith("ForConditionalGeneration") or source.inputs & _OTHER_INPUTS:
        return "other inputs", ""
    if "create_chunked_causal_mask" in source.text:
        return "chunks", ""
    if source.encoder_decoder or ("position_ids" not in source.inputs and source.routes):
        return "decoder half", ""
    if not source.routes:
        return ("alibi" if "alibi" in source.text.lower() else "own attention"), ""
    return "", ""
