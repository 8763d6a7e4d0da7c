"""Small tokenizers of many kinds, made on the spot.

Byte-level BPE under the patterns of well-known models, SentencePiece's ways, WordPiece, WordLevel, and normalizers.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The word of the day, it's: don't. We'll see 42 of 3.14!\n\n  def f(x):\n\treturn x  \n",
    "中文,かな。Ärger über das Maß; слово и дело? the theory of words (and more) \U0001f600 e\u0301\r\n",
] * 30
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
FLAGS = [AddedToken("<mask>", lstrip=True), AddedToken("EOX", rstrip=True), AddedToken("the end", normalized=True)]


def _wrapped(inner: Tokenizer, *, added: bool = True) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if added:
        inner.add_tokens(FLAGS)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _bpe(*, byte_level: bool = True, **settings: object) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    for name, value in settings.items():
        setattr(inner, name, value)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=[] if byte_level else ["<unk>"]
    )
    inner.train_from_iterator(CORPUS, trainer)
    return _wrapped(inner)


def _pattern(pattern: str, **more: object) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _bpe(pre_tokenizer=words, **more)


def gpt2() -> PreTrainedTokenizerFast:
    return _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))


def roberta() -> PreTrainedTokenizerFast:
    tokenizer = _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.RobertaProcessing(
        ("</s>", inner.token_to_id("</s>")), ("<s>", inner.token_to_id("<s>"))
    )
    return tokenizer


def first_llama() -> PreTrainedTokenizerFast:
    """One word, the whole text, with merges that stop at blanks."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.pre_tokenizer = None
    return _wrapped(inner)


def unigram() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return _wrapped(inner)


def word_piece() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    return _wrapped(inner)


def word_level() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return _wrapped(inner)


def crossing() -> PreTrainedTokenizerFast:
    """Merges cross blanks: there is no place to cut."""
    return _bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def looks_back() -> PreTrainedTokenizerFast:
    return _pattern(r"(?<=a)\s+\S+|\s+|\S+")


CUT: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gpt2": gpt2,
    "roberta": roberta,
    "llama3": lambda: _pattern(LLAMA3),
    "qwen2": lambda: _pattern(QWEN2, normalizer=normalizers.NFC()),
    "o200k": lambda: _pattern(O200K),
    "first llama": first_llama,
    "unigram": unigram,
    "wordpiece": word_piece,
    "wordlevel": word_level,
}
UNCUT: dict[str, Callable[[], PreTrainedTokenizerFast]] = {"crossing": crossing, "looks back": looks_back}
