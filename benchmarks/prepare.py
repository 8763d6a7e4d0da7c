"""Memory and seconds of `ithaca prepare` on one document of 200 MB that is one line, as a text and as a record of JSON.

    python -m benchmarks.prepare results/prepare.json --bytes 200e6

The document is words of the standard library's sources in a random order, a blank between two; the tokenizer is a
byte-level BPE of 4,096 tokens trained on the same sources here. Memory is the peak resident set of the command and
its child processes, sampled five times a second; the memory for a document of a thousand bytes, which Python and the
libraries take, is given too. A command that does not end with 0 is written down with its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.kernels import command_line
from benchmarks.stamps import mark, save

SMALL = 1000
_PART = 1 << 16
_EVERY = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--bytes", type=float, default=200e6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = source_words()
        make_tokenizer(words).save_pretrained(folder / "tokenizer")
        result: dict[str, Any] = {"machine": machine(), "rows": []}
        for suffix, size in (("txt", SMALL), ("txt", int(arguments.bytes)), ("jsonl", int(arguments.bytes))):
            row = measure(folder, write_document(folder / f"one.{suffix}", words, size))
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            mark(result, "prepare")
            save(arguments.file, result)


def machine() -> dict[str, Any]:
    names = ("tokenizers", "transformers", "datasets", "numpy", "torch")
    return {
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
        "command": command_line(),
    }


def source_words() -> list[str]:
    """The words of a part of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    return [word for file in files for word in file.read_text(encoding="utf-8").split()]


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([" ".join(words[start : start + 1000]) for start in range(0, len(words), 1000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def write_document(file: Path, words: list[str], size: int) -> Path:
    """One document of about `size` bytes on one line; as JSON, in the field `text`."""
    rng, written = random.Random(0), 0
    lines = file.suffix == ".jsonl"
    with file.open("w", encoding="utf-8") as opened:
        opened.write('{"text": "' if lines else "")
        while written < size:
            part = " ".join(rng.choices(words, k=min(_PART, (size - written) // 6 + 1))) + " "
            opened.write(json.dumps(part)[1:-1] if lines else part)
            written += len(part.encode())
        opened.write('"}\n' if lines else "")
    return file


def measure(folder: Path, document: Path) -> dict[str, Any]:
    """Return the command's memory, seconds and result."""
    words = [f"model.name={folder / 'tokenizer'}", f"data.sources={document}", f"output={folder / 'run'}"]
    command = [sys.executable, "-m", "ithaca", "prepare", *words]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        start = time.perf_counter()
        started = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[1])
        peak = watch(started)
        seconds = time.perf_counter() - start
        said.seek(0)
        lines = said.read().strip().splitlines()
    row = {"document": document.suffix[1:], "bytes": document.stat().st_size, "seconds": round(seconds, 1)}
    row |= {"peak_bytes": peak, "status": started.returncode}
    return row | (tokens_in(folder / "run" / "data", document.name) if not started.returncode else {"said": lines[-1:]})


def watch(started: subprocess.Popen[str]) -> int:
    """Return the most bytes that the process and its children held at once."""
    peak, process = 0, psutil.Process(started.pid)
    while started.poll() is None:
        peak = max(peak, sum(map(resident, [process, *below(process)])))
        time.sleep(_EVERY)
    return peak


def below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def resident(process: psutil.Process) -> int:
    """Return the bytes of a process; 0 if it has just ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def tokens_in(cache: Path, name: str) -> dict[str, int]:
    """Documents and tokens of the newest store of the document."""
    stores = sorted(cache.glob("*/about.json"), key=lambda file: file.stat().st_mtime)
    about = json.loads(stores[-1].read_text(encoding="utf-8"))
    assert about["name"].endswith(name), f"{stores[-1]} is of {about['name']}"
    return {"documents": about["documents"], "tokens": about["tokens"]}


if __name__ == "__main__":
    main()
