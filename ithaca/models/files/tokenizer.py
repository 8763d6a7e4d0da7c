"""Tokenizers by name: a folder, a hub name, or "embedded".

No code of a tokenizer's folder runs: no remote code, and chat templates are rendered in transformers' sandbox.
Invariant: every tokenizer gives offsets, from which chat masks are made; a slow tokenizer, which gives none, is refused.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ithaca.errors import DataError
from ithaca.models.files.embedded import EMBEDDED, embedded_tokenizer


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or a hub name; DataError if none can be loaded."""
    if name == EMBEDDED:
        return embedded_tokenizer()
    folder = Path(name).expanduser()
    if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):
        raise DataError(f"{name} holds no tokenizer.json: set model.tokenizer to a folder or hub name that does")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name, revision=revision, trust_remote_code=False
        )
        if tokenizer.is_fast:
            # A file may load and still have no vocabulary to encode with.
            tokenizer(_TRIED, return_offsets_mapping=True)
    except BaseException as error:
        # transformers raises anything for a broken file, and a panic of the tokenizers library is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"no tokenizer came from {name!r} ({why}): name a folder with tokenizer.json, or a hub name where there is "
            "a network, in model.tokenizer"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {name!r} is {type(tokenizer).__name__}, which gives no offsets: save it once as a fast "
            "tokenizer (tokenizer.json) and name that folder in model.tokenizer"
        )
    return tokenizer


_TRIED = "Ithaca 1"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")
