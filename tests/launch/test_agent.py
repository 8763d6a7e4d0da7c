"""The agent's own ending: torch, which would end ranks its own way, is handed none that is alive beside a failed one."""

from __future__ import annotations

import multiprocessing
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ithaca.launch import agent as module
from ithaca.launch.agent import Agent


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent over two processes: one that waits, and one that fails when it is told to."""
    monkeypatch.setattr(module, "LINGER", 0.2)
    spawn = multiprocessing.get_context("spawn")
    told, say = spawn.Pipe(duplex=False)
    processes = [spawn.Process(target=time.sleep, args=(60,)), spawn.Process(target=_fail_when, args=(told,))]
    agent = object.__new__(Agent)
    agent._pcontext = SimpleNamespace(_pc=SimpleNamespace(processes=processes))
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in range(2)])
    monkeypatch.setattr(Agent, "get_worker_group", lambda self: group)
    for process in processes:
        process.start()
    yield agent, processes, say
    for process in processes:
        process.kill()
        process.join()


def _fail_when(told: Any) -> None:
    told.recv()
    os._exit(3)


def test_torch_is_not_asked_while_all_ranks_run(crew: Any) -> None:
    agent, processes, _ = crew
    asked: list[float | None] = []
    assert not agent._join(lambda timeout: asked.append(timeout), -1)
    assert not asked
    assert all(process.is_alive() for process in processes)


def test_torch_is_asked_of_a_failure_when_all_ranks_are_gone(crew: Any) -> None:
    agent, processes, say = crew
    alive: list[bool] = []

    def join(timeout: float | None) -> bool:
        alive.extend(process.is_alive() for process in processes)
        return True

    say.send(None)
    # Waits until one of them ends; a rank that fails between two looks is seen by the second.
    assert agent._join(join, None)
    assert alive == [False, False]
    assert agent.codes() == {0: -9, 1: 3}
    assert agent.killed == {0}
