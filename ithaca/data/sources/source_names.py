"""Place of a source among a run's settings (`data.sources.0`), so that a message can say what to type for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ithaca.config.schema import Run, Source

TRAINING, VALIDATION = "data.sources", "validation.sources"


@dataclass(frozen=True, slots=True)
class Typed:
    """Section and index of a source. `alone`: the section is this one path, so `data.sources=PATH` sets it."""

    section: str = TRAINING
    place: int = 0
    alone: bool = True

    def key(self, name: str) -> str:
        """Return the full name of one of the source's settings, such as `data.sources.0.format`."""
        return f"{self.section}.{self.place}.{name}"

    def path(self, value: str = "...") -> str:
        """Return the command-line word that gives the source another path."""
        return shlex.quote(f"{self.section if self.alone else self.key('path')}={value}")


def placed(sources: Sequence[Source], section: str = TRAINING) -> list[tuple[Source, Typed]]:
    """Pair each source with its place."""
    alone = len(sources) == 1 and sources[0] == Source(path=sources[0].path)
    return [(source, Typed(section, place, alone)) for place, source in enumerate(sources)]


def sources_of(run: Run) -> Iterator[tuple[Source, Typed]]:
    """Yield all sources of a run with their places, those of its validation too."""
    yield from placed(run.data.sources)
    yield from placed(run.validation.sources, VALIDATION)
