"""Readers of the files that an earlier version left, and this version's commands, as the tests of them share both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = Path(__file__).resolve().parent / "files"
ROOT = FILES.parent.parent.parent
Typed = Callable[[str], tuple[int, str, str]]


def read(name: str) -> Any:
    return json.loads((FILES / name).read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """What a process is given to run this version, wherever it runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_alone(words: str) -> tuple[int, str]:
    """`ithaca WORDS`, which begin with the verb, in a process of its own: status and what it printed."""
    command = [sys.executable, "-m", "ithaca", *words.split()]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, env=os.environ | environment(), timeout=600, **pipes)
    return run.returncode, run.stdout


def missing(then: Any, now: Any, where: str = "") -> list[str]:
    """Keys of `then` that `now` lacks, and values of another type. null stands for any type, and lists for their entries."""
    if then is None or now is None:
        return []
    if isinstance(then, dict) and isinstance(now, dict):
        lacking = [f"{where}.{key} is gone" for key in then if key not in now]
        return lacking + [
            fault for key in then if key in now for fault in missing(then[key], now[key], f"{where}.{key}")
        ]
    if isinstance(then, list) and isinstance(now, list):
        pairs = zip(then[:1], now[:1], strict=False)
        return [fault for old, new in pairs for fault in missing(old, new, f"{where}[0]")]
    kinds = [float if isinstance(value, int) and not isinstance(value, bool) else type(value) for value in (then, now)]
    return [] if kinds[0] is kinds[1] else [f"{where} was {kinds[0].__name__} and is {kinds[1].__name__}"]
