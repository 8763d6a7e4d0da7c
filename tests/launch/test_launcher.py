"""The launcher: right ranks wherever it is called, one message for a failure, a status that means something, no orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from ithaca.exit_codes import HANG, INTERRUPTED, PEER, PREEMPTED

ROOT = Path(__file__).resolve().parents[2]
# Importing torch in three processes takes this long on a busy machine.
PATIENCE = 240.0
SLOW = pytest.mark.slow


@contextlib.contextmanager
def launcher(
    name: str, folder: Path, *settings: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`python -m tests.cli.entries name folder ...` in a process of its own, gone afterwards with all it started."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("SLURM_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.entries", name, str(folder), *settings],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for left in [*family, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


def wait_for(folder: Path, pattern: str, count: int) -> list[str]:
    """The contents of `count` files that ranks leave."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = sorted(folder.glob(pattern))
        if len(found) == count and all(path.read_text() for path in found):
            return [path.read_text() for path in found]
        time.sleep(0.1)
    raise AssertionError(f"{pattern}: {sorted(folder.iterdir())}")


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@SLOW
def test_ranks_start_with_their_share_of_cores(tmp_path: Path) -> None:
    with launcher("total", tmp_path) as process:
        assert ended(process) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == [f"3 {threads} {r} 2 2" for r in range(2)]


@pytest.mark.slow
def test_failed_rank_prints_first_cause_once(tmp_path: Path) -> None:
    with launcher("fault", tmp_path) as process:
        status, told = ended(process)
    assert status == 1
    assert told.startswith("ithaca: rank 1 failed: KeyError: 'the first cause'; rank 0 ended because of it\n")
    assert told.count("Traceback") == 1
    assert told.rstrip().endswith("KeyError: 'the first cause'")
    assert "torch.distributed.elastic" not in told


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=SLOW), pytest.param(signal.SIGINT, marks=SLOW)],
    ids=str,
)
def test_signal_to_launcher_lets_ranks_save(number: signal.Signals, tmp_path: Path) -> None:
    with launcher("saves", tmp_path) as process:
        pids = [int(text) for text in wait_for(tmp_path, "started-*", 2)]
        process.send_signal(number)
        status, told = ended(process)
        assert all_gone(pids, 10)
    # Who interrupts a run does not want it requeued.
    assert status == (INTERRUPTED if number == signal.SIGINT else PREEMPTED)
    assert told == "ithaca: stopping (Ctrl-C again ends at once)\n"
    saved = [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]


@SLOW
def test_refusal_of_all_ranks_is_one_line_and_status_2(tmp_path: Path) -> None:
    with launcher("refuse", tmp_path) as process:
        assert ended(process) == (2, "ithaca: no documents in 'nowhere': name a folder with files\n")


@SLOW
def test_peer_error_is_not_the_first_cause(tmp_path: Path) -> None:
    with launcher("peer", tmp_path) as process:
        assert ended(process) == (2, "ithaca: rank 1: row 7 has no text\n")


@SLOW
def test_killed_rank_ends_the_run(tmp_path: Path) -> None:
    with launcher("shot", tmp_path) as process:
        status, told = ended(process)
    assert status == 128 + signal.SIGKILL
    assert told.startswith("ithaca: rank 1 was ended by SIGKILL (")
    assert told.endswith("; rank 0 ended because of it\n")


@SLOW
def test_suspended_rank_is_named(tmp_path: Path) -> None:
    with launcher("hang", tmp_path) as process:
        status, told = ended(process)
    assert status == HANG
    assert told.startswith("ithaca: rank 1 stopped answering")
    assert "rank 0 waits for it in 'forward layer 5'" in told
    assert told.count("\n") == 1


@SLOW
def test_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    with launcher("deaf", tmp_path) as process:
        pids = [int(pid) for text in wait_for(tmp_path, "started-*", 2) for pid in text.split()]
        assert len(pids) == 4
        assert all(alive(pid) for pid in pids)
        process.kill()
        assert all_gone(pids, 10)


