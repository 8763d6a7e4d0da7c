"""`launch`: one call that becomes the right number of ranks, wherever it is made.

In a plain shell it starts the ranks of this machine itself, through torchrun's elastic agent (`launch/agent.py`), as one
of several nodes if told so. Under torchrun, or as one of many tasks of `srun`, this process already is a rank, and the
entry runs in it. One rank alone needs nobody: the entry runs in this process too.

Invariant: the status given is the run's: 0, 2 for a user's mistake, 75 for a run that was told to stop and saved, 130
where it was told so by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from ithaca.errors import ConfigError, IthacaError
from ithaca.launch.nodes import find_place
from ithaca.launch.slurm import read_task
from ithaca.launch.terminal import say_loading
from ithaca.launch.worker import Entry, Report, run_entry

Check = Callable[[int, Callable[[int], str | None]], None]


def launch(
    entry: Entry,
    args: Sequence[Any] = (),
    *,
    processes: int | Literal["auto"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    grace: float = 60.0,
    saves: bool = True,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    hosts: Sequence[str] = (),
    check: Check | None = None,
    setting: str = "launch.processes={}",
) -> int:
    """Run `entry(*args)` on every rank; gives the status to end with.

    `entry`: `package.module:function`, or a function of a module. `processes`: ranks on this machine; all GPUs, or two
    on the CPU, if "auto". `grace`: seconds the ranks have to save when told to stop; `saves`: that they do, and
    are said to. `nodes`, `node_rank` and `rendezvous` (`host:port` on node 0): this machine as one of several. `hosts`:
    the nodes to take; under Slurm the others stay idle, elsewhere the same command is typed on each of them.
    `check`: is given the number of ranks before they are started, and how another number is typed, to refuse it. `setting`: where
    `processes` was typed.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_here(entry, args)
    task = read_task(os.environ)
    if task is not None and hosts:
        task = task.only(hosts)
        if task is None:
            return 0
    if task is not None and task.world > 1 and max(task.counts) > 1:
        os.environ.update(task.variables())
        return _run_here(entry, args)
    say_loading("loading torch")
    count = count_processes(processes, device, setting)
    place = find_place(task, nodes, node_rank, rendezvous, hosts)
    if check is not None:
        check(count * place.count, partial(_typed, setting, place.count, _gpus(device)))
    if count == 1 and place.count == 1:
        return run_entry(entry, args)
    from ithaca.launch.agent import start_ranks

    say_loading(f"starting {count} ranks, each of which loads torch and transformers")
    variables = _variables(count, place.count == 1 and not _gpus(device))
    return start_ranks(entry, args, count, place, grace, variables, saves)


def count_processes(
    processes: int | Literal["auto"],
    device: Literal["auto", "cpu", "cuda"],
    setting: str = "launch.processes={}",
) -> int:
    """How many ranks this machine gets."""
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ConfigError("launch.device is 'cuda', but torch sees no GPU here: use 'cpu', or install a CUDA build")
    if processes == "auto":
        return gpus or 2
    if gpus and processes > gpus:
        raise ConfigError(
            f"{setting.format(processes)}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}: "
            f"use {setting.format(gpus)}, or launch.device=cpu"
        )
    return processes


def _gpus(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device != "cpu" else 0


def _typed(setting: str, nodes: int, gpus: int, ranks: int) -> str | None:
    """Return how `ranks` ranks on so many machines are typed; None where a machine cannot have as many."""
    each = ranks // nodes
    return None if ranks % nodes or (gpus and each > gpus) else setting.format(each)


def _variables(processes: int, loopback: bool) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    if loopback:
        # gloo would look up this machine's name, which need not lead back to it.
        given["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return given


def _run_here(entry: Entry, args: Sequence[Any]) -> int:
    """This process is one of several ranks: an error that all have alike is said by one of them."""
    try:
        return run_entry(entry, args)
    except IthacaError as error:
        rank = int(os.environ["RANK"])
        if not Report.of(rank, error).consequence and _says(str(error)):
            os.write(2, f"ithaca: {error}\n".encode())
        return error.status


def _says(message: str) -> bool:
    """Whether this rank is the one to say it: the first to ask the store, or rank 0 before there is one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return os.environ["RANK"] == "0"
    return dist.distributed_c10d._get_default_store().add(f"said/{message[:200]}", 1) == 1
