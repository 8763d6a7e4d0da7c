"""The run's folder: paths of its files, the lock on it, and the refusal of a folder that holds another run.

    output/
      run.yaml  metrics.jsonl  loss.png  lock
      checkpoints/step-00000200/          stages/1-4096/  (the model after stage 1)          export -> the last stage

Invariant: one job at a time. Rank 0 holds a lock of the operating system, which ends with the process. A folder that
holds a run is resumed only by a run with the same model, data and optimizer (`changed_settings.py`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from ithaca.atomic import part_of, replace_folder, write_whole
from ithaca.config.overrides import read_yaml
from ithaca.config.schema import RunSettings, dump_run, read_run
from ithaca.errors import ConfigError
from ithaca.models.files.export_folder import ExportMark, read_mark, write_mark
from ithaca.state.checkpoint.manifest import listed
from ithaca.training.run.changed_settings import describe_rate_changes, refused_changes
from ithaca.training.run.progress import RunProgress


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

    @property
    def _lock_file(self) -> Path:
        return self.root / "lock"

    def stage(self, number: int, length: int) -> Path:
        """Return the folder for the model after stage `number` (from 0)."""
        return self.root / "stages" / f"{number + 1}-{length}"

    def write_export(self, target: Path, write: Callable[[Path], object], mark: ExportMark) -> bool:
        """Write a model whole or not at all; return False if the same model is there already.

        An earlier model of this run is replaced; anybody else's folder is refused.
        """
        if target.exists():
            there = read_mark(target)
            if there is None or there.run != mark.run:
                raise ConfigError(
                    f"{target} holds what this run did not write, and its model goes there: move it away, and the same "
                    "command writes the model"
                )
            if mark.same_model(there):
                return False
        part, old = part_of(target), target.with_name(f".{target.name}.old")
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        write_mark(part, mark)
        replace_folder(part, target, old)
        return True

    def refuse_foreign_exports(self, run: RunSettings, progress: RunProgress, identity: str) -> None:
        """Refuse, before the first step, anybody else's folder where a stage's model would be written."""
        for number in range(progress.stage, len(run.stages)):
            target = self.stage(number, run.stages[number].length)
            there = read_mark(target)
            if target.exists() and (there is None or there.run != identity):
                raise ConfigError(
                    f"{target} holds what this run did not write, and the model of stage {number + 1} goes there: move it "
                    "away, or set output=... to a new folder"
                )

    def find_identity(self) -> str | None:
        """Return the identity of the run that wrote the models in this folder; None without models."""
        marks = [read_mark(folder) for folder in sorted((self.root / "stages").glob("*-*"))]
        return next((mark.run for mark in marks if mark is not None), None)

    def clear_left(self) -> None:
        """Remove half-written files of a killed job; only the holder of the lock may call this."""
        for left in (*(self.root / "stages").glob(".*.part"), *(self.root / "stages").glob(".*.old")):
            target = left.with_name(left.name[1:].removesuffix(".old"))
            if left.suffix == ".old" and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)
        for file in (self.settings, self.metrics):
            part_of(file).unlink(missing_ok=True)

    def link_export(self, number: int, length: int) -> None:
        """Point `export/` to the model of stage `number`; a folder that stands there already stays."""
        target = self.stage(number, length).relative_to(self.root)
        if self.export.is_symlink():
            self.export.unlink()
        if not self.export.exists():
            self.export.symlink_to(target, target_is_directory=True)

    def model(self, stages: int) -> Path:
        """Return the model's folder after `stages` stages: `export/`, or its own if `export/` is another folder."""
        folders = (self.root / "stages").glob(f"{stages}-*")
        own = next(path for path in folders if path.name.partition("-")[2].isdecimal())
        return self.export if self.export.resolve() == own.resolve() else own

    def lock(self) -> IO[str]:
        """Lock the folder for as long as the returned file is open."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            held = self._lock_file.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output {self.root} cannot be written ({error.strerror}): set output=...") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `remove_unused` of another job may have removed the file between the two calls.
            if not os.path.samestat(os.fstat(held.fileno()), self._lock_file.stat()):
                raise BlockingIOError
        except OSError:
            held.close()
            raise ConfigError(
                f"{self.root} is in use by another run: wait for it to end, or set output=... to another folder"
            ) from None
        return held

    def missing(self) -> list[Path]:
        """Return the folders that `lock` will make, the innermost first."""
        return [path for path in (self.root, *self.root.parents) if not path.exists()]

    def remove_unused(self, made: Iterable[Path]) -> None:
        """Remove the lock and the folders `made` by a start that wrote no file; its lock must still be held."""
        with suppress(OSError):
            # `rmdir` refuses a folder that holds anything.
            self.checkpoints.rmdir()
        if {path.name for path in self.root.iterdir()} == {self._lock_file.name}:
            self._lock_file.unlink()
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()

    def refuse_another(self, run: RunSettings, progress: RunProgress | None = None) -> None:
        """Refuse a folder with checkpoints of another run. `progress`: None until known, and stages are not compared."""
        if not self.settings.exists() or not listed(self.checkpoints):
            return
        found = refused_changes(self._read_settings(), run, 0 if progress is None else progress.begun_stages)
        if found:
            more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
            raise ConfigError(
                f"{self.root} holds a run with other settings: {'; '.join(map(str, found[:8]))}{more}: put "
                f"{'it' if len(found) == 1 else 'them'} back, or begin a second run with output={self._free_name()}"
            )

    def _free_name(self) -> Path:
        """Return the path of a folder beside this one that does not exist."""
        names = (self.root.with_name(f"run-{number}" if number > 2 else "second") for number in count(2))
        return next(path for path in names if not path.exists())

    def describe_rate_changes(self, run: RunSettings, progress: RunProgress) -> list[str]:
        """Return a warning for each setting that changes the learning rates which the stored settings would give."""
        return describe_rate_changes(self._read_settings(), run, progress) if self.settings.exists() else []

    def _read_settings(self) -> RunSettings:
        try:
            content = read_yaml(self.settings.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ConfigError("it holds no settings")
            return read_run(content)
        except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise ConfigError(
                f"{self.settings}, by which a run is known again, cannot be read ({' '.join(str(error).split())}): "
                "remove it to go on, or set output=... to a new folder"
            ) from None

    def write_settings(self, run: RunSettings) -> None:
        """Write the resolved settings, whole or not at all."""
        write_whole(self.settings, dump_run(run))
