"""The machines of a run, and how they meet: c10d rendezvous, at a port of the first.

A node that is early waits for the first one here, where Ctrl-C is heard; the store's own client cannot be interrupted.
"""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ithaca.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many machines there are, which this is, and the `host:port` of node 0 where they meet within `patience` s.

    Where `rank` is None, the machine that `host` names holds the port.
    """

    count: int = 1
    rank: int | None = None
    endpoint: str = "127.0.0.1:0"
    patience: int = 900


def meet(nodes: Nodes) -> RendezvousHandler:
    """The rendezvous of this machine with the others."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

    settings: dict[str, Any] = {"join_timeout": nodes.patience}
    if nodes.rank is not None:
        settings["is_host"] = nodes.rank == 0
    if nodes.rank:
        _wait_for_first(nodes)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=nodes.endpoint,
        # Machines that meet at one place are of one run; on one machine no other run may be met.
        run_id=f"ithaca-{nodes.endpoint}" if nodes.count > 1 else uuid.uuid4().hex,
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        local_addr="127.0.0.1" if nodes.count == 1 else None,
        **settings,
    )
    try:
        return registry.get_rendezvous_handler(parameters)
    except RendezvousError:
        raise ConfigError(missing(nodes)) from None


def missing(nodes: Nodes) -> str:
    """What to say when not all came."""
    return (
        f"not all of {nodes.count} nodes met at {nodes.endpoint} within {nodes.patience} s: start the same command on "
        "each, --rendezvous naming a free port of the node with --node-rank 0 that the others can reach"
    )


def _wait_for_first(nodes: Nodes) -> None:
    host, _, port = nodes.endpoint.rpartition(":")
    deadline = time.monotonic() + nodes.patience
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
            return
        time.sleep(0.5)
    raise ConfigError(missing(nodes))
