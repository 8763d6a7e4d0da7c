"""Where a source stands among a run's settings, so that a message can say what to type for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ithaca.config import Run, Source

TRAINING, VALIDATION = "data.sources", "validation.sources"


@dataclass(frozen=True, slots=True)
class Typed:
    """A source's place in its list. `alone`: the list is this one path and nothing else, as one word gives it."""

    section: str = TRAINING
    place: int = 0
    alone: bool = True

    def key(self, name: str) -> str:
        """A setting of the source, as a word of the command line has it before its `=`."""
        return f"{self.section}.{self.place}.{name}"

    def path(self, value: str = "...") -> str:
        """The word that gives the source another path."""
        return shlex.quote(f"{self.section if self.alone else self.key('path')}={value}")


def placed(sources: Sequence[Source], section: str = TRAINING) -> list[tuple[Source, Typed]]:
    """Each source with its place."""
    alone = len(sources) == 1 and sources[0] == Source(path=sources[0].path)
    return [(source, Typed(section, place, alone)) for place, source in enumerate(sources)]


def sources_of(run: Run) -> Iterator[tuple[Source, Typed]]:
    """All sources of a run, those of its validation too."""
    yield from placed(run.data.sources)
    yield from placed(run.validation.sources, VALIDATION)
