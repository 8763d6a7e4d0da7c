"""Tests of locks that leave no file behind, and of the leftovers of killed holders."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from ithaca.data.sources.file_locks import clear_leftovers, locked, take

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NAME = "0123456789abcdef01234567"
# Adds one to a number in a file, slowly, a given number of times; only a lock makes the sum right.
ADDER = """
import sys, time
from pathlib import Path
from ithaca.data.sources.file_locks import clear_leftovers, locked
folder = Path(sys.argv[1])
for _ in range(int(sys.argv[2])):
    clear_leftovers(folder)
    with locked(folder / "0123456789abcdef01234567.lock"):
        count = int((folder / "count").read_text())
        time.sleep(0.001)
        (folder / "count").write_text(str(count + 1))
"""
HOLDER = """
import sys, time
from pathlib import Path
from ithaca.data.sources.file_locks import locked
folder = Path(sys.argv[1])
with locked(folder / "0123456789abcdef01234567.lock"):
    (folder / ".0123456789abcdef01234567.part").mkdir()
    print("held", flush=True)
    time.sleep(600)
"""


def start(program: str, *words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, env=ENVIRONMENT)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_lock_with_removed_file_still_admits_one(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    adders = [start(ADDER, tmp_path, 60) for _ in range(4)]
    for adder in adders:
        adder.communicate(timeout=120)
    assert [adder.returncode for adder in adders] == [0] * 4
    assert (tmp_path / "count").read_text() == "240"
    assert os.listdir(tmp_path) == ["count"]


def test_leftovers_of_killed_holder_go_and_living_ones_stay(tmp_path: Path) -> None:
    holder = start(HOLDER, tmp_path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / "notes.lock").touch()
        before = sorted(os.listdir(tmp_path))
        clear_leftovers(tmp_path)
        assert sorted(os.listdir(tmp_path)) == before
        assert take(tmp_path / f"{NAME}.lock", wait=False) is None
    finally:
        end(holder)
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["notes.lock"]


def test_lock_is_free_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / f"{NAME}.lock"):
            assert os.listdir(tmp_path) == [f"{NAME}.lock"]
        assert os.listdir(tmp_path) == []


def test_holder_killed_at_any_time_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    draw = random.Random(3)
    for _ in range(6):
        adder = start(ADDER, tmp_path, 10_000)
        time.sleep(draw.uniform(0.2, 0.6))
        end(adder)
        (tmp_path / "count").write_text("0")
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["count"]
