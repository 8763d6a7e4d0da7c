"""DeepSpeed's Ulysses beside Ithaca and beside plain PyTorch on the same two cores: how close, and how fast.

    python -m benchmarks.trainer_peer results/trainer_peer.json --packages DIR [--rounds 5]

The systems are those of `benchmarks.trainer_loops`: one process with two threads, or two ranks over gloo with one each.
Parity: ten steps, losses and gradient norms against `plain`, and against `fp64`, which shows how far `plain` itself is
from exact. Time: the median over all rounds; in a round every system runs once, in
processes of its own, so that what else the machine does meets all alike. Every round is kept with the machine's load
before it; with --add the file's parity runs and rounds are kept, and what is missing or asked for is added.

DeepSpeed comes from a folder: DS_BUILD_OPS=0 pip install --no-deps --target DIR deepspeed==0.19.8 hjson msgpack einops \
    ninja py-cpuinfo
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.kernels import command_line
from benchmarks.stamps import mark, save
from benchmarks.step import show_length
from benchmarks.trainer_loops import MODEL, SYSTEMS, part

LENGTHS = (1024, 4096)
STEPS = 10
# Of every parity run: tokens a row, the norm that gradients are clipped to, and which rows. Norms are above 1, so 0.1
# bites. One run tells little of two systems that both round: a step of AdamW makes much of a bit.
CASES = tuple(
    (length, clip, seed)
    for length, clip, seeds in ((1024, 1e9, 4), (4096, 0.1, 3), (1024, 0.1, 8))
    for seed in range(seeds)
)
WARM_UP = 4
TIMED = {1024: 20, 4096: 6}
# What one process may take, in times of `plain`, by length.
ALLOWED = {1024: 1.6, 4096: 1.1}
LIMIT_S = 600


def run(system: str, length: int, clip: float, steps: int, packages: Path | None, seed: int = 0) -> Any:
    """`part` in processes of its own: one with all threads, or two ranks with one each."""
    alone = system in ("plain", "trainer", "fp64")
    launch = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = os.environ | {
        "OMP_NUM_THREADS": str(2 if alone else 1), "GLOO_SOCKET_IFNAME": loopback, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "part.json")
        asked = json.dumps([system, length, clip, steps, seed])
        command = [sys.executable, *launch, "-m", "benchmarks.trainer_peer", str(file), "--part", asked]
        command += ["--packages", str(packages)] if packages else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        if done.returncode or not file.exists():
            raise SystemExit(f"{system}, {length} tokens: status {done.returncode}\n{done.stderr[-4000:]}")
        return json.loads(file.read_text())


def parity(systems: list[str], packages: Path | None, found: list[dict[str, Any]]) -> Iterator[None]:
    """Into `found` what it does not have yet, a run at a time."""
    for length, clip, seed in CASES:
        for system in (*systems, "fp64"):
            asked = {"system": system, "length": length, "clip": clip, "seed": seed}
            if not any(asked.items() <= one.items() for one in found):
                got = run(system, length, clip, STEPS, packages, seed)
                del got["seconds"]
                found.append(asked | got)
                yield


def timed_round(systems: list[str], packages: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    for length in LENGTHS:
        for system in systems:
            got = run(system, length, 1.0, WARM_UP + TIMED[length], packages)
            found.setdefault(system, {})[str(length)] = got["seconds"][WARM_UP:]
    return found


def about(packages: Path | None) -> dict[str, Any]:
    names = ("torch", "transformers", "accelerate", "deepspeed")
    found = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in names if name != "deepspeed" or packages}


def differences(result: dict[str, Any], system: str, reference: str = "plain", what: str = "losses") -> list[float]:
    """From the reference, of every step of every case; of norms relative to them."""
    by_case = {(one["system"], one["length"], one["clip"], one["seed"]): one[what] for one in result["parity"]}
    cases = [case for name, *case in by_case if name == system]
    pairs = [
        (got, wanted)
        for case in cases
        for got, wanted in zip(by_case[system, *case], by_case[reference, *case], strict=True)
    ]
    return [abs(got - wanted) / (wanted if what == "norms" else 1) for got, wanted in pairs]


def spread(errors: list[float]) -> tuple[float, float, float]:
    """The median, the root of the mean square and the largest."""
    return statistics.median(errors), statistics.fmean(error * error for error in errors) ** 0.5, max(errors)


def _told(errors: tuple[float, ...]) -> str:
    return ", ".join(f"{error:.1e}" for error in errors)


def median_s(result: dict[str, Any], system: str, length: int) -> float:
    return statistics.median(s for one in result["rounds"] for s in one[system][str(length)])


def table(result: dict[str, Any]) -> str:
    """Markdown: systems down; the spread of differences over all parity runs, and the median step, across."""
    ways = [(what, reference) for reference in ("plain", "fp64") for what in ("losses", "norms")]
    shown = {"losses": "loss", "norms": "norm"}
    heads = ["", *(f"{shown[what]} from {reference}" for what, reference in ways)]
    heads += [f"step at {show_length(length)}" for length in LENGTHS]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for system in dict.fromkeys(one["system"] for one in result["parity"] if one["system"] != "fp64"):
        errors = [_told(spread(differences(result, system, reference, what))) for what, reference in ways]
        times = [median_s(result, system, length) for length in LENGTHS]
        plain = [median_s(result, "plain", length) for length in LENGTHS]
        steps = [f"{s * 1e3:.0f} ms, {s / p:.2f}x" for s, p in zip(times, plain, strict=True)]
        lines.append("| " + " | ".join([system, *errors, *steps]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    parser.add_argument("--packages", type=Path, help="a folder with DeepSpeed, which is left out without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="keep what the file has, and add to it")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas, plain among them")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(str(arguments.packages))
    if arguments.part:
        got = part(*json.loads(arguments.part))
        if int(os.environ.get("RANK", "0")) == 0:
            arguments.file.write_text(json.dumps(got))
        if dist.is_initialized():
            dist.barrier()
            # Not through the interpreter's end, where threads that DeepSpeed leaves now and then abort.
            os._exit(0)
        return 0
    systems = [name for name in arguments.systems.split(",") if arguments.packages or name != "deepspeed"]
    if arguments.add:
        result = json.loads(arguments.file.read_text())
    else:
        result = {"command": command_line(), "about": about(arguments.packages), "model": MODEL, "rounds": []}
        result["parity"] = []
        # What --add keeps is of the code it was measured on, and with it the stamp.
        mark(result, "trainer_peer")
    for _ in parity(systems, arguments.packages, result["parity"]):
        save(arguments.file, result)
    for _ in range(arguments.rounds):
        result["rounds"].append(timed_round(systems, arguments.packages))
        save(arguments.file, result)
        print(table(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
