"""`RunProgress`: the few numbers of a checkpoint from which a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ithaca.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RunProgress:
    """`step` steps of stage `stage` (from 0) are done, and `total` steps of all stages.

    `bad`: steps not taken because a loss or gradient was not finite, the last `in_a_row` of them without a good step
    between. `silent`: steps not taken because no label was learned. `taken`: steps of this stage that moved the weights.
    """

    stage: int = 0
    step: int = 0
    total: int = 0
    tokens: int = 0
    bad: int = 0
    in_a_row: int = 0
    silent: int = 0
    taken: int = 0

    @property
    def begun_stages(self) -> int:
        """Number of stages that have taken steps."""
        return self.stage + (self.step > 0)

    def counting(self, *, targets: int, finite: bool) -> RunProgress:
        """Return the progress with one settled step counted as silent, taken or bad."""
        if not targets:
            # A silent step between two bad steps does not end their row.
            return replace(self, silent=self.silent + 1)
        if finite:
            return replace(self, taken=self.taken + 1, in_a_row=0)
        return replace(self, bad=self.bad + 1, in_a_row=self.in_a_row + 1)


def read_progress(facts: dict[str, Any], path: Path) -> RunProgress:
    """Return the progress that a checkpoint holds; CheckpointError if `train` did not write the checkpoint."""
    try:
        found = dict(facts["place"])
        if not {"data", "fingerprint"} <= facts.keys():
            raise KeyError("data")
        # Earlier versions did not count the taken steps of a stage.
        return RunProgress(**{"taken": found["step"], **found})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of `ithaca train` (its facts lack {error}): set output=... to another folder"
        ) from None
