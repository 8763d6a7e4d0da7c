"""The watchdog: all ranks stop at one boundary or none does, and a hang ends the ranks and names the rank behind."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from ithaca.exit_codes import HANG, INTERRUPTED, PEER
from ithaca.training.watch import watch as module
from ithaca.training.watch.hangs import Heartbeat, explain, locate, name_ranks
from ithaca.training.watch.signals import Signals
from ithaca.training.watch.watch import Preempted, Watch
from tests.training.crew import PATIENCE, Crew, voyage


def agree(outcomes: dict[int, Any], world: int) -> bool:
    return len(outcomes) == world and len(set(outcomes.values())) == 1


@pytest.mark.parametrize("seed", range(12))
def test_stop_on_some_ranks_stops_all_at_one_boundary(seed: int) -> None:
    outcomes = voyage(Crew(4), seed, boundaries=400, askers=1 + seed % 3)
    assert agree(outcomes, 4), outcomes
    assert outcomes[0][0] == "preempted"


@pytest.mark.parametrize("seed", range(6))
def test_stop_near_the_end_stops_all_or_none(seed: int) -> None:
    outcomes = voyage(Crew(3), seed, boundaries=5, askers=3)
    assert agree(outcomes, 3), outcomes


class PostsTooEarly(Watch):
    """Planted fault: the count is read before `_stop_requested` is set, so a boundary may slip in between."""

    def _agree(self) -> None:
        if not self._posted:
            self._post()
            time.sleep(0.02)
        super()._agree()


class TargetTooLow(Watch):
    """Planted fault: the target is a boundary that a rank has already passed."""

    def _agree(self) -> None:
        super()._agree()
        if self._known.is_set():
            self._target -= 2


@pytest.mark.parametrize("fault", [PostsTooEarly, TargetTooLow])
def test_wrong_agreement_stops_ranks_apart(fault: type[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.training.crew.PATIENCE", 1.0)
    monkeypatch.setattr(module, "LINGER", 0.2)
    assert not all(agree(voyage(Crew(4, kind=fault), seed, 400, 1), 4) for seed in range(5))


def test_no_stop_runs_to_the_end() -> None:
    assert set(voyage(Crew(4), 0, boundaries=30, askers=0).values()) == {"done"}


def test_boundary_after_the_stop_passes() -> None:
    crew = Crew(2)

    def body(watch: Watch) -> int:
        watch.request_stop()
        with pytest.raises(Preempted):
            go_on(watch)
        watch.pass_boundary("saving")
        return watch.count

    assert agree(crew.sail(body), 2)


def go_on(watch: Watch) -> None:
    """Pass boundary after boundary, for ten seconds at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        watch.pass_boundary("step")
        time.sleep(0.001)


def test_failed_rank_ends_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 0.2)
    crew = Crew(3)

    def body(watch: Watch) -> None:
        if watch.rank == 1:
            raise KeyError("a bad row")
        crew.collective()

    outcomes = crew.sail(body)
    assert outcomes == {0: "BrokenBarrierError", 1: "KeyError", 2: "BrokenBarrierError"}
    assert crew.ended in ({0: PEER, 2: PEER}, {0: PEER}, {2: PEER})  # the first end breaks the barrier for both


# Hangs.


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    # No hastier: on a busy machine threads stand still for tenths of a second, and would be taken for silent ones.
    monkeypatch.setattr(module, "BEAT", 0.2)
    monkeypatch.setattr(module, "LINGER", 1.0)


@pytest.mark.usefixtures("hasty")
def test_hang_names_rank_behind_once(capfd: pytest.CaptureFixture[str]) -> None:
    crew = Crew(4, hang=1.0)

    def body(watch: Watch) -> None:
        watch.pass_boundary("forward layer 4")
        if watch.rank == 2:
            crew.until_ended()
        watch.pass_boundary("forward layer 5")
        crew.collective()

    crew.sail(body)
    said = capfd.readouterr().err
    assert said.count("ithaca: ") == 1
    assert "rank 2 has been in 'forward layer 4' for" in said
    assert "until_ended" in said
    assert "ranks 0-1, 3 wait for it in 'forward layer 5'" in said
    assert HANG in crew.ended.values()


