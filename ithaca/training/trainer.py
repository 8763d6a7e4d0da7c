"""`train(run)`: one rank's life, from an empty folder or from wherever the last job left it.

The run is a list of steps. What a step does is a function of the weights, the optimizer's state, its stage and its
number, and of nothing else: rows are found by number, random numbers are drawn from a seed of the step. So a run that
was stopped anywhere goes on as if it had not been, and the place to go on from is a few numbers in a checkpoint.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ithaca.config.schema import RunSettings
from ithaca.data.prepared import Prepared, changed_sources, prepare
from ithaca.data.sources.own_files import refuse_own_files
from ithaca.errors import CheckpointError, UntrainedError, UnwrittenError
from ithaca.memory.release import release
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.files.embedded import EMBEDDED, build_embedded, embedded_tokenizer
from ithaca.models.files.export_checkpoint import DESCRIPTION, describe_model, export_checkpoint
from ithaca.models.files.export_folder import RUN, mark_of
from ithaca.models.files.origin import ORIGIN, check_origin, read_origin
from ithaca.models.files.pretrained import check_adapters, find_folder, read_config
from ithaca.models.files.tokenizer import load_tokenizer
from ithaca.models.support import base_model, decoder_layers
from ithaca.ranks import on_rank_0, only_refusals
from ithaca.state.checkpoint.checkpoints import Checkpoints, bytes_of
from ithaca.state.checkpoint.state_tensors import check_fingerprint, fingerprint
from ithaca.training.check_links import check_collectives
from ithaca.training.degrees import another_launcher, check_degrees
from ithaca.training.loop import StageLoop
from ithaca.training.run.changed_settings import settle_place
from ithaca.training.run.disk_space import Room, model_bytes
from ithaca.training.run.display import Display
from ithaca.training.run.metrics import Journal
from ithaca.training.run.progress import Place, place_in
from ithaca.training.run.run_folder import RunFolder
from ithaca.training.schedule import advise_between
from ithaca.training.session import Session, build_session, stage_config
from ithaca.training.unusual_settings import advise_settings
from ithaca.training.watch.watch import Preempted, Watch

logger = logging.getLogger("ithaca")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and where its files are."""

    folder: Path
    place: Place
    finished: bool
    interrupted: bool = False


def train(run: RunSettings, *, restart: bool = False) -> Outcome:
    """Train until the last stage is done or somebody asks to stop; every rank calls this.

    `restart`: begin at step 1 where there are checkpoints and none is whole.
    """
    refuse_own_files(run)
    with ExitStack() as stack:
        mesh = init_mesh(device=None if run.launch.device == "auto" else run.launch.device)
        folder = RunFolder(Path(run.output))

        def hold() -> None:
            stack.enter_context(folder.lock())
            folder.clear_left()
            folder.refuse_another(run)

        on_rank_0(hold, mesh.world_group, failed=_refusal_or_full_disk)
        watch = stack.enter_context(Watch.of(mesh, hang=run.limits.hang))
        display = Display(shows=mesh.rank == 0, stages=len(run.stages))
        stack.callback(display.close)
        if mesh.device.type == "cuda" and mesh.world > 1:
            check_collectives(mesh)
        trainer = _Trainer(run, folder, mesh, watch, display)
        stack.callback(trainer.journal.close)
        return trainer.go(restart=restart)


