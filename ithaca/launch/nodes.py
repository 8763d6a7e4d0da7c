"""The machines of a run: the number of this machine, and the TCP store of the first machine, where they meet.

    machine 0 (--node-rank 0)                        machine 1
    agent ── holds the store at host:port <───────── agent        each writes how many ranks it starts,
      ├ rank 0 ── same store, for collectives <──┐     ├ rank 2    and reads how many the others start
      └ rank 1                                   └─────└ rank 3

The ranks use the agent's store, so the first machine waits until the ranks of all machines are done. Every wait is a
loop in Python, which Ctrl-C interrupts; the store's own waits cannot be interrupted.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ithaca.errors import ConfigError
from ithaca.launch.slurm import Task

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PORT = 29_400
# Seconds that a machine whose ranks are done waits for those of the others.
_BARRIER = 300.0
# Seconds that the first machine waits for the others to leave the store: they have nothing else left to do.
_LEAVING = 5.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The number of machines, the rank of this one, and the `host:port` of node 0 where they meet within `timeout_s` s.

    `rank`: None if not given; the machine that `host` names then holds the port.
    """

    count: int = 1
    rank: int | None = None
    endpoint: str = "127.0.0.1:0"
    timeout_s: int = 900


def find_nodes(
    task: Task | None, nodes: int | None, node_rank: int | None, rendezvous: str | None, hosts: Sequence[str]
) -> Nodes:
    """Return the machines of the run and the number of this machine, from Slurm or from the command line."""
    if task is not None and task.world > 1:
        # Slurm runs one task a node, which starts the ranks of its node.
        return Nodes(task.world, task.rank, f"{task.hosts[0]}:{task.port}")
    if hosts and task is None:
        return _find_among(hosts, rendezvous)
    if nodes is None or nodes == 1:
        if node_rank is not None or rendezvous is not None:
            raise ConfigError("--node-rank and --rendezvous are for several nodes: give --nodes too")
        return Nodes()
    if nodes < 1 or not 0 <= (node_rank or 0) < nodes:
        raise ConfigError(f"--nodes {nodes} with --node-rank {node_rank}: ranks of nodes go from 0 to --nodes - 1")
    if rendezvous is None:
        raise ConfigError(f"--nodes {nodes} needs --rendezvous host:port, a free port of the node with --node-rank 0")
    return Nodes(nodes, node_rank, _check_endpoint(rendezvous))


def _find_among(hosts: Sequence[str], rendezvous: str | None) -> Nodes:
    endpoint = _check_endpoint(rendezvous or f"{hosts[0]}:{PORT}")
    for rank, host in enumerate(hosts):
        if _is_own(host):
            return Nodes(len(hosts), rank, endpoint) if len(hosts) > 1 else Nodes()
    typed = shlex.join(["ithaca", *sys.argv[1:]])
    raise ConfigError(
        f"this machine, {socket.gethostname()}, is none of --hosts {','.join(hosts)}: on each of them type\n  {typed}"
    )


def _check_endpoint(rendezvous: str) -> str:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--rendezvous {rendezvous!r}: write host:port, such as node0:{PORT}")
    return rendezvous


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The machines after they met: this one is number `node`, and `counts` has the ranks that each of them starts."""

    store: TCPStore
    address: str
    node: int
    counts: tuple[int, ...]

    @property
    def first(self) -> int:
        """The lowest rank of this machine."""
        return sum(self.counts[: self.node])

    def variables(self, local: int) -> dict[str, str]:
        """Return the launch variables of one rank, as torchrun sets them."""
        return {
            "RANK": str(self.first + local),
            "WORLD_SIZE": str(sum(self.counts)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.counts[self.node]),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(len(self.counts)),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_RUN_ID": f"ithaca-{self.address}:{self.store.port}",
            # The one variable that torch does not document: rank 0 joins the store and opens none of its own. torch
            # 2.11 to 2.13 read it (`_create_c10d_store` in torch/distributed/rendezvous.py). Without it the run ends
            # at once, as rank 0 finds the port taken.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def store_is_gone(self) -> bool:
        """Return True if the store is gone, and the first machine with it."""
        try:
            return not self.store.check([_key(self.node)])
        except RuntimeError:
            return True

    def wait_for_all(self) -> None:
        """Wait until the ranks of every machine are done, or the store is gone. The machine that holds it leaves last."""
        others = len(self.counts) - 1
        with suppress(TimeoutError, RuntimeError):
            self.store.add("ithaca/done", 1)
            _wait_until(lambda: self.store.add("ithaca/done", 0) > others, time.monotonic() + _BARRIER)
            # A store that ends while another machine asks it makes torch's C++ print a stack there.
            if self.node:
                self.store.add("ithaca/left", 1)
            else:
                _wait_until(lambda: self.store.add("ithaca/left", 0) >= others, time.monotonic() + _LEAVING)


def meet(nodes: Nodes, processes: int) -> Rendezvous:
    """Wait until all machines are there; this one will start `processes` ranks."""
    from torch.distributed import TCPStore

    host, _, port = nodes.endpoint.rpartition(":")
    first = _is_own(host) if nodes.rank is None else nodes.rank == 0
    deadline = time.monotonic() + nodes.timeout_s
    keys = [_key(node) for node in range(nodes.count)]
    try:
        if not first:
            _wait_until(lambda: _answers(host, int(port)), deadline)
        store = TCPStore(host, int(port), is_master=first, wait_for_workers=False)
        node = 0 if first else nodes.rank or store.add("ithaca/nodes", 1)
        store.set(_key(node), str(processes))
        _wait_until(lambda: store.check(keys), deadline)
        return Rendezvous(store, host, node, tuple(int(store.get(key)) for key in keys))
    except (OSError, RuntimeError):
        raise ConfigError(
            f"not all of {nodes.count} nodes met at {nodes.endpoint} within {nodes.timeout_s} s: start the same command "
            "on each, --rendezvous naming a free port of the node with --node-rank 0 that the others can reach"
        ) from None


def _key(node: int) -> str:
    return f"ithaca/ranks/{node}"


def _is_own(host: str) -> bool:
    """Return True if `host` is a name of this machine, or an address of it that a socket can be bound to."""
    if host in {"localhost", socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}:
        return True
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _wait_until(ready: Callable[[], bool], deadline: float) -> None:
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
