"""Check of a run's folder before torch is loaded: a start is refused, or the run has ended and nothing is left to do.

Invariant: nothing is written and no checkpoint is judged here; where the folder cannot be read so quickly, or its newest
checkpoint may not be whole, the ranks find out and say it.
"""

from __future__ import annotations

from pathlib import Path

from ithaca.config.schema import RunSettings
from ithaca.errors import ConfigError, IthacaError
from ithaca.models.files.export_folder import mark_of, read_mark
from ithaca.state.checkpoint.manifest import listed, read_facts
from ithaca.training.run.changed_settings import begun_stages, settle_place
from ithaca.training.run.progress import Place, place_in
from ithaca.training.run.run_folder import RunFolder


def look_ahead(run: RunSettings) -> str | None:
    """Refuse a folder of another run; return the message for a run that has ended, None for any other."""
    folder = RunFolder(Path(run.output))
    above = next(path for path in (folder.root, *folder.root.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"output={run.output}: {above} is a file: set output=... to a new folder")
    found = [(path, place) for path in listed(folder.checkpoints) if (place := _place_of(path)) is not None]
    # The newest may turn out to be damaged: what is refused here is refused from each.
    first = min((place for _, place in found), key=begun_stages, default=None)
    folder.refuse_another(run, first)
    if not found or found[0][0] != listed(folder.checkpoints)[0]:
        return None
    path, place = found[0]
    try:
        settled = settle_place(place, run, read_facts(path).get("counts"))
    except ConfigError:
        return None
    ended = settled == place and place.stage == len(run.stages)
    return _ended(run, folder, place) if ended and _written(run, folder, path) else None


def _place_of(path: Path) -> Place | None:
    try:
        return place_in(read_facts(path), path)
    except IthacaError:
        return None


def _written(run: RunSettings, folder: RunFolder, checkpoint: Path) -> bool:
    """True if the last stage's model is there, of this checkpoint."""
    model = folder.stage(len(run.stages) - 1, run.stages[-1].length)
    try:
        return folder.export.exists() and mark_of(checkpoint).same_model(read_mark(model))
    except IthacaError:
        return False


def _ended(run: RunSettings, folder: RunFolder, place: Place) -> str:
    number, stage = len(run.stages) - 1, run.stages[-1]
    more = (
        f"stages.{number}.steps={2 * stage.count}"
        if stage.tokens is None
        else f"stages.{number}.tokens={2 * stage.tokens}"
    )
    return (
        f"{folder.root} holds this run, ended after {place.total} steps, and nothing is left to do; its model is "
        f"{folder.model(len(run.stages))}; to train on, give the last stage more, such as {more}, or set output=... to "
        "a new folder"
    )
