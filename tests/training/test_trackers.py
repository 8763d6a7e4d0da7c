"""Metrics go to a file always, and to accelerate's trackers where asked: an offline run is read back."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import MetricsSettings
from ithaca.errors import ConfigError
from ithaca.training.run import json_lines
from ithaca.training.run.metrics import Journal
from tests.ranks import run_ranks
from tests.training.runs import small_run


def test_a_resumed_journal_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    journal = Journal(file, MetricsSettings(), writes=True, run={})
    for step in (1, 2, 3):
        journal.write("step", step, loss=float(step))
    journal.flush()
    with file.open("a") as handle:
        handle.write('{"kind": "step", "st')
    journal.resume(2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
    Journal(file, MetricsSettings(), writes=False, run={}).write("step", 9, loss=0.0)
    assert len(file.read_text().splitlines()) == 2


def test_what_is_no_number_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    journal = Journal(file, MetricsSettings(), writes=True, run={})
    journal.write("step", 1, loss=float("nan"), memory_gib={"peak": float("inf")}, loss_by_position=[1.0, float("nan")])
    journal.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(file.read_text(), parse_constant=refuse)
    assert (line["loss"], line["memory_gib"]["peak"], line["loss_by_position"]) == (None, None, [1.0, None])


def test_a_tracker_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import tracking

    class LoggedOut:
        requires_logging_directory = False

        def __init__(self, *_: Any, **__: Any) -> None:
            """Nothing is asked yet."""

        def start(self) -> None:
            raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", LoggedOut)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        Journal(tmp_path / "metrics.jsonl", MetricsSettings(trackers=["wandb"]), writes=True, run={})


def test_a_slow_disk_holds_no_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, free, opened = tmp_path / "metrics.jsonl", threading.Event(), os.open
    monkeypatch.setattr(json_lines.os, "open", lambda *given, **named: free.wait() and opened(*given, **named))
    journal = Journal(file, MetricsSettings(), writes=True, run={})
    for step in (1, 2, 3):
        journal.write("step", step)
    assert not file.exists()
    free.set()
    journal.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_a_full_disk_is_told_of_each_time_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "metrics.jsonl"
    journal = Journal(file, MetricsSettings(), writes=True, run={})
    for first in (1, 4):
        with monkeypatch.context() as disk:
            disk.setattr(json_lines.os, "open", full)
            journal.write("step", first)
            journal.write("step", first + 1)
            journal.flush()
        journal.write("step", first + 2)
        journal.flush()
    journal.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert "metrics.jsonl: lines wait in memory ([Errno 28] No space left on device): make room" in said[0]
    assert "metrics.jsonl goes on: 3 lines that waited for room are written" in said[1]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_is_not_there_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        Journal(tmp_path / "m.jsonl", MetricsSettings(trackers=["trackio"]), writes=True, run={})


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a LevelDB log after seven bytes, in blocks of 32 KiB."""
    assert content.startswith(b":W&B")
    at, block, held = 7, 32_768, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<xxxxHB", content, at)
        if kind == 0:
            break
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield held
            held = b""


def _tracked(text: str, environment: dict[str, str]) -> dict[str, Any]:
    from tests.training.runs import _train

    os.environ.update(environment)
    return _train(text)


@pytest.mark.slow
def test_an_offline_wandb_run_is_read_back(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run = small_run(tmp_path, "tracked", metrics={"trackers": ["wandb", "tensorboard"], "project": "voyage"})
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    got = run_ranks(2, _tracked, run.model_dump_json(), environment)[0]
    wanted = [(line["step"], line["loss"]) for line in got["metrics"] if line["kind"] == "step"]
    (stored,) = Path(run.output).glob("wandb/offline-run-*/*.wandb")
    found = []
    for data in log_records(stored.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        if "step/loss" in items:
            found.append((record.history.step.num, json.loads(items["step/loss"])))
    assert found == wanted
    assert list(Path(run.output).glob("tensorboard/**/events.out.*"))
