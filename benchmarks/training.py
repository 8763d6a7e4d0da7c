"""A real run of `ithaca train` on one device, and what the trainer adds to a bare loop.

    python -m benchmarks.training results/training.json --parts overhead,run
    python -m benchmarks.training results/training.json

overhead  a 1B at 8K tokens: steps of the trainer's loop (rows, norm and clipping, metrics, display, watching for
          preemption: everything), against a loop that does forward, backward and optimizer on rows already at hand
          and nothing else, not even wait for one step before it starts the next; and against the same loop with an
          optimizer that also divides the gradients, as the trainer's does when it clips; the three in turn over the
          same model, ten steps each and many times, as the machine's own speed comes and goes; before a round its rows
          are learned once uncounted, as kernels prepare for documents of lengths they have not met; medians of the
          rounds' ratios. Besides, of the trainer's own steps, the share in which the device's clock stood outside
          forward, backward and the optimizer: that needs no second loop to be as fast as it was
run       a 1B at 64K tokens for 60 steps: loss, tokens/s, utilisation and memory of each step

Llama-3.2-1B's sizes with random weights in fp32, computed in bf16, AdamW, clipped at 1. The documents are made on the
spot: every package of Python's standard library is one, all its sources one after the other, and a token is a byte, so
that most rows are one piece of one document. Without --parts the table is made from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.floor import SHAPES, config_of, synchronize
from benchmarks.peers import about
from benchmarks.stamps import mark, save
from benchmarks.step import command_line, parse_length, show_length
from ithaca.planning.machine.hardware import find_device

# Steps that compile, pin and fill caches are left out of the medians.
WARM = 10
ROUND = 10
UNCOUNTED = 2
LIMIT_S = 570.0


def documents() -> Iterator[str]:
    """Packages of the standard library, each as one text; its tests, more than all the rest, are left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = {path.parent for path in library.glob("*/__init__.py")} - {library / "test"}
    for package in sorted(packages):
        files = sorted(package.rglob("*.py"))
        yield "".join(f"# {file.relative_to(library)}\n{file.read_text('utf-8', 'replace')}\n" for file in files)


