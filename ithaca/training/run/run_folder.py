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
from typing import IO

from ithaca.atomic import part_of, replace_folder, write_whole
from ithaca.config.overrides import read_yaml
from ithaca.config.schema import RunSettings, dump_run, read_run
from ithaca.errors import ConfigError
from ithaca.models.files.export_folder import ExportMark, read_mark, write_mark
from ithaca.state.checkpoint.manifest import listed
from ithaca.training.run.changed_settings import Change, advise_changes, begun_stages, refused
from ithaca.training.run.progress import Place


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

    def put(self, target: Path, write: Callable[[Path], object], mark: ExportMark) -> bool:
        """Have a model written whole or not at all; the same model stays, an earlier one of this run gives way.

        Gives False where it stays.
        """
        if target.exists() and self._stays(target, mark):
            return False
        part, old = part_of(target), target.with_name(f".{target.name}.old")
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        write_mark(part, mark)
        replace_folder(part, target, old)
        return True

    def _stays(self, target: Path, mark: ExportMark) -> bool:
        """True for the model of `mark`; a folder of anybody else's is refused."""
        there = read_mark(target)
        if there is None or there.run != mark.run:
            raise ConfigError(
                f"{target} holds what this run did not write, and its model goes there: move it away, and the same command "
                "writes the model"
            )
        return mark.same_model(there)

    def refuse_strangers(self, run: RunSettings, place: Place, identity: str) -> None:
        """Refuse, before the first step, folders of others where a stage's model would go at its end."""
        for number in range(place.stage, len(run.stages)):
            target = self.stage(number, run.stages[number].length)
            there = read_mark(target)
            if target.exists() and (there is None or there.run != identity):
                raise ConfigError(
                    f"{target} holds what this run did not write, and the model of stage {number + 1} goes there: move it "
                    "away, or set output=... to a new folder"
                )

    def identity_there(self) -> str | None:
        """Return the run that left models here; None where there are none."""
        marks = [read_mark(folder) for folder in sorted((self.root / "stages").glob("*-*"))]
        return next((mark.run for mark in marks if mark is not None), None)

    def clear_left(self) -> None:
        """Remove what a killed job of this folder left half written; only the holder of the lock may."""
        for left in (*(self.root / "stages").glob(".*.part"), *(self.root / "stages").glob(".*.old")):
            target = left.with_name(left.name[1:].removesuffix(".old"))
            if left.suffix == ".old" and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)
        for file in (self.settings, self.metrics):
            part_of(file).unlink(missing_ok=True)

    def name_last(self, number: int, length: int) -> None:
        """`export/` is the last stage's model; what somebody else put there is left alone."""
        target = self.stage(number, length).relative_to(self.root)
        if self.export.is_symlink():
            self.export.unlink()
        if not self.export.exists():
            self.export.symlink_to(target, target_is_directory=True)

    def model(self, stages: int) -> Path:
        """Where the model is after `stages` stages: `export/`, or its own folder where something else is in the way."""
        own = next(
            path for path in (self.root / "stages").glob(f"{stages}-*") if path.name.partition("-")[2].isdecimal()
        )
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

    def refuse_another(self, run: RunSettings, place: Place | None = None) -> None:
        """Refuse a folder that holds steps of another run; where none is saved there is nothing to lose.

        `place`: where the run stands; until that is known, stages are not looked at.
        """
        if not self.settings.exists() or not listed(self.checkpoints):
            return
        begun = 0 if place is None else begun_stages(place)
        if found := refused(self._settled(), run, begun):
            raise ConfigError(_another(self.root, found))

    def _settled(self) -> RunSettings:
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

    def new_course(self, run: RunSettings, place: Place) -> list[str]:
        """Return what is said of settings by which the rate will take another course than the run so far was to have."""
        return advise_changes(self._settled(), run, place) if self.settings.exists() else []

    def leave_settings(self, run: RunSettings) -> None:
        """Write the resolved settings, whole or not at all."""
        write_whole(self.settings, dump_run(run))


def _another(root: Path, found: list[Change]) -> str:
    """What is said of a folder whose run learned otherwise: every setting with both values."""
    told = "; ".join(map(str, found[:8])) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
    back = "it" if len(found) == 1 else "them"
    return f"{root} holds a run with other settings: {told}: put {back} back, or set output=... to a new folder"
