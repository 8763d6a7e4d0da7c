"""`StageLoop`: the steps of one stage, with checkpoints and validation between them.

    host      read rows ─ launch step 1 ─ launch step 2 ─ settle 1 ─ launch step 3 ─ settle 2 ─ ...
    device                └ forward backward clip AdamW ┴ forward backward clip AdamW ┴ ...

    launch    agree on the rows, then hand forward, backward, gradient clipping and the optimizer's step to the device
    settle    read loss and gradient norm, count the step as taken, bad or silent, write metrics

Short steps are settled after the next launch, as in the picture, so that the device does not wait for the host. A long
step is settled at once: its loss is shown when it is known, and a bad step ends the run without another long one.

Every rank takes the same decisions, because each decision depends on numbers that are equal on all ranks: the reduced
loss, the norm of all gradients, the progress of the run. The optimizer leaves weights and moments as they are in a bad
step, and is not called in a silent step, since weight decay and momentum would move weights without a gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.clock import CLOCK, Spans
from ithaca.config.schema import RunSettings
from ithaca.loss.by_position import LossByPosition
from ithaca.loss.causal import MicroBatch, agree_on, micro_loss
from ithaca.planning.model.flops import model_flops
from ithaca.state.checkpoint.state_tensors import set_rate
from ithaca.state.optimizer.clipping import clipped_step, gradient_norm
from ithaca.training.async_numbers import AsyncNumbers, record_event
from ithaca.training.run.display import Display
from ithaca.training.run.metrics import Journal
from ithaca.training.run.progress import RunProgress
from ithaca.training.schedule import rate_at
from ithaca.training.session import Session
from ithaca.training.step_log import LaunchedStep, StepLog, StepResult
from ithaca.training.validation import validate
from ithaca.training.watch.watch import Watch

Batch = dict[str, Tensor]
# Steps shorter than this are settled after the next launch.
SHORT_S = 1.0


class StageLoop:
    """One stage, step by step. `save`: called with the progress every `checkpoints.save_every` steps."""

    def __init__(
        self,
        run: RunSettings,
        session: Session,
        watch: Watch,
        journal: Journal,
        display: Display,
        save: Callable[[RunProgress], None],
    ) -> None:
        self.run, self.session, self.watch, self.journal, self.display = run, session, watch, journal, display
        self.save = save
        self.log = StepLog(run, session, journal, display)
        self.by_position = LossByPosition(session.stage.length, session.mesh.device)
        self.progress = RunProgress()
        # True where steps are short: each is settled after the next launch.
        self.defers = False
        self._pending: LaunchedStep | None = None
        # The step settled last, from whose end the next step is timed; None if other work came between.
        self._settled: AsyncNumbers | None = None
        self._last_s = math.inf
        self._reader = ThreadPoolExecutor(1)
        self._read_ahead: tuple[int, Future[list[Batch]]] | None = None

    def run_from(self, progress: RunProgress) -> RunProgress:
        """Run the stage from `progress` to its end."""
        self.progress = progress
        count, validation = self.session.stage.count, self.run.validation
        try:
            while self.progress.step < count:
                self.advance()
                total, ended = self.progress.total, self.progress.step == count
                # Before the checkpoint: a run that is killed here validates again, and goes on with nothing missing.
                if total % validation.every == 0 or ended:
                    self._validate(self.settle())
                if total % self.run.checkpoints.save_every == 0 and not ended:
                    self.save(self.settle())
            return self.progress
        finally:
            self._reader.shutdown(cancel_futures=True)

    def advance(self) -> None:
        """Launch one step; then settle the step before, and this step too if steps are long."""
        self.watch.pass_boundary(f"step {self.progress.total + 1}")
        timed = (self.progress.total + 1) % self.run.metrics.apart_every == 0
        with CLOCK.recording(self.session.mesh.device) if timed else nullcontext() as spans:
            launched = self.launch(self.progress, spans)
        before, self._pending = self._pending, launched
        self.progress = launched.after
        if before is not None:
            self._settle(before)
        if not self.defers:
            self._settle_pending()

    def settle(self) -> RunProgress:
        """Settle the last step and return the progress; time that passes from here on counts for no step."""
        self._settle_pending()
        self._settled = None
        return self.progress

    def _settle_pending(self) -> None:
        launched, self._pending = self._pending, None
        if launched is not None:
            self._settle(launched)

    def _settle(self, launched: LaunchedStep) -> None:
        numbers = launched.numbers.read()
        seconds = launched.numbers.seconds_since(self._settled or launched.began)
        self._settled = launched.numbers
        if launched.targets:
            # A silent step is no measure of a step's time.
            self._last_s = seconds
        apart = None
        if launched.spans is not None:
            self.defers = numbers["longest"] < SHORT_S
            times = launched.spans.seconds()
            apart = {
                "seconds_apart": {**times, "rest": seconds - sum(times.values())},
                "loss_by_position": self.by_position.means_of(numbers["by_position"]),
            }
        loss = numbers["loss"] if launched.targets else None
        result = StepResult(loss, numbers.get("norm"), launched.targets, seconds, launched.flops, apart)
        self.progress = self.progress.counting(targets=result.targets, finite=result.finite)
        self.log.add(launched, result, self.progress)

    def launch(self, progress: RunProgress, spans: Spans | None) -> LaunchedStep:
        """Hand a whole step to the device, without waiting for the device. `spans`: None unless the step is timed."""
        session, stage, device = self.session, self.session.stage, self.session.mesh.device
        began = record_event(device)
        set_seed(step_seed(self.run.seed, progress.total, session.mesh.rank), device)
        rate = rate_at(self.run.stages, session.number, progress.step)
        for group in session.optimizer.param_groups:
            set_rate(group, rate)
        batches: list[Batch] = []
        rows = len(session.rows_of(progress.step))
        micro_batches = agree_on(session.model, self._read(progress.step, batches), rows, session.mesh)
        targets = sum(micro.targets for micro in micro_batches)
        numbers = {"loss": torch.zeros((), device=device)}
        flops = 0.0
        if targets:
            norm = self._learn(micro_batches, targets, numbers["loss"])
            if norm is not None:
                numbers["norm"] = norm
            flops = self._flops(batches)
        if spans is not None:
            numbers["by_position"] = self.by_position.take(session.mesh)
            # All ranks must defer, or not, at the same steps. Filled on the device: a copy to there would block.
            longest = torch.full((), self._last_s, device=device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=session.mesh.world_group)
            numbers["longest"] = longest
        tokens = progress.tokens + stage.batch * stage.length
        after = replace(progress, step=progress.step + 1, total=progress.total + 1, tokens=tokens)
        return LaunchedStep(progress, after, targets, flops, began, AsyncNumbers(device, **numbers), spans)

    def _learn(self, micro_batches: list[MicroBatch], targets: int, loss: Tensor) -> Tensor | None:
        """Run forward, backward and the optimizer's step; add the loss to `loss` and return the gradient norm."""
        session = self.session
        # Gradient accumulation: each row is a micro-batch, and its loss is divided by the targets of the whole step.
        for micro in micro_batches:
            part = micro_loss(session.model, micro, session.mesh, targets, by_position=self.by_position)
            part.backward()
            loss += part.detach()
        self.watch.pass_boundary("gradient norm")
        parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
        norm = gradient_norm(parameters, session.mesh.device)
        clipped_step(session.optimizer, norm, loss, self.run.optimizer.clip)
        session.optimizer.zero_grad(set_to_none=True)
        return norm

    def _read(self, step: int, batches: list[Batch]) -> Iterator[Batch]:
        """Yield this step's rows and append them to `batches`; a thread reads the next step's rows meanwhile."""
        ahead, self._read_ahead = self._read_ahead, None
        rows = ahead[1].result() if ahead is not None and ahead[0] == step else self._rows(step)
        # A stream is read in order, and its state after this step may be saved: no row is read ahead.
        if self.session.feed.rows_per_epoch is not None and step + 1 < self.session.stage.count:
            self._read_ahead = step + 1, self._reader.submit(self._rows, step + 1)
        for batch in rows:
            batches.append(batch)
            yield batch

    def _rows(self, step: int) -> list[Batch]:
        return [self.session.feed.row(row) for row in self.session.rows_of(step)]

    def _flops(self, batches: list[Batch]) -> float:
        """Return the work of all sequence groups, taking other groups' documents to be as long as this group's."""
        documents: Counter[int] = Counter()
        for batch in batches:
            # A document's tokens are contiguous; padding has a negative number and is not attended.
            numbers, counts = torch.unique_consecutive(batch["document_ids"][0], return_counts=True)
            documents.update(counts[numbers >= 0].tolist())
        tokens = len(batches) * self.session.stage.length
        return model_flops(self.session.sizes, documents, tokens) * self.session.mesh.dp

    def _validate(self, progress: RunProgress) -> None:
        if self.session.held_out is None:
            return
        with self.watch.expect_long(10 * self.run.limits.hang, "validation"):
            facts = validate(self.session, self.session.held_out, self.run.validation.rows)
        self.journal.write("validation", progress.total, stage=self.session.number + 1, **facts)
        loss = "none, no token of it is learned," if facts["loss"] is None else f"{facts['loss']:.4f}"
        self.display.say(f"step {progress.total}: validation loss {loss} over {facts['rows']} rows")


def step_seed(seed: int, total: int, rank: int) -> int:
    """Return the random seed of one step on one rank, so that a resumed run draws the same numbers."""
    digest = hashlib.blake2b(f"{seed}/{total}/{rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the two generators that a step draws from; `torch.manual_seed` would query every kind of device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
