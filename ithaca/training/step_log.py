"""`StepLog`: a line of metrics for a settled step, and the warnings and errors about steps that were not taken.

good step      loss and gradient norm are finite                 taken
bad step       one of them is not finite                         not taken; too many in a row end the run
silent step    no label was learned (all -100): loss is null     not taken, and no fault
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from ithaca.attention.clock import Spans
from ithaca.config.schema import RunSettings
from ithaca.errors import BadStepsError
from ithaca.mesh import Mesh
from ithaca.planning.machine.hardware import find_device
from ithaca.planning.model.flops import utilisation
from ithaca.training.async_numbers import AsyncNumbers
from ithaca.training.run.display import Display
from ithaca.training.run.metrics import Journal
from ithaca.training.run.progress import RunProgress
from ithaca.training.run.used_memory import NEARLY_FULL, full_share, held_bytes, memory_by_kind
from ithaca.training.schedule import rate_at
from ithaca.training.session import Session

logger = logging.getLogger("ithaca")


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was handed to the device. `began`: a `record_event`; `numbers`: on their way to the host.

    `spans`: times of exchange and attention, None unless the metrics line of this step has them.
    """

    before: RunProgress
    after: RunProgress
    targets: int
    flops: float
    began: Any
    numbers: AsyncNumbers
    spans: Spans | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of a settled step. `loss`: None for a silent step. `norm`: None if gradients were applied in backward.

    `apart`: seconds by part and loss by position; None unless the metrics line of this step has them.
    """

    loss: float | None
    norm: float | None
    targets: int
    seconds: float
    flops: float
    apart: dict[str, Any] | None

    @property
    def finite(self) -> bool:
        return all(math.isfinite(number) for number in (self.loss, self.norm) if number is not None)


class StepLog:
    """The record of one stage's steps in metrics, on the display and in warnings."""

    def __init__(self, run: RunSettings, session: Session, journal: Journal, display: Display) -> None:
        self.run, self.session, self.journal, self.display = run, session, journal, display
        self.peak = _device_peak(session.mesh)
        self.bytes_by_tensor_kind = held_bytes(session.model, session.optimizer)
        self.warned = False

    def add(self, launched: LaunchedStep, result: StepResult, progress: RunProgress) -> None:
        """Record a settled step; BadStepsError if the run has to end. `progress`: with this step counted."""
        self._record(launched, result)
        if not result.targets:
            # Only the first silent step of a run is printed; the metrics have all of them.
            if progress.silent == 1:
                self.display.say(
                    f"step {launched.after.total}: no token of its rows is learned (all labels are -100), so it is not "
                    f"taken; such steps have loss null and targets 0 in {self.journal.file} and are counted at the end; "
                    f"its rows: {self._describe_rows(launched)}"
                )
        elif not result.finite:
            self._warn_bad(launched, result, progress.in_a_row)

    def _record(self, launched: LaunchedStep, result: StepResult) -> None:
        session, metrics = self.session, self.run.metrics
        before, after = launched.before, launched.after
        # The first and the last step of a stage have a line whatever `metrics.every` is.
        ends = before.step == 0 or after.step == session.stage.count
        if after.total % metrics.every and result.apart is None and result.finite and not ends:
            return
        if not self.bytes_by_tensor_kind["optimizer"]:
            # AdamW makes its moments in the first step.
            self.bytes_by_tensor_kind = held_bytes(session.model, session.optimizer)
        memory = memory_by_kind(self.bytes_by_tensor_kind, session.mesh)
        # Throughput in tokens a second, over all sequence groups; a silent step has none.
        speed = session.stage.batch * session.stage.length / result.seconds if result.targets else None
        facts: dict[str, Any] = {
            "stage": session.number + 1,
            "length": session.stage.length,
            "loss": result.loss,
            # The learning rate of the step.
            "rate": rate_at(self.run.stages, session.number, before.step),
            "gradient_norm": result.norm,
            "tokens": after.tokens,
            "targets": result.targets,
            "seconds": result.seconds,
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed and speed / session.mesh.world,
            "memory_gib": memory,
        }
        if self.peak and result.targets:
            facts["utilisation"] = utilisation(result.flops, result.seconds, session.mesh.world, self.peak)
        self.journal.write("step", after.total, **facts | (result.apart or {}))
        self.display.step(after, facts)
        share = full_share(memory, session.mesh)
        if share > NEARLY_FULL and not self.warned:
            self.warned = True
            logger.warning("memory: %.0f%% of the device is in use; a longer batch may not fit", 100 * share)

    def _warn_bad(self, launched: LaunchedStep, result: StepResult, in_a_row: int) -> None:
        after, rate = launched.after, f"stages.{self.session.number}.lr"
        rows = self._describe_rows(launched)
        text = f"step {after.total}: loss {result.loss}, gradient norm {result.norm}"
        if self.run.optimizer.in_backward:
            raise BadStepsError(
                f"{text}, and optimizer.in_backward had stepped with it: the last checkpoint is kept; lower {rate}, look at "
                f"{rows}, or begin a run with optimizer.in_backward=false, which leaves such steps out"
            )
        text += ": the step is not taken"
        logger.warning("%s; its rows on this rank: %s", text, rows)
        self.journal.write("event", after.total, event="bad step", loss=str(result.loss), rows=rows)
        if in_a_row >= self.run.limits.bad_steps:
            raise BadStepsError(
                f"{text}, {in_a_row} in a row: the last checkpoint is kept; lower {rate}, look at {rows}, or raise "
                "limits.bad_steps, and the same command goes on from there"
            )

    def _describe_rows(self, launched: LaunchedStep) -> str:
        return "; ".join(self.session.feed.describe(row) for row in self.session.rows_of(launched.before.step))


def _device_peak(mesh: Mesh) -> float | None:
    """Return the card's peak FLOP/s by its data sheet; None without such a figure."""
    if mesh.device.type != "cuda":
        return None
    try:
        return find_device(torch.cuda.get_device_name(mesh.device)).peak * 1e12
    except Exception:
        logger.info("no peak known for %s: utilisation is left out", torch.cuda.get_device_name(mesh.device))
        return None
