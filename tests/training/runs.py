"""Whole runs of `train` on the pool's ranks: a tiny Llama over bytes, a few documents, and stops at a given step.

`run_train(world, run, stop=...)` returns the result on rank 0, the lines of metrics.jsonl and the printed lines.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ithaca.config.schema import RunSettings, read_run
from ithaca.models.files.embedded import embedded_tokenizer
from ithaca.training import loop
from ithaca.training.run.display import Display
from ithaca.training.trainer import train
from ithaca.training.watch.watch import Watch
from tests.ranks import run_ranks

POSITIONS = 64


def tiny_model(folder: Path, **more: Any) -> Path:
    """A Hugging Face folder: two layers, four heads, two key-value heads, positions up to 64."""
    tokenizer = embedded_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{
            **sizes,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": POSITIONS,
            **more,
        }
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def documents(folder: Path, count: int = 40) -> Path:
    """Text files of 20 to 300 letters, always the same."""
    draw = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["sea", "ship", "wind", "oar", "isle", "home", "wine-dark", "king", "loom", "bow"]
    for number in range(count):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(4, 50)))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def small_run(folder: Path, output: str, **more: Any) -> RunSettings:
    """Twelve steps of four rows of 64 tokens, saved every five."""
    model, texts = folder / "model", folder / "texts"
    if not model.exists():
        tiny_model(model)
        documents(texts)
    given = {
        "output": str(folder / output),
        "model": {"name": str(model)},
        "data": {"sources": [str(texts)], "cache": str(folder / "cache")},
        "stages": [{"length": 64, "steps": 12, "batch": 4, "lr": 3e-3, "warmup": 2}],
        "checkpoints": {"save_every": 5},
        "limits": {"hang": 120},
        "launch": {"device": "cpu"},
    }
    return read_run({**given, **more})


def run_train(world: int, run: RunSettings, **options: Any) -> dict[str, Any]:
    return run_ranks(world, _train, run.model_dump_json(), **options)[0]


def _train(text: str, stop: int | None = None, at: str = "step") -> dict[str, Any]:
    """Train; `stop`: ask for a stop after so many steps, at the first boundary whose label starts with `at`."""
    run = RunSettings.model_validate_json(text)
    advance, boundary, armed = loop.StageLoop.advance, Watch.pass_boundary, [False]
    say, said = Display.say, []

    def arming(self: loop.StageLoop) -> None:
        armed[0] = armed[0] or self.progress.total == stop
        advance(self)

    def asking(self: Watch, label: str) -> None:
        if armed[0] and label.startswith(at) and not self.stop_requested:
            self.request_stop()
            # The request travels through the store: wait for it, as a long layer would.
            while not self.stop_requested:
                time.sleep(0.01)
        boundary(self, label)

    def saying(self: Display, line: str) -> None:
        said.append(line)
        say(self, line)

    try:
        loop.StageLoop.advance, Watch.pass_boundary, Display.say = arming, asking, saying  # type: ignore[method-assign]
        result = train(run)
    finally:
        loop.StageLoop.advance, Watch.pass_boundary, Display.say = advance, boundary, say  # type: ignore[method-assign]
    found = {"finished": result.finished, "progress": result.progress, "metrics": metrics(run), "sum": export_sum(run)}
    return {**found, "said": said}


def metrics(run: RunSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.output) / "metrics.jsonl").read_text().splitlines()]


def losses(result: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in result["metrics"] if line["kind"] == "step"]


def export_sum(run: RunSettings) -> str | None:
    """Return a checksum of the exported weights; None without an export."""
    files = sorted((Path(run.output) / "export").glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None
