"""`RunSaver`: checkpoints of a run, and the model that is exported from the checkpoint at a stage's end.

every `save_every` steps    a checkpoint, of which the last `keep` stay; a full disk costs this checkpoint only
at a stage's end            a checkpoint that stays, and an exported model; a full disk ends the run
when the run is stopped     a checkpoint of the last whole step; a full disk leaves the checkpoint before it
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial

from safetensors import SafetensorError

from ithaca.errors import CheckpointError, UntrainedError, UnwrittenError
from ithaca.models.files.export_checkpoint import DESCRIPTION, describe_model, export_checkpoint
from ithaca.models.files.export_folder import RUN, mark_of
from ithaca.models.files.model_origin import ORIGIN
from ithaca.state.checkpoint.state_tensors import fingerprint
from ithaca.training.run.progress import RunProgress
from ithaca.training.session import Session
from ithaca.training.start import RunContext, RunStart

logger = logging.getLogger("ithaca")


class RunSaver:
    """Writer of a run's checkpoints and models; every rank makes the same calls. `saved`: progress saved last."""

    def __init__(self, context: RunContext, start: RunStart) -> None:
        self.context, self.start = context, start
        self.saved: RunProgress | None = None

    def save(self, session: Session, progress: RunProgress, *, keep: bool = False, wait: bool = False) -> None:
        """Save a checkpoint; if the disk is full, warn, or raise UnwrittenError with `keep` or `wait`."""
        context, start, prepared = self.context, self.start, self.start.prepared
        ended = progress.stage != session.number
        feed = session.feed.state((session.stage.count if ended else progress.step) * session.stage.batch)
        facts = {
            RUN: start.identity,
            ORIGIN: start.origin,
            "place": asdict(progress),
            "counts": [stage.count for stage in context.run.stages[: progress.stage]],
            "fingerprint": fingerprint(session.model),
            DESCRIPTION: describe_model(session.model, folder=start.source, tokenizer=start.tokenizer),
            "data": prepared.fingerprint,
            "sources": prepared.sources,
            "listings": prepared.listings,
            "feed": {} if ended else feed,
            "ended": feed if ended else {},
            "degrees": {"dp": session.mesh.dp, "sp": session.mesh.sp},
        }
        with context.watch.expect_long(3600.0, "checkpoint"):
            # A run that resumes from this checkpoint finds the metrics of all steps before it.
            context.journal.flush()
            try:
                context.checkpoints.save(progress.total, session.tensors, facts, pin=keep, wait=wait or keep)
                self.saved = progress
            except CheckpointError as error:
                if keep or wait:
                    raise UnwrittenError(str(error)) from None
                if context.mesh.rank == 0:
                    logger.warning("step %d is not saved: %s", progress.total, error)
                context.journal.write("event", progress.total, event="not saved", reason=str(error))

    def end_stage(self, session: Session, progress: RunProgress) -> RunProgress:
        """Save a checkpoint that stays and export its model; return the progress at the next stage's start."""
        with self.context.watch.expect_long(3600.0, "export"):
            if not progress.taken:
                raise UntrainedError(
                    f"stage {progress.stage + 1} is over and none of its {session.stage.count} steps was taken "
                    f"({progress.bad} had a loss or gradient that is not finite, {progress.silent} nothing to learn): no "
                    f"model is written; lower stages.{progress.stage}.lr, or look at the model and the data"
                )
            progress = replace(progress, stage=progress.stage + 1, step=0, taken=0)
            self.save(session, progress, keep=True)
            self.export(progress)
        return progress

    def export(self, progress: RunProgress) -> None:
        """Export the model of the stage that ended at `progress`; also after a restart, if the run ended before that."""
        context, number = self.context, progress.stage - 1
        path = context.checkpoints.at(progress.total)
        target = context.folder.stage(number, context.run.stages[number].length)
        if RUN not in context.checkpoints.read_facts(path) and target.exists():
            return  # An earlier version wrote both; its models carry no mark to compare.

        def write() -> bool:
            try:
                return context.folder.write_export(target, partial(export_checkpoint, path), mark_of(path))
            except (OSError, SafetensorError) as error:
                raise UnwrittenError(
                    f"{target} was not written ({error}), but {path}, which it is made of, is whole: make room, and the same "
                    "command writes it"
                ) from None

        written = context.on_rank_0(write)
        context.display.close()
        if written:
            context.display.say(f"stage {progress.stage} is done: {target} loads in plain transformers")

    def save_at_stop(self, session: Session, progress: RunProgress) -> str | None:
        """Save the progress of a stopped run, unless it is saved; return the reason if it cannot be saved."""
        if progress == self.saved:
            return None
        if self.context.run.optimizer.in_backward:
            return "optimizer.in_backward had taken a part of the next step"
        try:
            self.save(session, progress, wait=True)
        except CheckpointError as error:
            return str(error)
        return None

    def describe_resume(self) -> str:
        """Return where the run resumes if the last progress could not be saved."""
        try:
            path = self.context.checkpoints.latest()
        except CheckpointError:
            path = None
        where = "step 1, as no checkpoint is whole" if path is None else f"{path.name}, the last whole checkpoint"
        return f"the same command goes on from {where}"