@pytest.mark.usefixtures("hasty")
def test_hang_names_rank_that_stopped_answering(capfd: pytest.CaptureFixture[str]) -> None:
    crew = Crew(3, hang=1.0)

    def body(watch: Watch) -> None:
        watch.pass_boundary("forward layer 5")
        if watch.rank == 1:
            time.sleep(0.5)
            watch._closing.set()  # its watch says nothing any more, as if the process were stopped
            crew.until_ended()
        crew.collective()

    crew.sail(body)
    said = capfd.readouterr().err
    assert "rank 1 stopped answering" in said
    assert "last seen in 'forward layer 5'" in said
    assert "ranks 0, 2 wait for it there" in said


@pytest.mark.usefixtures("hasty")
def test_slow_layer_and_patience_are_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    crew = Crew(2, hang=1.0)

    def body(watch: Watch) -> str:
        with watch.expect_long(30, "checkpoint"):
            time.sleep(1.5)
        watch.pass_boundary("forward layer 0")
        time.sleep(1.1)  # over the limit, but it moves on while the verdict is made
        watch.pass_boundary("forward layer 1")
        return "done"

    assert crew.sail(body) == {0: "done", 1: "done"}
    assert not crew.ended
    assert not capfd.readouterr().err


class Frozen:
    """A store whose process is suspended: every call waits."""

    def __init__(self) -> None:
        self.store, self.answers = HashStore(), threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait(PATIENCE)
        return getattr(self.store, name)


@pytest.mark.usefixtures("hasty")
@pytest.mark.slow
def test_suspended_store_ends_rank_with_message(capfd: pytest.CaptureFixture[str]) -> None:
    store, ended = Frozen(), threading.Event()
    watch = Watch(store, 1, 2, hang=0.2, poll=0.01, end=lambda status: ended.set())  # type: ignore[arg-type]
    with watch:
        watch.pass_boundary("forward layer 3")
        store.answers.clear()
        assert ended.wait(PATIENCE)
        store.answers.set()
        watch._posted = True
        store.store.set("gone/0", "1")
    assert "rank 0 or its launcher stopped answering" in capfd.readouterr().err


def post(rank: int, count: int, label: str, idle: float, *, waits: bool = False) -> Heartbeat:
    return Heartbeat(rank, count, label, idle, when=1000.0, where=f"file.py:{rank}, f", waits=waits)


def test_explain_names_ranks_behind_and_waiting() -> None:
    same = [post(rank, 9, "backward layer 1", 61, waits=rank != 3) for rank in range(4)]
    assert explain(same, set(), 1002.0) == (
        "rank 3 has been in 'backward layer 1' for 61 s (file.py:3, f); ranks 0-2 wait for it there (file.py:0, f)"
    )
    assert explain(same, {1}, 1061.0).startswith("rank 1 stopped answering 61 s ago, last seen in 'backward layer 1'")
    none = [post(rank, 9, "step 4", 61, waits=True) for rank in range(2)]
    assert explain(none, set(), 1000.0) == "no rank has got past 'step 4' for 61 s (file.py:0, f)"
    alone = explain([post(0, 9, "step 4", 61)], set(), 1000.0)
    assert alone == "rank 0 has been in 'step 4' for 61 s (file.py:0, f)"
    late = [post(0, 9, "step 4", 5), post(1, 7, "step 3", 61), post(2, 7, "step 3", 61)]
    assert explain(late, set(), 1000.0).startswith("ranks 1-2 have been in 'step 3' for 61 s")
    assert Heartbeat.read(late[0].write()) == late[0]
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_locate_thread_gives_line_outside_libraries() -> None:
    done = threading.Event()

    def waits_here() -> None:
        done.wait(10)

    thread = threading.Thread(target=waits_here)
    thread.start()
    try:
        time.sleep(0.1)
        assert locate(thread.ident) == (f"test_watch.py:{waits_here.__code__.co_firstlineno + 1}, waits_here", False)
    finally:
        done.set()
        thread.join()


