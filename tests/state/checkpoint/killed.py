"""A writer of checkpoints that is killed with -9 again and again, and a look at what it leaves; run as a program.

Prints one line of JSON: the steps found after each kill, those whose content is not what that step wrote, and how many
kills left a half-written folder behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ithaca.mesh import init_mesh
from ithaca.state.checkpoint.checkpoints import Checkpoints

KILLS = 20


def content(step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {f"t{i}": torch.randn(20_000, generator=drawn) for i in range(8)}


def write_without_end(folder: Path, first: int) -> None:
    keeper = Checkpoints(folder, 2, init_mesh(), background=True)
    for step in range(first, 10**6):
        keeper.save(step, content(step), {"of": step}, pin=step % 5 == 0)
        if step % 5 == 0:
            keeper.save(step, content(step), {"of": step})


def look(folder: Path) -> tuple[int, bool]:
    """The newest step found, and whether it is what that step wrote."""
    keeper = Checkpoints(folder, 2, init_mesh(), background=False)
    path = keeper.latest()
    if path is None:
        return 0, True
    step = int(keeper.read_facts(path)["of"])
    tensors = {key: torch.zeros_like(value) for key, value in content(0).items()}
    keeper.load(path, tensors)
    return step, all(torch.equal(tensors[key], value) for key, value in content(step).items())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    found: list[int] = []
    wrong: list[int] = []
    cut = 0
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            write_without_end(folder, (found[-1] if found else 0) + 1)
        time.sleep(0.05 + draw.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cut += any(folder.glob(".step-*"))
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, json.dumps(look(folder)).encode())
            os._exit(0)
        os.wait()
        step, right = json.loads(os.read(reader, 100))
        found.append(step)
        wrong += [] if right else [step]
    print(json.dumps({"found": found, "wrong": wrong, "cut": cut}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
