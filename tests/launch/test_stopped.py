"""Ctrl-C and SIGTERM at any moment: one line, a status that shells know, nothing left behind, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ithaca.cli.help_text import EPILOGS
from ithaca.launch.stopped import exit_when_stopped

ROOT = Path(__file__).resolve().parents[2]
# The verb stands for any: what it does here is to say that it has begun, and to wait.
PLANTED = """
import sys, types, time
sys.argv = ["ithaca", VERB]
import ithaca.cli
from ithaca.launch.stopped import cleaned_if_stopped, command_signals, exit_when_stopped

def begun(): print("begun", flush=True)

BODY
"""
IMPORTING = """
import importlib.abc, importlib.machinery
class Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "slow" else None
    def exec_module(self, module):
        try:
            begun()
            time.sleep(60)
        except BaseException:
            print("swallowed", flush=True)
sys.meta_path.insert(0, Slow())
with command_signals(last=True), exit_when_stopped(sys.argv[1]), cleaned_if_stopped(lambda: print("cleaned", flush=True)):
    import slow
    time.sleep(60)
"""
BEFORE = "with command_signals(last=True):\n    begun()\n    time.sleep(60)"
WORKING = """
try:
    with command_signals(last=True), exit_when_stopped(sys.argv[1]):
        try:
            begun()
            time.sleep(60)
        finally:
            print("cleaned", flush=True)
except BaseException as stop:
    sys.exit(stop.exit_code)
"""
DONE = "with command_signals(last=True):\n    pass\nbegun()\ntime.sleep(60)"
FORKED = """
import os
with command_signals(last=True):
    if os.fork() == 0:
        os.kill(os.getpid(), 15)
    begun()
    time.sleep(60)
"""


def stopped(verb: str, body: str, number: int = signal.SIGINT) -> tuple[int, str, str]:
    script = PLANTED.replace("VERB", repr(verb)).replace("BODY", body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.mark.parametrize(
    ("verb", "body", "number", "status", "out", "said"),
    [
        ("export", IMPORTING, signal.SIGINT, 130, "cleaned\n", "the checkpoint is as it was"),
        ("verify", BEFORE, signal.SIGINT, 130, "", "it leaves nothing behind"),
        ("prepare", WORKING, signal.SIGINT, 130, "cleaned\n", "stay in the cache"),
        ("rehearse", BEFORE, signal.SIGTERM, 143, "", "it leaves nothing behind"),
        ("train", BEFORE, signal.SIGTERM, 75, "", "no step was under way"),
        ("train", BEFORE, signal.SIGUSR1, 75, "", "no step was under way"),
    ],
)
def test_signal_in_a_verb_ends_it_with_one_line(
    verb: str, body: str, number: int, status: int, out: str, said: str
) -> None:
    found = stopped(verb, body, number)
    assert found[:2] == (status, out)
    assert found[2].startswith(f"ithaca: {verb} was stopped before its end: ")
    assert said in found[2]
    assert found[2].count("\n") == 1


def test_signal_after_a_verb_prints_nothing() -> None:
    assert stopped("plan", DONE) == (130, "", "")


def test_ended_forked_process_prints_nothing() -> None:
    status, out, err = stopped("plan", FORKED)
    assert (status, out, err.count("\n")) == (130, "", 1)


def test_signal_ignored_by_shell_stays_ignored() -> None:
    body = "import signal\nsignal.signal(2, signal.SIG_IGN)\nwith command_signals(last=True):\n    begun()\n    time.sleep(1)"
    assert stopped("plan", body) == (0, "", "")


def test_interrupted_verb_exits_130_as_its_help_says(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop, exit_when_stopped("plan"):
        raise KeyboardInterrupt
    assert stop.value.exit_code == 130
    assert capfd.readouterr().err.startswith("ithaca: plan was stopped before its end")
    assert all("130 after Ctrl-C" in text for text in EPILOGS.values())


def test_command_line_handles_signals_before_slow_imports() -> None:
    code = "import sys; import ithaca.cli; print({'typer', 'pydantic', 'torch', 'rich', 'yaml'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"
