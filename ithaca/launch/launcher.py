"""`launch`: run a function on every rank, wherever the call is made.

    plain shell, or srun with one task a node          torchrun, or srun with one task a rank
    ─────────────────────────────────────────          ──────────────────────────────────────
    launch ── agent.py   starts the ranks, passes      launch ── run_entry   this process is a rank already;
                │        signals on, ends them                               its launcher watches it
                ├── rank 0: worker.py ── the entry
                └── rank 1: worker.py ── the entry

The agent watches the ranks: their exit codes, and the reports that failed ranks leave in a folder, out of which
`failures.py` finds the first cause. Each rank watches the agent: it ends when the agent's process does. How far a rank
gets is the subject of `training/watch`. A single rank needs no agent: the entry runs in this process.

Invariant: `launch` returns the status of the run: 0; 2 after a user's mistake; 75 if the run was stopped and saved its
steps; 130 if it was stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from ithaca.errors import ConfigError, IthacaError
from ithaca.launch.nodes import find_nodes
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
    """Run `entry(*args)` on every rank, and return the status to exit with.

    `entry`: `package.module:function`, or a function of a module. `processes`: ranks on this machine; "auto" takes all
    GPUs, or two ranks on the CPU. `grace`: seconds that the ranks have to save after a signal. `saves`: True if they
    save, which a line on the terminal then says. `nodes`, `node_rank`, `rendezvous`: the number of machines, this
    machine's number, and the `host:port` of node 0 where they meet. `hosts`: the machines to use; under Slurm the other
    machines stay idle, elsewhere the user types the same command on each. `check`: called before any rank is started
    with the number of ranks, and with a function that returns how the user types another number; raises to refuse.
    `setting`: the setting by which the user chose `processes`.
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
    machines = find_nodes(task, nodes, node_rank, rendezvous, hosts)
    if check is not None:
        check(count * machines.count, partial(_write_setting, setting, machines.count, _count_gpus(device)))
    if count == 1 and machines.count == 1:
        return run_entry(entry, args)
    from ithaca.launch.agent import start_ranks

    say_loading(f"starting {count} ranks, each of which loads torch and transformers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {"OMP_NUM_THREADS": str(max(1, cores // count))}
    if machines.count == 1 and not _count_gpus(device):
        # gloo would look up the name of this machine, which need not lead back to it.
        variables["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return start_ranks(entry, args, count, machines, grace, variables, saves)


def count_processes(
    processes: int | Literal["auto"],
    device: Literal["auto", "cpu", "cuda"],
    setting: str = "launch.processes={}",
) -> int:
    """Return the number of ranks on this machine."""
    gpus = _count_gpus(device)
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


def _count_gpus(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device != "cpu" else 0


def _write_setting(setting: str, nodes: int, gpus: int, ranks: int) -> str | None:
    """Return what the user types for `ranks` ranks on all machines; None if a machine cannot have its share."""
    each = ranks // nodes
    return None if ranks % nodes or (gpus and each > gpus) else setting.format(each)


def _run_here(entry: Entry, args: Sequence[Any]) -> int:
    """Run the entry in this process, which is one of several ranks; one of them prints an error that all ranks have."""
    try:
        return run_entry(entry, args)
    except IthacaError as error:
        rank = int(os.environ["RANK"])
        if not Report.of(rank, error).consequence and _is_first_to_print(str(error)):
            os.write(2, f"ithaca: {error}\n".encode())
        return error.status


def _is_first_to_print(message: str) -> bool:
    """Return True if no other rank has asked the store before; without a process group, if this is rank 0."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return os.environ["RANK"] == "0"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        return store.add(f"ithaca/said/{message[:200]}", 1) == 1
    except RuntimeError:
        # The rank that held the store has ended: a line printed twice is better than none.
        return True
