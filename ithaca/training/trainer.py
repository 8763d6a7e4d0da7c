"""`train(run)`: one rank's life, from an empty folder or from wherever the last job left it.

The run is a list of steps. What a step does is a function of the weights, the optimizer's state, its stage and its
number, and of nothing else: rows are found by number, random numbers are drawn from a seed of the step. So a run that
was stopped anywhere goes on as if it had not been, and the place to go on from is a few numbers in a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from ithaca.config import Run
from ithaca.data.prepare import Prepared, prepare
from ithaca.errors import CheckpointError, IthacaError
from ithaca.memory.release import release
from ithaca.mesh import Mesh, fit_degrees, init_mesh
from ithaca.models.embedded import EMBEDDED, build_embedded, embedded_tokenizer
from ithaca.models.pretrained import check_adapters, find_folder, read_config
from ithaca.models.support import base_model, decoder_layers
from ithaca.models.tokenizer import load_tokenizer
from ithaca.state.checkpoints import Checkpoints, bytes_of
from ithaca.state.export import DESCRIPTION, describe_model, export_checkpoint
from ithaca.state.tensors import check_fingerprint, fingerprint
from ithaca.training.collectives import check_collectives
from ithaca.training.display import Display
from ithaca.training.folder import RunFolder
from ithaca.training.loop import StageLoop
from ithaca.training.metrics import Journal
from ithaca.training.place import Place
from ithaca.training.room import Room, model_bytes
from ithaca.training.session import Session, build_session, choose_sp, stage_config
from ithaca.training.stages import advise_between
from ithaca.training.unusual import advise_settings
from ithaca.training.watch import Preempted, Watch

logger = logging.getLogger("ithaca")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and where its files are."""

    folder: Path
    place: Place
    finished: bool
    interrupted: bool = False


def train(run: Run) -> Outcome:
    """Train until the last stage is done or somebody asks to stop; every rank calls this."""
    with ExitStack() as stack:
        mesh = init_mesh(device=None if run.launch.device == "auto" else run.launch.device)
        folder = RunFolder(Path(run.output))
        _together(mesh, lambda: stack.enter_context(folder.lock()), lambda: folder.refuse_another(run))
        watch = stack.enter_context(Watch.of(mesh, hang=run.limits.hang))
        display = Display(shows=mesh.rank == 0, stages=len(run.stages))
        stack.callback(display.close)
        if mesh.device.type == "cuda" and mesh.world > 1:
            check_collectives(mesh)
        trainer = _Trainer(run, folder, mesh, watch, display)
        stack.callback(trainer.journal.close)
        return trainer.go()


