"""Check of a run's folder before torch is imported: refuse the start, or report that the run has ended already.

Invariant: nothing is written and no checkpoint's checksums are read. Where the folder cannot be judged so quickly, or
its newest checkpoint may not be whole, the ranks check again.
"""

from __future__ import annotations

from pathlib import Path

from ithaca.config.schema import RunSettings
from ithaca.errors import ConfigError, IthacaError
from ithaca.models.files.export_folder import mark_of, read_mark
from ithaca.quantities import plural
from ithaca.state.checkpoint.manifest import listed, read_facts
from ithaca.training.run.changed_settings import resumed_progress
from ithaca.training.run.progress import RunProgress, read_progress
from ithaca.training.run.run_folder import RunFolder


def check_folder(run: RunSettings) -> str | None:
    """Refuse a folder of another run; return the message for a run that has ended, None for any other run."""
    folder = RunFolder(Path(run.output))
    above = next(path for path in (folder.root, *folder.root.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"output={run.output}: {above} is a file: set output=... to a new folder")
    checkpoints = listed(folder.checkpoints)
    found = [(path, progress) for path in checkpoints if (progress := _progress_of(path)) is not None]
    # The newest checkpoint may turn out to be damaged, so only settings that every checkpoint refuses are refused here.
    earliest = min((progress for _, progress in found), key=lambda each: each.begun_stages, default=None)
    folder.refuse_another(run, earliest)
    if not found or found[0][0] != checkpoints[0]:
        return None
    path, progress = found[0]
    try:
        resumed = resumed_progress(progress, run, read_facts(path).get("counts"))
    except ConfigError:
        return None
    ended = resumed == progress and progress.stage == len(run.stages)
    return _describe_end(run, folder, progress) if ended and _has_model(run, folder, path) else None


def _progress_of(path: Path) -> RunProgress | None:
    try:
        return read_progress(read_facts(path), path)
    except IthacaError:
        return None


def _has_model(run: RunSettings, folder: RunFolder, checkpoint: Path) -> bool:
    """True if the last stage's model was exported from `checkpoint`."""
    model = folder.stage(len(run.stages) - 1, run.stages[-1].length)
    try:
        return folder.export.exists() and mark_of(checkpoint).same_model(read_mark(model))
    except IthacaError:
        return False


def _describe_end(run: RunSettings, folder: RunFolder, progress: RunProgress) -> str:
    number, stage = len(run.stages) - 1, run.stages[-1]
    name, longer = ("steps", 2 * stage.count) if stage.tokens is None else ("tokens", 2 * stage.tokens)
    return (
        f"{folder.root} holds this run, ended after {plural(progress.total, 'step')}, and nothing is left to do; its model is "
        f"{folder.model(len(run.stages))}; to train on, give the last stage more, such as stages.{number}.{name}={longer}, "
        "or set output=... to a new folder"
    )
