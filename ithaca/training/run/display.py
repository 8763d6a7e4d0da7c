"""What a run shows while it runs: a bar with loss, speed, memory and time left, or a line now and then.

Only the first rank shows anything. On a terminal the bar is redrawn; in a log file a line is printed every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ithaca.training.run.progress import Place

EVERY = 10.0


class Display:
    """The face of a run."""

    def __init__(self, *, shows: bool, stages: int) -> None:
        self.shows, self.stages = shows, stages
        self.console = Console(stderr=True)
        self.live = shows and self.console.is_terminal
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.said = 0.0

    def stage(self, number: int, length: int, steps: int, done: int, epochs: float | None) -> None:
        """A stage begins, or goes on after `done` of its steps; `epochs`: of all of them, where that is known."""
        self.close()
        whole = f"stage {number + 1} of {self.stages}: {length:,} tokens a row, {steps} steps"
        self.say(whole + ("" if epochs is None else f", {epochs:,.2f} epochs") + _gone_on(done))
        if self.live:
            self.bar = Progress(
                TextColumn("stage {task.fields[stage]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=steps, completed=done, stage=number + 1, text="")

    def step(self, place: Place, facts: Mapping[str, Any]) -> None:
        if not self.shows:
            return
        memory = facts["memory_gib"]
        # Of a step in which nothing was learned there is neither.
        learned = facts["loss"] is not None
        told = f"loss {facts['loss']:.4f}  {facts['tokens_per_second']:,.0f} tok/s" if learned else "nothing to learn"
        text = f"{told}  {memory.get('peak', memory['process']):.1f} GiB"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=place.step, text=text)
        elif time.monotonic() - self.said > EVERY:
            self.said = time.monotonic()
            self._print(f"step {place.total}  {text}")

    def say(self, text: str) -> None:
        if self.shows:
            self._print(text)

    def note(self, text: str) -> None:
        """What is about to take a while, for somebody who watches: a log is better without."""
        if self.live:
            self._print(f"{text} ...")

    def _print(self, text: str) -> None:
        # A path may hold brackets, which are no markup; a log's lines are whole, so that a path can be copied from one.
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = self.task = None


def _gone_on(done: int) -> str:
    return f", going on after {done}" if done else ""