class _Trainer:
    """The parts that outlive a stage."""

    def __init__(self, run: RunSettings, folder: RunFolder, mesh: Mesh, watch: Watch, display: Display) -> None:
        self.run, self.folder, self.mesh, self.watch, self.display = run, folder, mesh, watch, display
        settings = run.checkpoints
        self.checkpoints = Checkpoints(folder.checkpoints, settings.keep, mesh, settings.background)
        self.journal = Journal(folder.metrics, run.metrics, writes=mesh.rank == 0, run=run.model_dump(mode="json"))
        self.session: Session | None = None
        self.loop: StageLoop | None = None
        self.source, self.documents = "", ""
        self.sources: list[list[Any]] = []
        self.listings: list[list[int]] = []
        self.tokenizer: str | None = None
        self.saved: Place | None = None
        self.identity = ""
        self.origin: dict[str, Any] = {}

    def go(self, *, restart: bool) -> Outcome:
        run = self.run
        self.display.note(f"reading the model {self.run.model.name}")
        self.source = self._source()
        self._look_ahead()
        self.origin = read_origin(Path(self.source), weights=run.lora is not None)
        with self.watch.patient(3600.0, "reading checkpoints"):
            place, path = self._find_start(restart)
        self.display.note("reading the documents")
        with self.watch.patient(24 * 3600.0, "preparing data"):
            prepared = self._prepare()
            self.documents, self.sources = prepared.fingerprint, prepared.sources
        for note in prepared.left_out:
            self.display.say(f"warning: {note}")
        try:
            self._take_over(place, path)
            if path is not None and place.stage and not place.step:
                self._export(path, place)
            while place.stage < len(run.stages):
                place = self._stage(place, path, prepared)
                path = self.checkpoints.at(place.total)
            self._for_all(lambda: self.folder.name_last(len(run.stages) - 1, run.stages[-1].length))
        except Preempted:
            return self._stop(place)
        except UnwrittenError as error:
            if not self._asked_to_stop():
                raise
            return self._stop(place, error)
        return Outcome(self.folder.root, place, finished=True)

    def _source(self) -> str:
        """The folder that the run starts from."""
        if self.run.model.name != "embedded":
            return str(find_folder(self.run.model.name, self.run.model.revision))
        folder = self.folder.root / "embedded"
        if self.mesh.rank == 0:
            build_embedded(folder)
        dist.barrier(self.mesh.world_group)
        return str(folder)

    def _prepare(self) -> Prepared:
        run = self.run
        self._own_tokenizer()
        tokenizer = load_tokenizer(self.tokenizer or self.source, run.model.revision)
        prepared = prepare(
            run.data,
            tokenizer,
            validation=run.validation,
            seed=run.seed,
            folder=Path(run.data.cache or self.folder.root / "data"),
            progress=self.mesh.rank == 0,
        )
        prepared.check_vocabulary(read_config(self.source, self.run.model.config).get_text_config().vocab_size)
        return prepared

    def _own_tokenizer(self) -> None:
        """The embedded tokenizer is written down, so that an export finds its files."""
        self.tokenizer = self.run.model.tokenizer
        if self.tokenizer != EMBEDDED:
            return
        folder = self.folder.root / "tokenizer"
        if self.mesh.rank == 0:
            embedded_tokenizer().save_pretrained(folder)
        dist.barrier(self.mesh.world_group)
        self.tokenizer = str(folder)

    def _look_ahead(self) -> None:
        """Refuse stages that the model or the mesh cannot do, and warn of jumps, before anything is read or built."""
        for number in range(len(self.run.stages)):
            stage_config(self.run, self.source, number)
        config = read_config(self.source, self.run.model.config)
        text: Any = config.get_text_config()
        check_degrees(self.run, self.mesh.world, int(text.num_attention_heads), another_launcher)
        if self.run.lora is not None:
            check_adapters(config, self.run.lora)
        known = getattr(text, "max_position_embeddings", 0) or 0
        pretrained = self.run.model.weights == "pretrained" and self.run.model.name != "embedded"
        warnings = advise_between(int(known) if pretrained else 0, self.run.stages)
        if pretrained:
            warnings += advise_settings(text, self.run.stages, adapters=self.run.lora is not None)
        for warning in warnings:
            self.display.say(f"warning: {warning}")

    def _find_start(self, restart: bool) -> tuple[Place, Path | None]:
        """Where the run goes on from, and which checkpoint has it; what cannot go on is refused."""
        path = self.checkpoints.latest(restart=restart)
        facts = {} if path is None else self.checkpoints.read_facts(path)
        found = Place() if path is None else place_in(facts, path)
        place = settle_place(found, self.run, facts.get("counts"))
        self._for_all(lambda: self.folder.refuse_another(self.run, place))
        self._for_all(lambda: check_origin(facts.get(ORIGIN), self.origin, self.source))
        self.identity = self._for_all(lambda: self._identify(facts, restart))
        if path is None or RUN in facts:
            self._for_all(lambda: self.folder.refuse_strangers(self.run, place, self.identity))
        return place, path

    def _for_all(self, action: Callable[[], T]) -> T:
        return on_rank_0(action, self.mesh.world_group, failed=_refusal_or_full_disk)

    def _identify(self, facts: dict[str, Any], restart: bool) -> str:
        """A name of this run's own, which its checkpoints and models carry."""
        kept = facts.get(RUN) or (self.folder.identity_there() if restart else None)
        return str(kept or uuid.uuid4().hex)

    def _check_documents(self, path: Path) -> None:
        facts = self.checkpoints.read_facts(path)
        if facts["data"] != self.documents:
            raise CheckpointError(
                f"{changed_sources(facts.get('sources'), self.sources)} are not those that {path} was trained on, and its rows "
                "would be others: put them back, or start anew from its export with model.name=... and output=..."
            )

    def _take_over(self, place: Place, path: Path | None) -> None:
        """The folder is this run's from here on."""
        if path is not None:
            self._check_documents(path)
            told = self._for_all(lambda: self.folder.new_course(self.run, place))
            for change in told:
                self.display.say(f"warning: {change}")
            self.display.say(f"going on from {path}: {place.total} steps done")
        self._for_all(lambda: self.journal.resume(place.total))
        self._for_all(lambda: self.folder.leave_settings(self.run))

    def _stage(self, place: Place, path: Path | None, prepared: Prepared) -> Place:
        """One stage from `place` to its end, its model exported, its checkpoint kept."""
        with self.watch.patient(3600.0, "building the stage"):
            # What the last stage held is given back before the next one is built.
            self.session = self.loop = None
            release(self.mesh.device)
            facts = {} if path is None else self.checkpoints.read_facts(path)
            self.listings = prepared.listings
            self.display.note(f"building stage {place.stage + 1}: the model, its weights, the optimizer")
            # Of a stage that had ended and is open again, the feed is where the stage's end left it.
            ended = path is not None and place_in(facts, path).stage > place.stage
            feed = facts.get("ended" if ended else "feed") or None
            session = build_session(self.run, place.stage, self.source, prepared, feed, self.mesh)
            self.session, self.mesh = session, session.mesh
            if path is not None:
                self._load(path, facts, session)
            room = Room.of(self.run, place, self.folder.checkpoints)
            sizes = bytes_of(session.tensors), model_bytes(session.model)
            self._for_all(lambda: room.check(*sizes, self.folder.root))
        # A stage that begins has read nothing that its feed could compare.
        for note in session.feed.notes if place.step else prepared.changes(facts.get("listings", [])):
            self.display.say(f"warning: {note}")
        stage = session.stage
        self.display.stage(place.stage, stage.length, stage.count, place.step, session.epochs)
        take_off = self.watch.install(decoder_layers(base_model(session.model)))
        try:
            self.loop = StageLoop(self.run, session, self.watch, self.journal, self.display, self._save)
            place = self.loop.go(place)
        finally:
            take_off()
        for note in session.feed.left_out:
            self.display.say(f"warning: {note}")
        return self._end_stage(session, place)

    def _load(self, path: Path, facts: dict[str, Any], session: Session) -> None:
        check_fingerprint(facts["fingerprint"], session.model)
        self.checkpoints.load(path, session.tensors)

    def _end_stage(self, session: Session, place: Place) -> Place:
        """A checkpoint that stays, and of it a model that loads in plain transformers."""
        with self.watch.patient(3600.0, "export"):
            if not place.taken:
                raise UntrainedError(
                    f"stage {place.stage + 1} is over and none of its {session.stage.count} steps was taken ({place.bad} had a "
                    f"loss or gradient that is not finite, {place.silent} nothing to learn): no model is written; lower "
                    f"stages.{place.stage}.lr, or look at the model and the data"
                )
            place = replace(place, stage=place.stage + 1, step=0, taken=0)
            self._save(place, keep=True)
            self._export(self.checkpoints.at(place.total), place)
        return place

    def _export(self, path: Path, place: Place) -> None:
        """The model of the stage that has just ended, from its checkpoint; done again where a run ended in between."""
        number = place.stage - 1
        target = self.folder.stage(number, self.run.stages[number].length)
        if RUN not in self.checkpoints.read_facts(path) and target.exists():
            return  # Written by an earlier version, which left no marks.
        written = self._for_all(lambda: self._write_model(path, target))
        self.display.close()
        if written:
            self.display.say(f"stage {place.stage} is done: {target} loads in plain transformers")

    def _write_model(self, path: Path, target: Path) -> bool:
        """Write the model; False where it was there already."""
        try:
            written = self.folder.put(target, partial(export_checkpoint, path), mark_of(path))
        except (OSError, SafetensorError) as error:
            raise UnwrittenError(
                f"{target} was not written ({error}), but {path}, which it is made of, is whole: make room, and the same "
                "command writes it"
            ) from None
        return written

    def _save(self, place: Place, *, keep: bool = False, wait: bool = False) -> None:
        """A checkpoint of this place; a disk that is full is told of, and training goes on from the last whole one."""
        session = self.session
        assert session is not None
        ended = place.stage != session.number
        feed = session.feed.state((session.stage.count if ended else place.step) * session.stage.batch)
        facts = {
            RUN: self.identity,
            ORIGIN: self.origin,
            "place": asdict(place),
            "counts": [stage.count for stage in self.run.stages[: place.stage]],
            "fingerprint": fingerprint(session.model),
            DESCRIPTION: describe_model(session.model, folder=self.source, tokenizer=self.tokenizer),
            "data": self.documents,
            "sources": self.sources,
            "listings": self.listings,
            "feed": {} if ended else feed,
            "ended": feed if ended else {},
            "degrees": {"dp": session.mesh.dp, "sp": session.mesh.sp},
        }
        with self.watch.patient(3600.0, "checkpoint"):
            # A run that goes on from here finds the lines of all steps up to here.
            self.journal.flush()
            try:
                self.checkpoints.save(place.total, session.tensors, facts, pin=keep, wait=wait or keep)
                self.saved = place
            except CheckpointError as error:
                if keep or wait:
                    raise UnwrittenError(str(error)) from None
                if self.mesh.rank == 0:
                    logger.warning("step %d is not saved: %s", place.total, error)
                self.journal.write("event", place.total, event="not saved", reason=str(error))

    def _asked_to_stop(self) -> bool:
        """True on all ranks if one of them was asked: a signal may have come to it alone, a moment ago."""
        asked = torch.tensor(float(self.watch.wanted), device=self.mesh.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.mesh.world_group)
        return bool(asked.item())

    def _stop(self, place: Place, unwritten: UnwrittenError | None = None) -> Outcome:
        """Somebody asked to stop: the step in flight is given up, the last whole one is saved.

        A disk that does not take it makes the stop no failure: the run goes on from what was saved before. `unwritten`:
        what could not be written as the stop came; the same is not tried again.
        """
        goes_on = "goes on from the last checkpoint" if place.total else "begins at step 1"
        told = f" with nothing new to save: the same command {goes_on}"
        with self.watch.patient(self.run.limits.grace, "saving before the end"):
            try:
                self.checkpoints.wait()
            except CheckpointError:
                self.saved = None
            if self.session is not None and self.loop is not None:
                place = self.loop.settle()
                told = ", saved: the same command goes on from there"
                if place != self.saved and unwritten is None:
                    reason = self._save_at_stop(place)
                    told = f", not saved ({reason}): {self._goes_on()}" if reason else told
            if unwritten is not None:
                told = f": {unwritten}; {self._goes_on()}"
        self.journal.write("event", place.total, event="stopped")
        self.display.close()
        self.display.say(f"stopped after {place.total} steps{told}")
        return Outcome(self.folder.root, place, finished=False, interrupted=self.watch.interrupted)

    def _save_at_stop(self, place: Place) -> str | None:
        """Save; gives why that could not be, or None."""
        if self.run.optimizer.in_backward:
            return "optimizer.in_backward had taken a part of the next step"
        try:
            self._save(place, wait=True)
        except CheckpointError as error:
            return str(error)
        return None

    def _goes_on(self) -> str:
        try:
            path = self.checkpoints.latest()
        except CheckpointError:
            path = None
        where = "step 1, as no checkpoint is whole" if path is None else f"{path.name}, the last whole checkpoint"
        return f"the same command goes on from {where}"


def _refusal_or_full_disk(error: Exception) -> Exception:
    """Return the error that all ranks raise for one of rank 0; any but these two is raised again."""
    if isinstance(error, OSError):
        return UnwrittenError(f"{error.filename or 'the disk'}: {error.strerror}: make room, or see to its permissions")
    return only_refusals(error)
