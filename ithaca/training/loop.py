"""The steps of one stage: rows, forward, backward, clip, step; saving, validation and metrics between them.

Every rank takes the same decisions, because each is made from numbers that are the same on all ranks: the reduced loss,
the norm of all gradients, the place in the run. A step whose loss or gradient is not finite is not taken: weights and
optimizer stay as they were, its rows are noted, and the next step follows. Neither is one whose rows hold no token to
be learned, all labels being -100: there is no loss to follow, and an optimizer handed zeros would still move weights by
what it remembers and by their decay. It is no fault, so it is counted by itself and its loss is none, not zero.

A step is launched, and settled when its numbers are at hand: at once where steps are long, and where they are short after
the next one was launched, so that the device need not wait for what the host does in between. Before anything that
looks at the place (saving, validation, the end) the last step is settled.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.clock import CLOCK, Spans
from ithaca.config.schema import RunSettings
from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BadStepsError
from ithaca.loss.by_position import LossByPosition
from ithaca.loss.causal import MicroBatch, agree_on, causal_loss, count_tokens, micro_loss
from ithaca.planning.model.flops import model_flops, utilisation
from ithaca.state.checkpoint.state_tensors import set_rate
from ithaca.state.optimizer.clipping import clipped_step, gradient_norm
from ithaca.training.async_numbers import Told, mark
from ithaca.training.run.display import Display
from ithaca.training.run.metrics import (
    NEARLY_FULL,
    Journal,
    device_peak,
    full_share,
    held_bytes,
    memory_by_kind,
)
from ithaca.training.run.progress import Place
from ithaca.training.schedule import rate_at
from ithaca.training.session import Session
from ithaca.training.watch.watch import Watch

logger = logging.getLogger("ithaca")
Batch = dict[str, Tensor]
# Steps shorter than this are settled after the next one was launched; longer ones are told of at once.
SHORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device was handed: where it starts and ends, its targets and work, its numbers to come.

    `spans`: what was clocked in it, where its time by part and the loss by position are wanted.
    """

    before: Place
    after: Place
    targets: int
    flops: float
    began: Any
    told: Told
    spans: Spans | None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave; `norm` is None where gradients were stepped as they came. `apart`: where its time went.

    Without targets there was no step: `loss` is None.
    """

    loss: float | None
    norm: float | None
    targets: int
    seconds: float
    flops: float
    apart: dict[str, Any] | None

    @property
    def good(self) -> bool:
        return all(math.isfinite(number) for number in (self.loss, self.norm) if number is not None)


class StageLoop:
    """One stage, step by step."""

    def __init__(
        self,
        run: RunSettings,
        session: Session,
        watch: Watch,
        journal: Journal,
        display: Display,
        save: Callable[[Place], None],
    ) -> None:
        self.run, self.session, self.watch, self.journal, self.display = run, session, watch, journal, display
        self.save = save
        self.by_position = self._buckets()
        self.peak = device_peak(session.mesh)
        self.held = held_bytes(session.model, session.optimizer)
        self.warned = False
        self.place = Place()
        # Whether a step is settled after the next one was launched; the step launched last; the one settled last, and
        # how long it took.
        self.defers = False
        self._launched: Launched | None = None
        self._settled: Told | None = None
        self._last_s = math.inf
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def go(self, place: Place) -> Place:
        """All steps of the stage that are left, from `place`."""
        stage = self.session.stage
        self.place = place
        try:
            while self.place.step < stage.count:
                place = self._advance(self.place)
                if place.total % self.run.checkpoints.save_every == 0 and place.step < stage.count:
                    self.save(self.settle())
                if place.total % self.run.validation.every == 0 or place.step == stage.count:
                    self.validate(self.settle())
            return self.place
        finally:
            self._reader.shutdown(cancel_futures=True)

    def _advance(self, place: Place) -> Place:
        """Launch a step, and settle it or the one before."""
        self.watch.at(f"step {place.total + 1}")
        wanted = (place.total + 1) % self.run.metrics.apart_every == 0
        with CLOCK.running(self.session.mesh.device) if wanted else nullcontext() as spans:
            launched = self._step(place, spans)
        before, self._launched = self._launched, launched
        self.place = launched.after
        if before is not None:
            self._settle(before)
        if not self.defers:
            self._settle_last()
        return self.place

    def settle(self) -> Place:
        """Where the run is, all steps counted; what follows is not part of a step's time."""
        self._settle_last()
        self._settled = None
        return self.place

    def _settle_last(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            self._settle(launched)

    def _settle(self, launched: Launched) -> None:
        """Hear of a step, count and record it."""
        told = launched.told.read()
        seconds = launched.told.seconds_since(self._settled or launched.began)
        self._settled = launched.told
        # A step that was not taken says nothing of how long one takes.
        self._last_s = seconds if launched.targets else self._last_s
        apart = None
        if launched.spans is not None:
            self.defers = told["longest"] < SHORT_S
            times = launched.spans.seconds()
            apart = {
                "seconds_apart": {**times, "rest": seconds - sum(times.values())},
                "loss_by_position": self.by_position.means_of(told["by_position"]),
            }
        loss = told["loss"] if launched.targets else None
        result = Step(loss, told.get("norm"), launched.targets, seconds, launched.flops, apart)
        self._count(result)
        self._record(launched, result)
        if not result.targets:
            self._note_silent(launched)
        elif not result.good:
            self._note_bad(launched, result)

    def _count(self, result: Step) -> None:
        place = self.place
        if not result.targets:
            # Between two bad steps it makes them no less in a row.
            self.place = replace(place, silent=place.silent + 1)
            return
        good = result.good
        counts = {"bad": place.bad + (not good), "taken": place.taken + good}
        self.place = replace(place, in_a_row=0 if good else place.in_a_row + 1, **counts)

    def _step(self, place: Place, spans: Spans | None) -> Launched:
        """All of a step, handed to the device."""
        session, began = self.session, mark(self.session.mesh.device)
        set_seed(step_seed(self.run.seed, place.total, session.mesh.rank), session.mesh.device)
        rate = rate_at(self.run.stages, session.number, place.step)
        for group in session.optimizer.param_groups:
            set_rate(group, rate)
        batches: list[Batch] = []
        rows = len(session.rows_of(place.step))
        micro_batches = agree_on(session.model, self._read(place.step, batches), rows, session.mesh)
        targets = sum(micro.targets for micro in micro_batches)
        loss, norm = torch.zeros((), device=session.mesh.device), None
        if targets:
            norm = self._learn(micro_batches, targets, loss)
        flops = self._flops(batches) if targets else 0
        tokens = session.stage.batch * session.stage.length
        after = replace(place, step=place.step + 1, total=place.total + 1, tokens=place.tokens + tokens)
        numbers = {"loss": loss} | ({} if norm is None else {"norm": norm}) | ({} if spans is None else self._beside())
        told = Told(session.mesh.device, **numbers)
        return Launched(place, after, targets, flops, began, told, spans)

    def _learn(self, micro_batches: list[MicroBatch], targets: int, loss: Tensor) -> Tensor | None:
        """Forward, backward and the optimizer's step; the loss is added to `loss`, the gradients' norm is given."""
        session = self.session
        for micro in micro_batches:
            part = micro_loss(session.model, micro, session.mesh, targets, by_position=self.by_position)
            part.backward()
            loss += part.detach()
        self.watch.at("gradient norm")
        parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
        norm = gradient_norm(parameters, session.mesh.device)
        clipped_step(session.optimizer, norm, loss, self.run.optimizer.clip)
        session.optimizer.zero_grad(set_to_none=True)
        return norm

    def _beside(self) -> dict[str, Tensor]:
        """Over all ranks: losses by position since the last time, and the longest that a step took."""
        mesh = self.session.mesh
        # All ranks must settle, and stop at, the same steps. Filled on the device: a copy there would be waited for.
        longest = torch.full((), self._last_s, device=mesh.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=mesh.world_group)
        return {"by_position": self.by_position.take(mesh), "longest": longest}

    def _read(self, step: int, batches: list[Batch]) -> Iterator[Batch]:
        """This step's rows, into `batches` too; the next step's are read while this one runs."""
        ahead, self._ahead = self._ahead, None
        rows = ahead[1].result() if ahead is not None and ahead[0] == step else self._rows(step)
        if self.session.feed.rows_per_epoch is not None and step + 1 < self.session.stage.count:
            self._ahead = step + 1, self._reader.submit(self._rows, step + 1)
        for batch in rows:
            batches.append(batch)
            yield batch

    def _rows(self, step: int) -> list[Batch]:
        return [self.session.feed.row(row) for row in self.session.rows_of(step)]

    def _flops(self, batches: list[Batch]) -> float:
        """Work of all sequence groups, taking the others' documents to be as long as this one's."""
        documents: Counter[int] = Counter()
        for batch in batches:
            # A document's tokens stand together; padding has a negative number, and is attended by nobody.
            numbers, counts = torch.unique_consecutive(batch["document_ids"][0], return_counts=True)
            documents.update(counts[numbers >= 0].tolist())
        tokens = len(batches) * self.session.stage.length
        return model_flops(self.session.sizes, documents, tokens) * self.session.mesh.dp

    def _record(self, launched: Launched, result: Step) -> None:
        before, after = launched.before, launched.after
        session = self.session
        # The first and the last of a stage are always told, whatever is asked for.
        ends = before.step == 0 or after.step == session.stage.count
        if after.total % self.run.metrics.every and result.apart is None and result.good and not ends:
            return
        if not self.held["optimizer"]:
            self.held = held_bytes(session.model, session.optimizer)
        memory = memory_by_kind(self.held, session.mesh)
        # A step that was not taken has no speed.
        speed = session.stage.batch * session.stage.length / result.seconds if result.targets else None
        facts: dict[str, Any] = {
            "stage": session.number + 1,
            "length": session.stage.length,
            "loss": result.loss,
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

    def _named(self, step: int) -> str:
        return "; ".join(self.session.feed.describe(row) for row in self.session.rows_of(step))

    def _note_silent(self, launched: Launched) -> None:
        """The first of a run is told of; all of them are in the metrics."""
        if self.place.silent == 1:
            self.display.say(
                f"step {launched.after.total}: no token of its rows is learned (all labels are -100), so it is not taken; "
                f"such steps have loss null and targets 0 in {self.journal.file} and are counted at the end; its rows: "
                f"{self._named(launched.before.step)}"
            )

    def _note_bad(self, launched: Launched, result: Step) -> None:
        after = launched.after
        named = self._named(launched.before.step)
        said = f"step {after.total}: loss {result.loss}, gradient norm {result.norm}"
        if self.run.optimizer.in_backward:
            raise BadStepsError(
                f"{said}, and optimizer.in_backward had stepped with it: the last checkpoint is kept; lower "
                f"stages.{self.session.number}.lr, look at {named}, or begin a run with optimizer.in_backward=false, which "
                "leaves such steps out"
            )
        said += ": the step is not taken"
        logger.warning("%s; its rows on this rank: %s", said, named)
        self.journal.write("event", after.total, event="bad step", loss=str(result.loss), rows=named)
        if self.place.in_a_row >= self.run.limits.bad_steps:
            raise BadStepsError(
                f"{said}, {self.place.in_a_row} in a row: the last checkpoint is kept; lower "
                f"stages.{self.session.number}.lr, look at {named}, or raise limits.bad_steps, and the same command "
                "goes on from there"
            )

    def validate(self, place: Place) -> None:
        """The token mean over held-out rows, sharded as in training."""
        session, feed = self.session, self.session.held_out
        if feed is None:
            return
        many = min(self.run.validation.rows, feed.rows_per_epoch or self.run.validation.rows)
        with self.watch.patient(10 * self.run.limits.hang, "validation"):
            session.model.eval()
            batches = [
                _held_out_row(feed, at, many)
                for at in range(session.mesh.dp_rank, _up(many, session.mesh.dp), session.mesh.dp)
            ]
            targets = count_tokens(batches, session.mesh)
            buckets = self._buckets()
            loss = torch.zeros((), device=session.mesh.device)
            with torch.no_grad():
                for batch in batches:
                    loss += causal_loss(session.model, batch, session.mesh, count=targets, by_position=buckets)
            session.model.train()
        mean = float(loss) if targets else None
        facts = {"loss": mean, "rows": many, "targets": targets, "loss_by_position": buckets.means(session.mesh)}
        self.journal.write("validation", place.total, stage=session.number + 1, **facts)
        told = "none, no token of it is learned," if mean is None else f"{mean:.4f}"
        self.display.say(f"step {place.total}: validation loss {told} over {many} rows")

    def _buckets(self) -> LossByPosition:
        return LossByPosition(self.session.stage.length, self.session.mesh.device)


def _held_out_row(feed: Any, at: int, many: int) -> Batch:
    """Row `at`, or, where the rows do not go round, one from which nothing is learned."""
    row: Batch = feed.row(min(at, many - 1))
    return row if at < many else {**row, "labels": torch.full_like(row["labels"], IGNORE_INDEX)}


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def step_seed(seed: int, total: int, rank: int) -> int:
    """Random numbers of a step are its own, so that a resumed run draws what it would have drawn."""
    digest = hashlib.blake2b(f"{seed}/{total}/{rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def set_seed(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the two generators that a step draws from; it asks every kind of device there is."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
