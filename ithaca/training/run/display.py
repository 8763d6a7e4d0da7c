"""Progress of a run on the terminal: a bar with loss, speed, memory and time left; in a log file, a line every 10 s.

Only rank 0 shows anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ithaca.training.run.progress import RunProgress

LOG_INTERVAL_S = 10.0


class Display:
    """The progress bar of a run, and the lines printed beside the bar."""

    def __init__(self, *, shows: bool, stages: int) -> None:
        self.shows, self.stages = shows, stages
        self.console = Console(stderr=True)
        self.live = shows and self.console.is_terminal
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.logged_at = 0.0

    def stage(self, number: int, length: int, steps: int, done: int, epochs: float | None) -> None:
        """Start the bar of a stage of which `done` steps are done; `epochs`: of all its steps, None if not known."""
        self.close()
        text = f"stage {number + 1} of {self.stages}: {length:,} tokens a row, {steps} steps"
        text += "" if epochs is None else f", {epochs:,.2f} epochs"
        self.say(text + (f", going on after {done}" if done else ""))
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

    def step(self, progress: RunProgress, facts: Mapping[str, Any]) -> None:
        if not self.shows:
            return
        memory = facts["memory_gib"]
        # A silent step has neither a loss nor a speed.
        learned = facts["loss"] is not None
        text = f"loss {facts['loss']:.4f}  {facts['tokens_per_second']:,.0f} tok/s" if learned else "nothing to learn"
        text += f"  {memory.get('peak', memory['process']):.1f} GiB"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=progress.step, text=text)
        elif time.monotonic() - self.logged_at > LOG_INTERVAL_S:
            self.logged_at = time.monotonic()
            self._print(f"step {progress.total}  {text}")

    def say(self, text: str) -> None:
        if self.shows:
            self._print(text)

    def note(self, text: str) -> None:
        """Print on a terminal, but not in a log file, the beginning of work that takes a while."""
        if self.live:
            self._print(f"{text} ...")

    def _print(self, text: str) -> None:
        # Brackets in a path are no markup. A log's lines are not wrapped, so that a path can be copied from a line.
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = self.task = None
