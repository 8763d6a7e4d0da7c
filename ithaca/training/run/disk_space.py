"""Disk space that a run still needs, against the free space of its disk, checked before the first step.

At its end a run has written the last `keep` checkpoints, one more for every stage, and every stage's model. The models
are written last: a disk that is full by then would cost the whole run.

Invariant: files that are on the disk already are not counted again, so a resumed run needs space for the rest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ithaca.atomic import OVERHEAD, free_bytes
from ithaca.config.schema import RunSettings
from ithaca.errors import CheckpointError
from ithaca.quantities import plural, show_bytes
from ithaca.state.checkpoint.manifest import PINNED, listed
from ithaca.training.run.progress import RunProgress


@dataclass(frozen=True, slots=True)
class PendingWrites:
    """Files that a run has yet to write: `rotated` checkpoints, and a checkpoint and a model for each of `stages`."""

    rotated: int
    stages: int

    @classmethod
    def of(cls, run: RunSettings, progress: RunProgress, checkpoints: Path) -> PendingWrites:
        """Return the files that the run adds from `progress` on to the folder of its checkpoints."""
        there = sum(not (path / PINNED).exists() for path in listed(checkpoints))
        kept = min(run.checkpoints.keep, there + _count_saves(run, progress))
        return cls(max(0, kept - there), len(run.stages) - progress.stage)

    def check(self, checkpoint: int, model: int, folder: Path) -> None:
        """Raise CheckpointError if `folder` lacks space for checkpoints and models of so many bytes each."""
        needed = OVERHEAD * ((self.rotated + self.stages) * checkpoint + self.stages * model)
        free = free_bytes(folder)
        if free >= needed:
            return
        larger = "set output=... to a folder on a larger disk"
        advice = f"{larger}, or checkpoints.keep=1" if self.rotated > 1 else f"or {larger}"
        raise CheckpointError(
            f"this run will write {plural(self.rotated + self.stages, 'checkpoint')} of {show_bytes(checkpoint)} and "
            f"{plural(self.stages, 'model')} of {show_bytes(model)}, {show_bytes(needed)} in all, and {folder} has "
            f"{show_bytes(free)} free: make room, {advice}"
        )


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of the exported model, adapters merged in."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _count_saves(run: RunSettings, progress: RunProgress) -> int:
    """Return the number of checkpoints yet to come, without those at the stages' ends."""
    count, total, done = 0, progress.total - progress.step, progress.step
    for stage in run.stages[progress.stage :]:
        end, every = total + stage.count, run.checkpoints.save_every
        count += (end - 1) // every - (total + done) // every
        total, done = end, 0
    return count
