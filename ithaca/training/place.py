"""How far a run has come: the few numbers from which it can go on."""

from __future__ import annotations

from dataclasses import dataclass


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
