"""What a run has yet to write against what its disk has free, so that a run which cannot end well does not begin.

At its end a run has written, besides what is there: the last `keep` checkpoints, one for every stage, and every stage's
model. Of these the models come last: a disk that is full by then has cost the whole run.

Invariant: nothing that is on the disk already is counted again, so a run that goes on asks for the rest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ithaca.atomic import OVERHEAD, free_bytes
from ithaca.config.schema import RunSettings
from ithaca.errors import CheckpointError
from ithaca.quantities import show_bytes
from ithaca.state.checkpoint.manifest import PINNED, listed
from ithaca.training.run.progress import Place


@dataclass(frozen=True, slots=True)
class Room:
    """How many checkpoints are yet to come that are rotated, and how many stages, each with a checkpoint and a model."""

    rotated: int
    stages: int

    @classmethod
    def of(cls, run: RunSettings, place: Place, checkpoints: Path) -> Room:
        """What a run that stands at `place` will add to the folder of its checkpoints."""
        there = sum(not (path / PINNED).exists() for path in listed(checkpoints))
        kept = min(run.checkpoints.keep, there + _saves(run, place))
        return cls(max(0, kept - there), len(run.stages) - place.stage)

    def check(self, checkpoint: int, model: int, folder: Path) -> None:
        """CheckpointError where `folder` has too little room for checkpoints and models of so many bytes each."""
        needed = OVERHEAD * ((self.rotated + self.stages) * checkpoint + self.stages * model)
        free = free_bytes(folder)
        if free >= needed:
            return
        larger = "set output=... to a folder on a larger disk"
        advice = f"{larger}, or checkpoints.keep=1" if self.rotated > 1 else f"or {larger}"
        raise CheckpointError(
            f"this run will write {_many(self.rotated + self.stages, 'checkpoint')} of {show_bytes(checkpoint)} and "
            f"{_many(self.stages, 'model')} of {show_bytes(model)}, {show_bytes(needed)} in all, and {folder} has "
            f"{show_bytes(free)} free: make room, {advice}"
        )


def model_bytes(model: nn.Module) -> int:
    """Bytes of the exported model, adapters merged in."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _saves(run: RunSettings, place: Place) -> int:
    """Checkpoints between stages' ends that are yet to be written."""
    count, total, done = 0, place.total - place.step, place.step
    for stage in run.stages[place.stage :]:
        end, every = total + stage.count, run.checkpoints.save_every
        count += (end - 1) // every - (total + done) // every
        total, done = end, 0
    return count


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
