"""Tests of a process's node and rank (Slurm, hosts, nodes), and of the choice of the first failure."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from ithaca.errors import ConfigError, DataError, PeerError
from ithaca.launch.failures import find_cause
from ithaca.launch.launcher import count_processes, launch
from ithaca.launch.nodes import Nodes, find_nodes, meet
from ithaca.launch.slurm import expand_counts, expand_hosts, read_task
from ithaca.launch.worker import Report, resolve

STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[08-10],big1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", "gpu1"),
        ("gpu[1-3]", "gpu1 gpu2 gpu3"),
        ("gpu[08-10,12],login", "gpu08 gpu09 gpu10 gpu12 login"),
        ("rack[1-2]-gpu[0-1].net", "rack1-gpu0.net rack1-gpu1.net rack2-gpu0.net rack2-gpu1.net"),
    ],
)
def test_slurm_host_list_is_expanded(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


def test_slurm_task_counts_are_expanded() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_counts("two")


def test_slurm_task_gets_its_rank() -> None:
    task = read_task(STEP)
    assert task is not None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [task.variables()[name] for name in names] == ["5", "7", "1", "2", "gpu08"]
    assert 10_000 <= task.port < 30_000
    other_step = read_task({**STEP, "SLURM_STEP_ID": "1"})
    assert other_step is not None
    assert other_step.port != task.port
    assert {name: task.variables()[name] for name in names} != {}


def test_hosts_option_takes_a_part_of_the_nodes() -> None:
    task = read_task(STEP)
    assert task is not None
    part = task.only(["big1", "gpu10"])
    assert part is not None
    assert (part.hosts, part.rank, part.world, part.variables()["MASTER_ADDR"]) == (("gpu10", "big1"), 1, 3, "gpu10")
    assert task.only(["gpu08"]) is None
    with pytest.raises(ConfigError, match="--hosts names gpu99, but this job has gpu08, gpu09, gpu10, big1"):
        task.only(["gpu99"])


def test_batch_script_is_no_slurm_task() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1"}
    assert read_task(batch) is None
    assert read_task({}) is None
    with pytest.raises(ConfigError, match="write `srun` before `ithaca`"):
        read_task({**batch, "SLURM_JOB_NUM_NODES": "2"})
    with pytest.raises(ConfigError, match="4 nodes but tasks for 2"):
        read_task({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})


def test_one_slurm_task_a_node_starts_its_ranks() -> None:
    task = read_task({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"})
    assert task is not None
    place = find_nodes(task, None, None, None, ())
    assert (place.count, place.rank, place.endpoint) == (4, 2, f"gpu08:{task.port}")


def test_hosts_without_slurm_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ithaca", "train", "--hosts", "a,b"])
    own = socket.gethostname()
    place = find_nodes(None, None, None, None, ["elsewhere", own])
    assert (place.count, place.rank, place.endpoint) == (2, 1, "elsewhere:29400")
    with pytest.raises(ConfigError, match=r"is none of --hosts a,b: on each of them type\n  ithaca train --hosts a,b"):
        find_nodes(None, None, None, None, ["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((2, None, None), "--nodes 2 needs --rendezvous host:port"),
        ((2, 0, "node0"), "'node0': write host:port"),
        ((2, 0, "node0:99999"), "write host:port"),
        ((2, 2, "node0:29400"), "--nodes 2 with --node-rank 2: ranks of nodes go from 0"),
        ((None, 1, None), "give --nodes too"),
    ],
)
def test_wrong_node_options_are_refused(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_nodes(None, *settings, ())


def test_missing_node_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"not all of 2 nodes met at 127\.0\.0\.1:1 within 1 s: start the same command"
    ):
        meet(Nodes(2, 1, "127.0.0.1:1", timeout_s=1), 1)


def test_processes_auto_counts_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert count_processes("auto", "auto") == 2
    assert count_processes(8, "cpu") == 8
    with pytest.raises(ConfigError, match="torch sees no GPU here: use 'cpu'"):
        count_processes("auto", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert count_processes("auto", "auto") == 4
    assert count_processes("auto", "cpu") == 2
    with pytest.raises(ConfigError, match=r"processes=8, but this machine has 4 GPUs: use launch\.processes=4"):
        count_processes(8, "auto")


def test_single_process_runs_in_place() -> None:
    seen: list[int] = []
    assert launch(lambda x: seen.append(x), [7], processes=1, device="cpu") == 0
    assert seen == [7]
    with pytest.raises(ConfigError, match="names no function"):
        resolve("ithaca.launch.worker:nothing")


# Which came first.


def report(rank: int, error: Exception, when: float) -> Report:
    made = Report.of(rank, error)
    return Report(rank, when, made.error, made.message, "Traceback ...", made.user, made.consequence, made.status)


def test_earliest_own_error_is_the_cause() -> None:
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    reports = [report(0, gone, 1.0), report(1, ValueError("second"), 3.0), report(2, KeyError("first"), 2.0)]
    cause = find_cause(reports, {0: 1, 1: 1, 2: 1}, frozenset())
    assert cause.status == 1
    assert cause.text.startswith("rank 2 failed: KeyError: 'first'; ranks 0-1 ended because of it")


def test_user_mistake_is_one_line() -> None:
    alike = [report(rank, DataError("no documents"), rank) for rank in range(2)]
    assert find_cause(alike, {0: 2, 1: 2}, frozenset()).text == "no documents"
    one = [report(0, PeerError("another rank says why"), 1.0), report(1, DataError("row 7 has no text"), 2.0)]
    cause = find_cause(one, {0: 2, 1: 2}, frozenset())
    assert (cause.text, cause.status) == ("rank 1: row 7 has no text", 2)


def test_dead_rank_comes_before_errors_it_caused() -> None:
    gone = report(0, RuntimeError("Connection reset by peer"), 1.0)
    cause = find_cause([gone], {0: 1, 1: -11, 2: -9}, frozenset({2}))
    assert cause.status == 128 + 11
    assert cause.text.startswith("rank 1 was ended by SIGSEGV")
    assert find_cause([gone], {0: 1, 1: 70}, frozenset()).status == 70
    assert find_cause([gone], {0: 1, 1: 70}, frozenset()).text == ""
    assert find_cause([], {0: 71, 1: 71}, frozenset()).status == 71
    assert find_cause([], {0: 3, 1: 71}, frozenset()).text.startswith("rank 0 ended with status 3")
    assert find_cause([gone], {0: 1}, frozenset()).text.startswith("rank 0 failed: RuntimeError")


def test_failure_reports_outlive_the_folder(tmp_path: Any) -> None:
    written = report(3, KeyError("x"), 1.5)
    written.write(str(tmp_path))
    assert Report.read_all(str(tmp_path)) == [written]