@SLOW
def test_killed_launcher_prints_nothing_and_next_launch_clears_up(tmp_path: Path) -> None:
    """Whatever its ranks are at: no stack of C++, no warning of Python's own processes, no folder for long."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for _ in range(3):
        for left in tmp_path.glob("started-*"):
            left.unlink()
        with launcher("saves", tmp_path, variables={"TMPDIR": str(scratch)}) as process:
            pids = [int(text) for text in wait_for(tmp_path, "started-*", 2)]
            time.sleep(0.5)
            process.kill()
            assert all_gone(pids, 10)
            _, told = process.communicate(timeout=PATIENCE)
        assert told == ""
        assert len(list(scratch.glob("ithaca-*"))) == 1
    with launcher("total", tmp_path, variables={"TMPDIR": str(scratch)}) as process:
        assert ended(process) == (0, "")
    assert not list(scratch.glob("ithaca-*"))


@SLOW
def test_ranks_beyond_grace_are_killed(tmp_path: Path) -> None:
    with launcher("deaf", tmp_path, "grace=1") as process:
        pids = [int(pid) for text in wait_for(tmp_path, "started-*", 2) for pid in text.split()]
        process.terminate()
        status, told = ended(process)
        assert all_gone(pids, 10)
    assert status == PREEMPTED
    assert "had not saved within 1 s" in told


@SLOW
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_signal_to_ranks_without_saving_announces_no_saving(number: signal.Signals, tmp_path: Path) -> None:
    with launcher("deaf", tmp_path, "grace=1", "saves=no") as process:
        pids = [int(pid) for text in wait_for(tmp_path, "started-*", 2) for pid in text.split()]
        process.send_signal(number)
        assert ended(process) == (INTERRUPTED if number == signal.SIGINT else PREEMPTED, "")
        assert all_gone(pids, 10)


@SLOW
def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with launcher("deaf", tmp_path, "grace=600") as process:
        pids = [int(pid) for text in wait_for(tmp_path, "started-*", 2) for pid in text.split()]
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        # `ended` waits for less than the grace.
        status, _ = ended(process)
        assert all_gone(pids, 10)
    assert status == INTERRUPTED


# Several machines, as several launchers on loopback.


def meeting_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def two_nodes(name: str, folder: Path, processes: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    place, loopback = meeting_place(), {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    settings = ["nodes=2", f"rendezvous={place}", f"processes={processes}"]
    with (
        launcher(name, folder, *settings, "node_rank=0", variables=loopback) as first,
        launcher(name, folder, *settings, "node_rank=1", variables=loopback) as second,
    ):
        yield [first, second]


@SLOW
def test_two_nodes_form_one_world(tmp_path: Path) -> None:
    with two_nodes("total", tmp_path, processes=2) as nodes:
        assert [ended(node) for node in nodes] == [(0, ""), (0, "")]
    sums = [(tmp_path / f"sum-{rank}").read_text().split() for rank in range(4)]
    assert [(text[0], text[3], text[4]) for text in sums] == [("10", "2", "4")] * 4


@SLOW
def test_signal_to_one_node_stops_both(tmp_path: Path) -> None:
    with two_nodes("saves", tmp_path) as nodes:
        wait_for(tmp_path, "started-*", 2)
        nodes[1].terminate()
        assert [ended(node)[0] for node in nodes] == [PREEMPTED, PREEMPTED]
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text()


@SLOW
def test_failure_on_one_node_ends_the_other(tmp_path: Path) -> None:
    with two_nodes("fault", tmp_path) as nodes:
        results = [ended(node) for node in nodes]
    causes = [told for status, told in results if "KeyError: 'the first cause'" in told]
    others = [(status, told) for status, told in results if "KeyError" not in told]
    assert len(causes) == 1
    assert others[0][0] in (1, PEER)


@SLOW
def test_launch_under_torchrun_runs_entry_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.cli.entries", "total", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == [f"3 1 {r} 2 2" for r in range(2)]


@SLOW
@pytest.mark.parametrize("name", ["total", "refuse"])
def test_launch_under_slurm_runs_entry_here(name: str, tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }  # fmt: skip
    tasks = [{**job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    with (
        launcher(name, tmp_path, variables=tasks[0]) as first,
        launcher(name, tmp_path, variables=tasks[1]) as second,
    ):
        results = [ended(first), ended(second)]
    if name == "refuse":
        assert [status for status, _ in results] == [2, 2]
        assert "".join(told for _, told in results).count("no documents in 'nowhere'") == 1
    else:
        assert [status for status, _ in results] == [0, 0]
        assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == [f"3 1 {r} 2 2" for r in range(2)]
