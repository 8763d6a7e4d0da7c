"""`train(run)`: one rank's part of a run, from an empty folder or from the last checkpoint to the last stage's model.

    find_start ── adopt_run_folder ──┬─ build stage ── StageLoop: steps ── checkpoint, export ─┬── done
                                     └──────────────── next stage ─────────────────────────────┘
    a signal, anywhere:  all ranks stop at one boundary ── settle ── checkpoint ── status 75

A step is a function of the weights, the optimizer's state, the stage and the step's number: rows are found by number,
and random numbers are seeded by the step. So a resumed run takes the same steps as a run that was never stopped.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ithaca.config.schema import RunSettings
from ithaca.data.sources.own_files import refuse_own_files
from ithaca.errors import CheckpointError, UnwrittenError
from ithaca.memory.release import release
from ithaca.mesh import init_mesh
from ithaca.models.support import base_model, decoder_layers
from ithaca.quantities import plural
from ithaca.ranks import on_rank_0
from ithaca.state.checkpoint.checkpoints import bytes_of
from ithaca.state.checkpoint.state_tensors import check_fingerprint
from ithaca.training.check_links import check_collectives
from ithaca.training.loop import StageLoop
from ithaca.training.run.disk_space import PendingWrites, model_bytes
from ithaca.training.run.display import Display
from ithaca.training.run.progress import RunProgress, read_progress
from ithaca.training.run.run_folder import RunFolder
from ithaca.training.saving import RunSaver
from ithaca.training.session import Session, build_session
from ithaca.training.start import RunContext, RunStart, adopt_run_folder, find_start, refusal_or_full_disk
from ithaca.training.watch.watch import Preempted, Watch


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run: its folder, its progress, and True in `interrupted` if Ctrl-C stopped it."""

    folder: Path
    progress: RunProgress
    finished: bool
    interrupted: bool = False


def train(run: RunSettings, *, restart: bool = False) -> RunResult:
    """Train until the last stage is done or a signal stops the run; every rank calls this.

    `restart`: begin at step 1 where there are checkpoints and none is whole.
    """
    refuse_own_files(run)
    with ExitStack() as stack:
        mesh = init_mesh(device=None if run.launch.device == "auto" else run.launch.device)
        folder = RunFolder(Path(run.output))

        def lock_folder() -> None:
            made = folder.missing()
            stack.enter_context(folder.lock())
            stack.callback(folder.remove_unused, made)
            folder.clear_left()
            folder.refuse_another(run)

        on_rank_0(lock_folder, mesh.world_group, failed=refusal_or_full_disk)
        watch = stack.enter_context(Watch.of(mesh, hang=run.limits.hang))
        display = Display(shows=mesh.rank == 0, stages=len(run.stages))
        stack.callback(display.close)
        if mesh.device.type == "cuda" and mesh.world > 1:
            check_collectives(mesh)
        context = RunContext.of(run, folder, mesh, watch, display)
        stack.callback(context.journal.close)
        start = find_start(context, restart=restart)
        return _Stages(context, start).run_all()


