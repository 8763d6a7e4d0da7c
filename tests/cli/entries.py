"""Entry functions of ranks for the tests of the launcher, and `main`, which launches one by name.

`python -m tests.cli.entries NAME FOLDER [PROCESSES]` is a launcher in a process of its own, so that a test can send
it signals and look at what it leaves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ithaca.errors import DataError, PeerError
from ithaca.launch.launcher import launch
from ithaca.mesh import init_mesh
from ithaca.training.watch.watch import Preempted, Watch


def _rank() -> int:
    return int(os.environ["RANK"])


def _mark(folder: str, name: str, text: str = "") -> None:
    Path(folder, f"{name}-{_rank()}").write_text(text)


def total(folder: str) -> int:
    """Add the ranks up, and leave the sum with what the launcher set."""
    dist.init_process_group("gloo")
    x = torch.tensor([float(_rank() + 1)])
    dist.all_reduce(x)
    names = ("OMP_NUM_THREADS", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    _mark(folder, "sum", " ".join([f"{x.item():g}", *(os.environ[name] for name in names)]))
    dist.destroy_process_group()
    return 0


def refuse(folder: str) -> int:
    """Raise the same refusal on every rank."""
    raise DataError("no documents in 'nowhere': name a folder with files")


def fault(folder: str) -> int:
    """One rank fails; the other waits for it in a collective, and fails of that."""
    dist.init_process_group("gloo")
    if _rank() == 1:
        time.sleep(0.3)
        raise KeyError("the first cause")
    dist.all_reduce(torch.ones(1))
    return 0


def peer(folder: str) -> int:
    """The rank that only heard of a failure raises before the one that had it."""
    if _rank() == 0:
        raise PeerError("another rank could not count its batches")
    time.sleep(0.5)
    raise DataError("row 7 has no text")


def shot(folder: str) -> int:
    """One rank is killed; the other would wait for ever."""
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


def saves(folder: str) -> int:
    """Train until a signal stops it; then save, which takes a while."""
    mesh = init_mesh(sp=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]), device="cpu")
    with Watch.of(mesh, hang=60) as watch:
        _mark(folder, "started", str(os.getpid()))
        try:
            while True:
                watch.pass_boundary("step")
                dist.all_reduce(torch.ones(1))
                time.sleep(0.05)
        except Preempted:
            time.sleep(0.5)
            _mark(folder, "saved", str(watch.count))
            raise


def deaf(folder: str) -> int:
    """A rank that hears no signal, with a process of its own beside it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _mark(folder, "started", f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return 0


def hang(folder: str) -> int:
    """Rank 1 stops answering; rank 0 waits for it."""
    mesh = init_mesh(sp=2, device="cpu")
    with Watch.of(mesh, hang=2) as watch:
        for step in range(1000):
            watch.pass_boundary(f"forward layer {step}")
            if step == 5 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1))
    return 0


def main() -> int:
    name, folder, *rest = sys.argv[1:]
    settings = dict(part.split("=") for part in rest)
    return launch(
        f"tests.cli.entries:{name}",
        [folder],
        processes=int(settings.get("processes", "2")),
        device="cpu",
        grace=float(settings.get("grace", "20")),
        saves=settings.get("saves", "yes") == "yes",
        nodes=int(settings["nodes"]) if "nodes" in settings else None,
        node_rank=int(settings["node_rank"]) if "node_rank" in settings else None,
        rendezvous=settings.get("rendezvous"),
    )


if __name__ == "__main__":
    sys.exit(main())