def test_locate_thread_inside_the_watchdog_gives_line_of_its_caller() -> None:
    """Find the caller of `pass_boundary`, in which a training thread may wait for the other ranks to agree on a stop."""
    watch = Watch(HashStore(), 0, 2)
    watch._stop_requested.set()

    def trains() -> None:
        watch.pass_boundary("step 1")

    thread = threading.Thread(target=trains)
    thread.start()
    try:
        time.sleep(0.1)
        assert locate(thread.ident) == (f"test_watch.py:{trains.__code__.co_firstlineno + 1}, trains", True)
    finally:
        watch._target = 9
        watch._known.set()
        thread.join()


# Signals, in a world of one.


def alone(**settings: Any) -> Watch:
    return Watch(HashStore(), 0, 1, poll=0.01, **settings)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_stops_and_restores_handlers(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with alone() as watch:
        os.kill(os.getpid(), number)
        with pytest.raises(Preempted):
            go_on(watch)
    assert watch.stop_requested
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_signals_above_1023_descriptors_are_received(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    signals = Signals([signal.SIGUSR1])
    try:
        with ExitStack() as held:
            for number in range(1100):
                held.enter_context((tmp_path / str(number)).open("w"))
            signals.open()
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert signals.receive(5.0) == [signal.SIGUSR1]
                assert signals.receive(0.01) == []
            finally:
                signals.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_second_interrupt_ends_at_once() -> None:
    ended: list[int] = []
    with alone(end=ended.append) as watch:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not watch.stop_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended[0] == INTERRUPTED


# Boundaries on layers.


class Recording(Watch):
    def __init__(self) -> None:
        super().__init__(HashStore(), 0, 1)
        self.labels: list[str] = []

    def pass_boundary(self, label: str) -> None:
        self.labels.append(label)
        super().pass_boundary(label)


def test_installed_boundaries_pass_forward_and_backward_until_removed() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
    watch = Recording()
    remove = watch.install(list(layers))
    model = nn.Sequential(*layers)
    model(torch.ones(1, 3)).sum().backward()
    passes = ["forward layer 0", "forward layer 1", "backward layer 1", "backward layer 0"]
    assert watch.labels == passes
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert watch.labels == passes + passes[:2]
    remove()
    model(torch.ones(1, 3)).sum().backward()
    assert len(watch.labels) == 6


class FakeEvent:
    """An event that the device reaches only when the host waits for it, `between` milliseconds after the last."""

    waited: ClassVar[list[int]] = []
    recorded: ClassVar[int] = 0
    between: ClassVar[float] = 0.0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking, "a waiting host must not burn the core that prepares data"

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.number = FakeEvent.recorded

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        FakeEvent.waited.append(self.number)

    def elapsed_time(self, later: FakeEvent) -> float:
        return FakeEvent.between * (later.number - self.number)


def passed(monkeypatch: pytest.MonkeyPatch, between: float, boundaries: int) -> tuple[list[str], list[int]]:
    """Return the label after each boundary, and the events that the host waited for."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.waited, FakeEvent.recorded, FakeEvent.between = [], 0, between
    watch = alone(device=torch.device("cuda"))
    labels = []
    for number in range(1, boundaries + 1):
        watch.pass_boundary(f"layer {number}")
        labels.append(watch.label)
    assert watch.count == boundaries
    return labels, FakeEvent.waited


def test_throttle_long_layers_keeps_host_two_boundaries_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the host two boundaries ahead, and show the label that the device has reached."""
    labels, waited = passed(monkeypatch, 5000.0, 5)
    assert waited == [1, 2, 3]
    assert labels == ["start", "start", "layer 1", "layer 2", "layer 3"]


def test_throttle_short_layers_lets_host_run_two_seconds_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host run forty layers of 50 ms ahead, after two waits that measure a layer."""
    labels, waited = passed(monkeypatch, 50.0, 60)
    assert waited == list(range(1, 21))
    assert labels[-1] == "layer 20"
    assert labels[41] == "layer 2"


class NoStore:
    """A store that fails at every call."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"store.{name} was called")


def test_boundary_makes_no_call_to_the_store() -> None:
    """Pass a boundary, which happens hundreds of times a step, without a call to a store that may be far away."""
    watch = Watch(NoStore(), 0, 2)  # type: ignore[arg-type]
    watch.pass_boundary("step 1")
    assert (watch.count, watch.label) == (1, "step 1")
