"""The run's folder: where its files are, who may write there, and whether a run found there is this one.

    run.yaml  metrics.jsonl  checkpoints/  stages/  export/  loss.png  lock

Invariant: one job at a time. The lock is the operating system's, held by the first rank, so it ends with the process,
however that ends. A folder that holds a run is resumed only by a run that learns the same.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from ithaca.config import Run, dump_run, read_run
from ithaca.errors import ConfigError

# What may differ when a run is resumed: where and how it runs, not what it learns.
_FREE = ("mesh", "memory", "checkpoints", "metrics", "limits", "launch", "output", "data.workers", "data.cache",
         "data.bad_share", "validation.sources", "validation.every", "validation.rows")  # fmt: skip
# In a stage its degree, and the course of the rate: a run that diverged goes on with a lower one.
_FREE_IN_STAGE = ("sp", "lr", "schedule", "warmup", "final")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def picture(self) -> Path:
        return self.root / "loss.png"

    def stage(self, number: int, length: int) -> Path:
        """Where stage `number` (from 0) leaves its model."""
        return self.root / "stages" / f"{number + 1}-{length}"

    def put(self, target: Path, write: Callable[[Path], object]) -> None:
        """Have a folder written whole or not at all; one that is there stays."""
        if target.exists():
            return
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        part.rename(target)

    def name_last(self, number: int, length: int) -> None:
        """`export/` is the last stage's model; what somebody else put there is left alone."""
        target = self.stage(number, length).relative_to(self.root)
        if self.export.is_symlink():
            self.export.unlink()
        if not self.export.exists():
            self.export.symlink_to(target, target_is_directory=True)

    def model(self, stages: int) -> Path:
        """Where the model is after `stages` stages: `export/`, or its own folder where something else is in the way."""
        own = next((self.root / "stages").glob(f"{stages}-*"))
        return self.export if self.export.resolve() == own.resolve() else own

    def lock(self) -> IO[str]:
        """Hold the folder; keep what is returned open for as long as the run lives."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            held = (self.root / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output {self.root} cannot be written ({error.strerror}): set output=...") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise ConfigError(
                f"{self.root} is in use by another run: wait for it to end, or set output=... to another folder"
            ) from None
        return held

    def refuse_another(self, run: Run) -> None:
        """Refuse a folder that holds steps of another run; where none is saved there is nothing to lose."""
        if not self.settings.exists() or not any(self.checkpoints.glob("step-*")):
            return
        if named := difference(self._settled(), run):
            raise ConfigError(
                f"{self.root} holds a run with another {named}: set output=... to a new folder, or put {named} back"
            )

    def _settled(self) -> Run:
        try:
            content = yaml.safe_load(self.settings.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ConfigError("it holds no settings")
            return read_run(content)
        except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(
                f"{self.settings}, by which a run is known again, cannot be read ({' '.join(str(error).split())}): "
                "remove it to go on, or set output=... to a new folder"
            ) from None

    def new_rates(self, run: Run) -> list[str]:
        """Settings of stages by which the rate will take another course than the run so far was to have."""
        if not self.settings.exists():
            return []
        pairs = zip(self._settled().stages, run.stages, strict=False)
        courses = [name for name in _FREE_IN_STAGE if name != "sp"]
        return [
            f"stages.{at}.{n}" for at, (a, b) in enumerate(pairs) for n in courses if getattr(a, n) != getattr(b, n)
        ]

    def leave_settings(self, run: Run) -> None:
        """The resolved settings, whole or not at all."""
        part = self.settings.with_name(".run.yaml.part")
        part.write_text(dump_run(run), encoding="utf-8")
        part.rename(self.settings)


def difference(before: Run, now: Run) -> str | None:
    """The first setting in which two runs would learn otherwise; stages may be added."""
    old, new = before.model_dump(), now.model_dump()
    for key in old:
        for name in _changed(key, old[key], new[key]):
            if key not in (*_FREE, "stages") and name not in _FREE:
                return name
    for at, (a, b) in enumerate(zip(old["stages"], new["stages"], strict=False)):
        for name in a:
            if name not in _FREE_IN_STAGE and a[name] != b[name]:
                return f"stages.{at}.{name}"
    return None if len(new["stages"]) >= len(old["stages"]) else f"stages.{len(new['stages'])}"


def _changed(key: str, old: Any, new: Any) -> list[str]:
    """What differs in a section, or the section itself where one of the two has none."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [f"{key}.{name}" for name in old if old[name] != new[name]]
    return [key] if old != new else []
