"""The start of a run: the model's folder, the documents, and the checkpoint from which the run goes on.

find_start        model folder ─ stages refused or warned of ─ newest whole checkpoint ─ documents tokenized
adopt_run_folder  documents compared with the checkpoint's ─ metrics cut back to it ─ run.yaml written
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ithaca.config.schema import RunSettings
from ithaca.data.prepared import Prepared, changed_sources, prepare
from ithaca.errors import CheckpointError, UnwrittenError
from ithaca.mesh import Mesh
from ithaca.models.files.embedded import EMBEDDED, build_embedded, embedded_tokenizer
from ithaca.models.files.export_folder import RUN
from ithaca.models.files.model_origin import ORIGIN, check_origin, read_origin
from ithaca.models.files.pretrained import check_adapters, find_folder, read_config
from ithaca.models.files.tokenizer import load_tokenizer
from ithaca.quantities import plural
from ithaca.ranks import on_rank_0, only_refusals
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.training.degrees import StageDegrees
from ithaca.training.run.changed_settings import resumed_progress
from ithaca.training.run.display import Display
from ithaca.training.run.metrics import Journal
from ithaca.training.run.progress import RunProgress, read_progress
from ithaca.training.run.run_folder import RunFolder
from ithaca.training.schedule import advise_between
from ithaca.training.session import stage_config
from ithaca.training.unusual_settings import advise_settings
from ithaca.training.watch.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunContext:
    """Parts of a run that outlive its stages, on this rank. `mesh`: the run's first; each stage has its own."""

    run: RunSettings
    folder: RunFolder
    mesh: Mesh
    watch: Watch
    display: Display
    checkpoints: Checkpoints
    journal: Journal

    @classmethod
    def of(cls, run: RunSettings, folder: RunFolder, mesh: Mesh, watch: Watch, display: Display) -> RunContext:
        kept = run.checkpoints
        checkpoints = Checkpoints(folder.checkpoints, kept.keep, mesh, kept.background)
        journal = Journal(folder.metrics, run.metrics, writes=mesh.rank == 0, run=run.model_dump(mode="json"))
        return cls(run, folder, mesh, watch, display, checkpoints, journal)

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its result, or raise its refusal or full disk, on every rank."""
        return on_rank_0(action, self.mesh.world_group, failed=refusal_or_full_disk)


@dataclass(frozen=True, slots=True)
class RunStart:
    """Files and progress that a run starts from, which each of its checkpoints records too.

    `source`: the model's folder. `tokenizer`: None for the model's own. `identity`: a name that the run's checkpoints
    and models carry. `origin`: a fingerprint of the model's files. `checkpoint`: None for a run that begins at step 1.
    """

    source: str
    tokenizer: str | None
    identity: str
    origin: dict[str, Any]
    prepared: Prepared
    progress: RunProgress
    checkpoint: Path | None


def refusal_or_full_disk(error: Exception) -> Exception:
    """Return the error that all ranks raise for an error of rank 0; raise any but these two kinds again."""
    if isinstance(error, OSError):
        return UnwrittenError(f"{error.filename or 'the disk'}: {error.strerror}: make room, or see to its permissions")
    return only_refusals(error)


def find_start(context: RunContext, *, restart: bool) -> RunStart:
    """Read model, checkpoints and documents, and refuse a run that cannot start or go on, before anything is built."""
    run, display = context.run, context.display
    display.note(f"reading the model {run.model.name}")
    source = find_model(context)
    _check_stages(context, source)
    origin = read_origin(Path(source), weights=run.lora is not None)
    with context.watch.expect_long(3600.0, "reading checkpoints"):
        checkpoint = context.checkpoints.latest(restart=restart)
        facts = {} if checkpoint is None else context.checkpoints.read_facts(checkpoint)
        found = RunProgress() if checkpoint is None else read_progress(facts, checkpoint)
        progress = resumed_progress(found, run, facts.get("counts"))
        context.on_rank_0(lambda: context.folder.refuse_another(run, progress))
        context.on_rank_0(lambda: check_origin(facts.get(ORIGIN), origin, source))
        identity = context.on_rank_0(lambda: _identify(facts, context.folder, restart))
        # A checkpoint of an earlier version names no run, nor do the models beside it.
        if checkpoint is None or RUN in facts:
            context.on_rank_0(lambda: context.folder.refuse_foreign_exports(run, progress, identity))
    display.note("reading the documents")
    with context.watch.expect_long(24 * 3600.0, "preparing data"):
        prepared, tokenizer = prepare_documents(context, source)
    for note in prepared.left_out:
        display.say(f"warning: {note}")
    return RunStart(source, tokenizer, identity, origin, prepared, progress, checkpoint)


def find_model(context: RunContext) -> str:
    """Return the folder of the model that the run starts from."""
    model = context.run.model
    if model.name != "embedded":
        return str(find_folder(model.name, model.revision))
    folder = context.folder.root / "embedded"
    context.on_rank_0(lambda: build_embedded(folder))
    return str(folder)


def _check_stages(context: RunContext, source: str) -> None:
    """Refuse stages that the model or the ranks cannot run, and warn of unusual settings."""
    run = context.run
    for number in range(len(run.stages)):
        stage_config(run.model, run.stages[: number + 1], source)
    config = read_config(source, run.model.config)
    text: Any = config.get_text_config()
    StageDegrees(run.mesh, run.stages, context.mesh.world, int(text.num_attention_heads)).check()
    if run.lora is not None:
        check_adapters(config, run.lora)
    known = getattr(text, "max_position_embeddings", 0) or 0
    pretrained = run.model.weights == "pretrained" and run.model.name != "embedded"
    warnings = advise_between(int(known) if pretrained else 0, run.stages)
    if pretrained:
        warnings += advise_settings(text, run.stages, adapters=run.lora is not None)
    for warning in warnings:
        context.display.say(f"warning: {warning}")


def _identify(facts: dict[str, Any], folder: RunFolder, restart: bool) -> str:
    kept = facts.get(RUN) or (folder.find_identity() if restart else None)
    return str(kept or uuid.uuid4().hex)


def prepare_documents(context: RunContext, source: str) -> tuple[Prepared, str | None]:
    """Tokenize the documents, and return them with the tokenizer's folder, None for the model's own tokenizer."""
    run, name = context.run, context.run.model.tokenizer
    if name == EMBEDDED:
        # An export copies the tokenizer's files from a folder.
        folder = context.folder.root / "tokenizer"
        context.on_rank_0(lambda: embedded_tokenizer().save_pretrained(folder))
        name = str(folder)
    prepared = prepare(
        run.data,
        load_tokenizer(name or source, run.model.revision),
        validation=run.validation,
        seed=run.seed,
        folder=Path(run.data.cache or context.folder.root / "data"),
        progress=context.mesh.rank == 0,
    )
    prepared.check_vocabulary(read_config(source, run.model.config).get_text_config().vocab_size)
    return prepared, name


def adopt_run_folder(context: RunContext, start: RunStart) -> None:
    """Make the folder this run's: refuse changed documents, cut the metrics back, write the settings."""
    run, progress, path = context.run, start.progress, start.checkpoint
    if path is not None:
        facts = context.checkpoints.read_facts(path)
        if facts["data"] != start.prepared.fingerprint:
            changed = changed_sources(facts.get("sources"), start.prepared.sources)
            raise CheckpointError(
                f"{changed} are not those that {path} was trained on, and its rows would be others: put them back, or start "
                "anew from its export with model.name=... and output=..."
            )
        for change in context.on_rank_0(lambda: context.folder.describe_rate_changes(run, progress)):
            context.display.say(f"warning: {change}")
        context.display.say(f"going on from {path}: {plural(progress.total, 'step')} done")
    context.on_rank_0(lambda: context.journal.resume(progress.total))
    context.on_rank_0(lambda: context.folder.write_settings(run))
