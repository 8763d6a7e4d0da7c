"""The agent's killing of ranks: after a failure, at the end of the grace, and at a second Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from ithaca.launch import agent as module
from ithaca.launch.agent import Agent, Stopped
from ithaca.launch.nodes import Nodes, Rendezvous, meet


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Connection]]:
    """Start two processes that ignore SIGTERM, under an agent; rank 1 fails at a message."""
    monkeypatch.setattr(module, "LINGER", 0.2)
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    begun = spawn.Semaphore(0)
    ranks = {0: spawn.Process(target=_wait, args=(begun,)), 1: spawn.Process(target=_fail, args=(begun, receiver))}
    for process in ranks.values():
        process.start()
    for _ in ranks:
        assert begun.acquire(timeout=60)
    yield Agent(grace=0.2, ranks=dict(ranks)), sender
    for process in ranks.values():
        process.kill()
        process.join()


def _wait(begun: threading.Semaphore) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.release()
    time.sleep(60)


def _fail(begun: threading.Semaphore, receiver: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.release()
    receiver.recv()
    os._exit(3)


def test_rank_fails_others_are_killed_after_lingering(crew: tuple[Agent, Connection]) -> None:
    agent, say = crew
    say.send(None)
    agent.watch(lambda: False)
    assert agent.codes == {0: -9, 1: 3}
    assert agent.killed == {0}


def test_first_machine_gone_ranks_are_killed(crew: tuple[Agent, Connection]) -> None:
    agent, _ = crew
    agent.watch(lambda: True)
    assert agent.codes == {0: -9, 1: -9}


def test_grace_over_ranks_are_killed_and_saving_was_announced_once(
    crew: tuple[Agent, Connection], capfd: pytest.CaptureFixture[str]
) -> None:
    agent, _ = crew
    agent.receive(signal.SIGTERM)
    agent.receive(signal.SIGTERM)
    agent.watch(lambda: False)
    assert agent.killed == {0, 1}
    assert capfd.readouterr().err.count("stopping (Ctrl-C again ends at once)") == 1


def test_second_interrupt_ranks_are_killed_before_the_grace_is_over(crew: tuple[Agent, Connection]) -> None:
    agent, _ = crew
    agent.grace = 1000.0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        agent.receive(number)
    agent.watch(lambda: False)
    assert agent.killed == {0, 1}


def test_signal_while_idle_ends_the_wait() -> None:
    agent = Agent(grace=1.0, idle=True)
    with pytest.raises(Stopped):
        agent.receive(signal.SIGINT)


def test_environment_of_a_rank_joins_the_store_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds torch to TORCHELASTIC_USE_AGENT_STORE, which it does not document."""
    rendezvous = meet(Nodes(), 2)
    for name, value in rendezvous.variables(0).items():
        monkeypatch.setenv(name, value)
    store, rank, world = next(dist.rendezvous("env://"))
    assert (rank, world, store.get("ithaca/ranks/0")) == (0, 2, b"2")


def test_machines_with_different_counts_have_consecutive_ranks() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = Rendezvous(store, "127.0.0.1", 1, (2, 3, 1)).variables(2)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [variables[name] for name in names] == ["4", "6", "2", "3", "1", "3"]
