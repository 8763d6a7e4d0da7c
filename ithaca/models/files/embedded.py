"""The embedded model: a Llama of a million parameters that reads bytes, made on the spot.

It is what `ithaca train` trains when it is told nothing: no download, small enough for two CPU cores, and yet a
whole Hugging Face folder with a tokenizer and a chat template. A token is a byte; the tokens above 255 are `SPECIALS`.

Invariant: the same folder, bit for bit, on every call; whole or not there, whoever else writes it at the same time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDED = "embedded"
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END = SPECIALS = (
    "<|pad|>",
    "<|begin|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
SEED = 1729
# Every turn is `<|role|>text<|end|>`; what the model says, its end among it, is marked for the loss.
TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens 0 to 255, then the special ones; a document begins with `<|begin|>`."""
    vocabulary = {letter: number for number, letter in enumerate(_byte_letters())}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Cut into words first: nothing is ever merged, and a whole document as one word takes minutes.
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL, END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def embedded_config() -> LlamaConfig:
    """About a million parameters, most of them in the layers; 8 heads, so that sp may be 8."""
    ids = {token: 256 + place for place, token in enumerate(SPECIALS)}
    return LlamaConfig(
        vocab_size=256 + len(SPECIALS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
    )


def build_embedded(folder: Path) -> Path:
    """Write the model and its tokenizer to `folder` unless they are there; many processes may call it at once."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    shows = logging.is_progress_bar_enabled()
    try:
        # A bar for a file of four megabytes tells nobody anything.
        logging.disable_progress_bar()
        _random_model().save_pretrained(made)
        embedded_tokenizer().save_pretrained(made)
        _move(made, folder)
    finally:
        if shows:
            logging.enable_progress_bar()
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _random_model() -> PreTrainedModel:
    # Deferred: who needs the tokenizer alone shall not wait for the models' code.
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return LlamaForCausalLM(embedded_config())


def _move(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        # Another process was first, with the same content; anything else that is in the way stays and is told.
        if not (folder / "config.json").is_file():
            raise


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]