class _Trainer:
    """The parts that outlive a stage."""

    def __init__(self, run: Run, folder: RunFolder, mesh: Mesh, watch: Watch, display: Display) -> None:
        self.run, self.folder, self.mesh, self.watch, self.display = run, folder, mesh, watch, display
        settings = run.checkpoints
        self.checkpoints = Checkpoints(folder.checkpoints, settings.keep, mesh, settings.background)
        self.journal = Journal(folder.metrics, run.metrics, writes=mesh.rank == 0, run=run.model_dump(mode="json"))
        self.session: Session | None = None
        self.loop: StageLoop | None = None
        self.source, self.documents = "", ""
        self.listings: list[list[int]] = []
        self.tokenizer: str | None = None
        self.saved: Place | None = None

    def go(self) -> Outcome:
        run = self.run
        self.display.note(f"reading {self.run.model.name}")
        self.source = self._source()
        self._look_ahead()
        self.display.note("reading the documents")
        with self.watch.patient(24 * 3600.0, "preparing data"):
            prepared = self._prepare()
            self.documents = prepared.fingerprint
        for note in prepared.left_out:
            self.display.say(f"warning: {note}")
        place, path = self._find_start()
        _together(self.mesh, lambda: self._take_over(path))
        if path is not None and place.stage and not place.step:
            self._export(path, place)
        try:
            while place.stage < len(run.stages):
                place = self._stage(place, path, prepared)
                path = self.checkpoints.latest()
        except Preempted:
            return self._stop(place)
        _together(self.mesh, lambda: self.folder.name_last(len(run.stages) - 1, run.stages[-1].length))
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
        prepared.check_vocabulary(read_config(self.source).get_text_config().vocab_size)
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
            config = stage_config(self.run, self.source, number)
            sp = choose_sp(self.run, number, self.mesh.world, config.get_text_config())
            fit_degrees(self.mesh.world, sp=sp, ring=self.run.mesh.ring)
        if self.run.lora is not None:
            check_adapters(read_config(self.source), self.run.lora)
        known = getattr(read_config(self.source).get_text_config(), "max_position_embeddings", 0) or 0
        pretrained = self.run.model.weights == "pretrained" and self.run.model.name != "embedded"
        warnings = advise_between(int(known) if pretrained else 0, self.run.stages)
        if pretrained:
            text = read_config(self.source).get_text_config()
            warnings += advise_settings(text, self.run.stages, adapters=self.run.lora is not None)
        for warning in warnings:
            self.display.say(f"warning: {warning}")

    def _find_start(self) -> tuple[Place, Path | None]:
        path = self.checkpoints.latest()
        place = Place() if path is None else Place(**self.checkpoints.read_facts(path)["place"])
        self.journal.resume(place.total)
        if path is not None:
            self._check_documents(path)
            self.display.say(f"going on from {path}: {place.total} steps done")
        return place, path

    def _check_documents(self, path: Path) -> None:
        if self.checkpoints.read_facts(path)["data"] != self.documents:
            raise CheckpointError(
                f"the documents are not those that {path} was trained on, and its rows would be others: put them back, "
                "or start anew from its export with model.name=... and output=..."
            )

    def _take_over(self, path: Path | None) -> None:
        """The folder is this run's from here on."""
        if path is not None:
            for name in self.folder.new_rates(self.run):
                self.display.say(f"warning: {name} is not what the steps so far were taken with")
        self.folder.leave_settings(self.run)

    def _stage(self, place: Place, path: Path | None, prepared: Prepared) -> Place:
        """One stage from `place` to its end, its model exported, its checkpoint kept."""
        with self.watch.patient(3600.0, "building the stage"):
            # What the last stage held is given back before the next one is built.
            self.session = self.loop = None
            release(self.mesh.device)
            facts = {} if path is None else self.checkpoints.read_facts(path)
            self.listings = prepared.listings
            self.display.note(f"building stage {place.stage + 1}: the model, its weights, the optimizer")
            session = build_session(self.run, place.stage, self.source, prepared, facts.get("feed") or None, self.mesh)
            self.session, self.mesh = session, session.mesh
            if path is not None:
                self._load(path, facts, session)
            room = Room.of(self.run, place, self.folder.checkpoints)
            sizes = bytes_of(session.tensors), model_bytes(session.model)
            _together(self.mesh, lambda: room.check(*sizes, self.folder.root))
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
            place = replace(place, stage=place.stage + 1, step=0)
            self._save(place, keep=True)
            path = self.checkpoints.latest()
            assert path is not None
            self._export(path, place)
        return place

    def _export(self, path: Path, place: Place) -> None:
        """The model of the stage that has just ended, from its checkpoint; done again where a run ended in between."""
        number = place.stage - 1
        target = self.folder.stage(number, self.run.stages[number].length)
        _together(self.mesh, lambda: self._write_model(path, target))
        self.display.close()
        self.display.say(f"stage {place.stage} is done: {target} loads in plain transformers")

    def _write_model(self, path: Path, target: Path) -> None:
        try:
            self.folder.put(target, partial(export_checkpoint, path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target} was not written ({error}), but {path}, which it is made of, is whole: make room, and the same "
                "command writes it"
            ) from None

    def _save(self, place: Place, *, keep: bool = False, wait: bool = False) -> None:
        """A checkpoint of this place; a disk that is full is told of, and training goes on from the last whole one."""
        session = self.session
        assert session is not None
        row = place.step * session.stage.batch
        facts = {
            "place": asdict(place),
            "fingerprint": fingerprint(session.model),
            DESCRIPTION: describe_model(session.model, folder=self.source, tokenizer=self.tokenizer),
            "data": self.documents,
            "listings": self.listings,
            "feed": session.feed.state(row) if place.stage == session.number else {},
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
                    raise
                if self.mesh.rank == 0:
                    logger.warning("step %d is not saved: %s", place.total, error)
                self.journal.write("event", place.total, event="not saved", reason=str(error))

    def _stop(self, place: Place) -> Outcome:
        """Somebody asked to stop: the step in flight is given up, the last whole one is saved."""
        with self.watch.patient(self.run.limits.grace, "saving before the end"):
            try:
                self.checkpoints.wait()
            except CheckpointError:
                self.saved = None
            if self.session is not None and self.loop is not None:
                place = self.loop.settle()
                if place != self.saved and not self.run.optimizer.in_backward:
                    self._save(place, wait=True)
        self.journal.write("event", place.total, event="stopped")
        self.display.close()
        self.display.say(f"stopped after {place.total} steps, saved: the same command goes on from there")
        return Outcome(self.folder.root, place, finished=False, interrupted=self.watch.interrupted)


def _together(mesh: Mesh, *actions: Callable[[], Any]) -> None:
    """What the first rank does for all; an error of it is raised on all ranks."""
    error: IthacaError | None = None
    if mesh.rank == 0:
        try:
            for action in actions:
                action()
        except IthacaError as caught:
            error = caught
    told = [error]
    dist.broadcast_object_list(told, src=0, group=mesh.world_group)
    if told[0] is not None:
        raise told[0]