class _Stages:
    """The stages of a run, one after the other. `mesh`: the last stage's."""

    def __init__(self, context: RunContext, start: RunStart) -> None:
        self.context, self.start = context, start
        self.saver = RunSaver(context, start)
        self.mesh = context.mesh
        self.session: Session | None = None
        self.loop: StageLoop | None = None

    def run_all(self) -> RunResult:
        context, stages = self.context, self.context.run.stages
        progress, path = self.start.progress, self.start.checkpoint
        try:
            adopt_run_folder(context, self.start)
            if path is not None and progress.stage and not progress.step:
                self.saver.export(progress)
            while progress.stage < len(stages):
                progress = self._run_stage(progress, path)
                path = context.checkpoints.at(progress.total)
            context.on_rank_0(lambda: context.folder.link_export(len(stages) - 1, stages[-1].length))
        except Preempted:
            return self._stop(progress)
        except UnwrittenError as error:
            if not self._any_rank_asked():
                raise
            return self._stop(progress, error)
        return RunResult(context.folder.root, progress, finished=True)

    def _run_stage(self, progress: RunProgress, path: Path | None) -> RunProgress:
        """Build one stage, run it from `progress` to its end, and return the progress at the next stage's start."""
        context = self.context
        with context.watch.expect_long(3600.0, "building the stage"):
            facts = {} if path is None else context.checkpoints.read_facts(path)
            session = self._build(progress, path, facts)
            pending = PendingWrites.of(context.run, progress, context.folder.checkpoints)
            sizes = bytes_of(session.tensors), model_bytes(session.model)
            context.on_rank_0(lambda: pending.check(*sizes, context.folder.root))
        # The feed compares files with those that it has read; at a stage's start it has read none.
        notes = session.feed.notes if progress.step else self.start.prepared.changes(facts.get("listings", []))
        for note in notes:
            context.display.say(f"warning: {note}")
        stage = session.stage
        context.display.stage(progress.stage, stage.length, stage.count, progress.step, session.epochs)
        remove_boundaries = context.watch.install(decoder_layers(base_model(session.model)))
        try:
            self.loop = StageLoop(
                context.run,
                session,
                context.watch,
                context.journal,
                context.display,
                save=lambda progress: self.saver.save(session, progress),
            )
            progress = self.loop.run_from(progress)
        finally:
            remove_boundaries()
        for note in session.feed.left_out:
            context.display.say(f"warning: {note}")
        return self.saver.end_stage(session, progress)

    def _build(self, progress: RunProgress, path: Path | None, facts: dict[str, Any]) -> Session:
        """Build the stage at `progress` and load the checkpoint at `path`, whose facts are `facts`."""
        context, start = self.context, self.start
        # Two stages at once would not fit: the last one's memory is released first.
        self.session = self.loop = None
        release(self.mesh.device)
        context.display.note(f"building stage {progress.stage + 1}: the model, its weights, the optimizer")
        # If a stage that had ended is open again, its rows go on from the feed's state at its end.
        reopened = path is not None and read_progress(facts, path).stage > progress.stage
        feed = facts.get("ended" if reopened else "feed") or None
        session = build_session(context.run, progress.stage, start.source, start.prepared, feed, self.mesh)
        self.session, self.mesh = session, session.mesh
        if path is not None:
            check_fingerprint(facts["fingerprint"], session.model)
            context.checkpoints.load(path, session.tensors)
        return session

    def _any_rank_asked(self) -> bool:
        """True on all ranks if one of them was asked to stop; a signal may have come to one rank a moment ago."""
        asked = torch.tensor(float(self.context.watch.stop_requested_here), device=self.mesh.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.mesh.world_group)
        return bool(asked.item())

    def _stop(self, progress: RunProgress, unwritten: UnwrittenError | None = None) -> RunResult:
        """Give the step in flight up and save the last whole step.

        A stop that cannot be saved is no failure, since the run goes on from the checkpoint before. `unwritten`: an
        error of writing that came with the stop; nothing is written again then.
        """
        context, saver = self.context, self.saver
        text = " with nothing new to save: the same command goes on from the last checkpoint"
        with context.watch.expect_long(context.run.limits.grace, "saving before the end"):
            try:
                context.checkpoints.wait()
            except CheckpointError:
                saver.saved = None
            if self.session is not None and self.loop is not None:
                progress = self.loop.settle()
                reason = None if unwritten else saver.save_at_stop(self.session, progress)
                text = f", not saved ({reason}): {saver.describe_resume()}" if reason else ""
                text = text or ", saved: the same command goes on from there"
            if unwritten is not None:
                text = f": {unwritten}; {saver.describe_resume()}"
        context.journal.write("event", progress.total, event="stopped")
        context.display.close()
        if progress.total:
            context.display.say(f"stopped after {plural(progress.total, 'step')}{text}")
        else:
            context.display.say("stopped before the first step: nothing to save, the same command begins again")
        return RunResult(context.folder.root, progress, finished=False, interrupted=context.watch.interrupted)