def write_job(folder: Path, shape: str, length: int, steps: int, most: float = math.inf) -> Path:
    """The model's folder, the documents, up to one that makes them `most` characters, and the run file; gives the last."""
    from ithaca.models.files.embedded import embedded_tokenizer

    tokenizer = embedded_tokenizer()
    sizes = replace(SHAPES[shape], vocab=max(SHAPES[shape].vocab, len(tokenizer)))
    config = config_of(sizes, length)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() > most:
                break
    run = {
        "output": str(folder / "run"),
        "model": {"name": str(folder / "model"), "weights": "random"},
        "data": {"sources": [str(folder / "documents.jsonl")]},
        "stages": [{"length": length, "steps": steps, "lr": 3e-4, "warmup": 0.2}],
        "checkpoints": {"save_every": 10 * steps},
    }
    # JSON is YAML.
    (folder / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    return folder / "run.yaml"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    text = file.read_text("utf-8") if file.exists() else ""
    # A last line may still be half written.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == "step"]


def run_trainer(folder: Path, run: Path) -> list[dict[str, Any]]:
    """`ithaca train` in a process of its own; lines of the steps it took, even where it was cut short."""
    command = [sys.executable, "-m", "ithaca", "train", str(run)]
    with (folder / "said.txt").open("w") as said:
        try:
            status = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status:
        print(f"ithaca train ended with {status}: {(folder / 'said.txt').read_text()[-3000:]}", file=sys.stderr)
    return lines_of(folder)


class Parts:
    """The device's clock around each forward, backward and optimizer step of the trainer's loop."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.spans = device, list[tuple[Any, Any]]()

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            got = call(*args, **kwargs)
            self.spans.append((began, self.now()))
            return got

        return timed

    @contextmanager
    def clocking(self) -> Iterator[None]:
        """Inside, the loop's calls are timed."""
        from ithaca.training import loop

        forward, step = self.around(loop.micro_loss), self.around(loop.clipped_step)

        def forward_and_backward(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = forward(*args, **kwargs)
            loss.backward = self.around(loss.backward)  # type: ignore[method-assign]
            return loss

        with patch.object(loop, "micro_loss", forward_and_backward), patch.object(loop, "clipped_step", step):
            yield

    def outside(self) -> float:
        """The share of the time between the first call's start and the last one's end that was in none of them."""
        synchronize(self.device)
        inside = sum(_between(*span) for span in self.spans)
        return 1 - inside / _between(self.spans[0][0], self.spans[-1][1])


def _between(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3


class Alone:
    """A run's only stage on one process, as the trainer builds it, to be stepped by its loop or by a bare one."""

    def __init__(self, folder: Path, file: Path) -> None:
        from ithaca.config.schema import load_run
        from ithaca.data.prepared import prepare
        from ithaca.mesh import init_mesh
        from ithaca.models.files.tokenizer import load_tokenizer
        from ithaca.training.session import build_session

        self.run, self.folder = load_run(str(file), []), folder
        run, data = self.run, Path(self.run.output) / "data"
        tokenizer = load_tokenizer(run.model.name, None)
        prepared = prepare(run.data, tokenizer, validation=run.validation, seed=run.seed, folder=data)
        self.session = build_session(run, 0, run.model.name, prepared, None, init_mesh())
        self.loop: Any = None
        self.parts = Parts(self.session.mesh.device)

    def bare(self, first: int, steps: int) -> float:
        """Forward, backward, optimizer: seconds of a step."""
        optimizer = self.session.optimizer
        return self._timed(first, steps, lambda loss: optimizer.step())

    def dividing(self, first: int, steps: int) -> float:
        """The same, the optimizer called as the trainer calls it where it clips."""
        from ithaca.state.optimizer.clipping import clipped_step

        optimizer, two = self.session.optimizer, torch.full((), 2.0, device=self.session.mesh.device)
        return self._timed(first, steps, lambda loss: clipped_step(optimizer, two, loss, 1.0))

    def _timed(self, first: int, steps: int, step: Callable[[Tensor], None]) -> float:
        from ithaca.loss.causal import causal_loss

        session, device = self.session, self.session.mesh.device
        rows = [session.feed.row(session.rows_of(at)[0]) for at in range(first, first + steps)]
        synchronize(device)
        began = time.perf_counter()
        for row in rows:
            loss = causal_loss(session.model, row, session.mesh)
            loss.backward()
            step(loss.detach())
            session.optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return (time.perf_counter() - began) / steps

    def trained(self, first: int, steps: int) -> float:
        """The same rows, for other documents are other work, through the trainer's loop."""
        from ithaca.models.support import base_model, decoder_layers
        from ithaca.training.loop import StageLoop
        from ithaca.training.run.display import Display
        from ithaca.training.run.metrics import Journal
        from ithaca.training.watch.watch import Watch

        run, session, device = self.run, self.session, self.session.mesh.device
        with Watch.of(session.mesh) as watch:
            if self.loop is None:
                journal = Journal(self.folder / "metrics.jsonl", run.metrics, writes=True, run={})
                self.loop = StageLoop(
                    run, session, watch, journal, Display(shows=True, stages=1), lambda progress: None
                )
            assert self.loop.progress.step == first
            self.loop.watch = watch
            take_off = watch.install(decoder_layers(base_model(session.model)))
            self.parts = Parts(device)
            synchronize(device)
            began = time.perf_counter()
            with self.parts.clocking():
                for _ in range(steps):
                    self.loop.advance()
            self.loop.settle()
            took = (time.perf_counter() - began) / steps
            take_off()
        return took


def overhead(shape: str, length: int, steps: int, rounds: int) -> dict[str, Any]:
    """Rounds of the three loops, each first in its turn; the first rounds count for nothing.

    `overhead` is what the trainer adds to the bare loop, `outside` what it adds to the one whose optimizer divides,
    `between` what its own steps have outside forward, backward and optimizer.
    """
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        every = (rounds + UNCOUNTED) * steps
        alone = Alone(Path(name), write_job(Path(name), shape, length, every, most=every * length))
        ways = [alone.bare, alone.dividing, alone.trained]
        for number in range(rounds + UNCOUNTED):
            alone.bare(number * steps, steps)
            took = {way.__name__: way(number * steps, steps) for way in ways}
            ways.append(ways.pop(0))
            bare, dividing, trained = (took[name] for name in ("bare", "dividing", "trained"))
            seconds = {"bare_s": bare, "dividing_s": dividing, "trainer_s": trained}
            ratios = {"overhead": trained / bare - 1, "outside": trained / dividing - 1}
            found.append(seconds | ratios | {"between": alone.parts.outside()})
            print(", ".join(f"{way} {each * 1e3:.1f} ms" for way, each in sorted(took.items())), flush=True)
    del found[:UNCOUNTED]
    middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {"model": shape, "length": length, "steps": steps, "rounds": found} | middle


def whole_run(shape: str, length: int, steps: int) -> dict[str, Any]:
    """The steps' lines of a run, and their medians once it is warm."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        lines = run_trainer(folder, write_job(folder, shape, length, steps))
        wall = time.monotonic() - began
    names = ("seconds", "tokens_per_second", "utilisation")
    middle = {n: statistics.median(line[n] for line in lines[WARM:]) for n in names if n in lines[-1]}
    kept = ("step", "loss", "gradient_norm", "rate", "seconds", "tokens_per_second", "utilisation", "seconds_apart")
    steps_taken = [{name: line[name] for name in kept if name in line} | counted(line) for line in lines]
    figures = {"wall_s": wall, "median": middle, "memory_gib": lines[-1]["memory_gib"], "taken": steps_taken}
    return {"model": shape, "length": length, "steps": len(lines)} | figures


def counted(line: dict[str, Any]) -> dict[str, float]:
    """A step's model FLOPs, which `utilisation` of its line is made of: one card's peak and the step's seconds."""
    if "utilisation" not in line:
        return {}
    peak = find_device(torch.cuda.get_device_name()).peak * 1e12
    return {"flops": line["utilisation"] * line["seconds"] * peak}


def table(result: dict[str, Any]) -> str:
    said = []
    if "overhead" in result:
        o = result["overhead"]
        said.append(
            f"{o['model']} at {show_length(o['length'])}: {o['trainer_s'] * 1e3:.1f} ms a step through `ithaca train`, "
            f"{o['bare_s'] * 1e3:.1f} ms in a bare loop: {o['overhead']:.1%} more, {o['outside']:.1%} more than one whose "
            f"optimizer divides the gradients too ({o['dividing_s'] * 1e3:.1f} ms)"
            + (f"; {o['between']:.1%} outside forward, backward and optimizer" if "between" in o else "")
        )
    if "run" in result:
        r = result["run"]
        first, last = r["taken"][0]["loss"], r["taken"][-1]["loss"]
        said.append(
            f"{r['model']} at {show_length(r['length'])}, {r['steps']} steps: loss {first:.2f} to {last:.2f}, "
            + ", ".join(f"{name} {value:,.3g}" for name, value in r["median"].items())
            + f", memory in GiB {r['memory_gib']}"
        )
    return "\n".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON, kept part by part")
    parser.add_argument("--parts", default="", help="overhead, run, or both with a comma")
    parser.add_argument("--model", default="1B", choices=SHAPES)
    parser.add_argument("--length", type=parse_length, help="of the run; the overhead's is 8K unless --short is given")
    parser.add_argument("--short", type=parse_length, default=parse_length("8K"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20, help="of the overhead's, ten steps of each loop")
    arguments = parser.parse_args()
    result = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    machine = about(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for part in filter(None, arguments.parts.split(",")):
        if part == "overhead":
            got = overhead(arguments.model, arguments.short, ROUND, arguments.rounds)
        else:
            got = whole_run(arguments.model, arguments.length or parse_length("64K"), arguments.steps)
        result[part] = {"machine": machine, "command": command_line()} | got
        mark(result, "training", part)
        save(arguments.file, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
