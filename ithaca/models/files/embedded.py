"""The embedded model: a Llama of a million parameters whose tokens are bytes, written to a folder when needed.

`ithaca train` without a run file trains this model: it needs no download and two CPU cores, and is a whole Hugging Face
folder with a tokenizer and a chat template. Tokens 0 to 255 are bytes; the tokens above are `SPECIALS`.

Invariant: every call makes the same folder, bit for bit, whole or not at all, even if several processes write it at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

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
# Every turn is `<|role|>text<|end|>`; the assistant's text and its `<|end|>` are marked for the loss.
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
    """Return the tokenizer: bytes as tokens 0 to 255, then the special ones; a document begins with `<|begin|>`."""
    vocabulary = {letter: number for number, letter in enumerate(_byte_letters())}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Split into words first: nothing is ever merged, but BPE over a whole document as one word takes minutes.
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
    """Return a config of about a million parameters, most of them in the layers, and 8 heads for sp up to 8."""
    ids = {token: 256 + index for index, token in enumerate(SPECIALS)}
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
    """Write the model and its tokenizer to `folder`, unless they are there; several processes may call it at once."""
    if (folder / "config.json").is_file():
        return folder
    # Imported here, because importing a model's code takes seconds and the tokenizer needs none.
    from transformers import LlamaForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    shows = logging.is_progress_bar_enabled()
    try:
        # The file has four megabytes: no progress bar.
        logging.disable_progress_bar()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            LlamaForCausalLM(embedded_config()).save_pretrained(made)
        embedded_tokenizer().save_pretrained(made)
        try:
            os.rename(made, folder)
        except OSError:
            # Another process was first, with the same content. Anything else in the way stays, and its error is raised.
            if not (folder / "config.json").is_file():
                raise
    finally:
        if shows:
            logging.enable_progress_bar()
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: a printable byte is its own letter."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]
