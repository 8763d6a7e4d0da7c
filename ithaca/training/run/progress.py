"""How far a run has come: the few numbers from which it can go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaca.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Place:
    """`step` steps of stage `stage` (from 0), `total` of all stages; `bad` steps not taken, `in_a_row` just now; `silent`
    ones, in which there was nothing to learn; `taken` of the stage's steps that moved the weights."""

    stage: int = 0
    step: int = 0
    total: int = 0
    tokens: int = 0
    bad: int = 0
    in_a_row: int = 0
    silent: int = 0
    taken: int = 0


def place_in(facts: dict[str, Any], path: Path) -> Place:
    """Return the progress that a checkpoint holds; CheckpointError if `train` did not write it."""
    try:
        found = dict(facts["place"])
        if not {"data", "fingerprint"} <= facts.keys():
            raise KeyError("data")
        # Earlier versions did not count the steps that were taken of a stage.
        return Place(**{"taken": found["step"], **found})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of `ithaca train` (its facts lack {error}): set output=... to another folder"
        ) from None
