"""Keys of sources among a run's settings (`data.sources.0`), so that a message can have the words to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ithaca.config.schema import RunSettings, SourceSettings

TRAINING, VALIDATION = "data.sources", "validation.sources"


@dataclass(frozen=True, slots=True)
class SourceKey:
    """Section and index of a source. `alone`: the section is this one path, so `data.sources=PATH` sets it."""

    section: str = TRAINING
    index: int = 0
    alone: bool = True

    def setting(self, name: str) -> str:
        """Return the full name of one of the source's settings, such as `data.sources.0.format`."""
        return f"{self.section}.{self.index}.{name}"

    def words(self, value: str = "...") -> str:
        """Return the command-line words that give the source another path."""
        return shlex.quote(f"{self.section if self.alone else self.setting('path')}={value}")


def with_keys(sources: Sequence[SourceSettings], section: str = TRAINING) -> list[tuple[SourceSettings, SourceKey]]:
    """Return each source with its key."""
    alone = len(sources) == 1 and sources[0] == SourceSettings(path=sources[0].path)
    return [(source, SourceKey(section, index, alone)) for index, source in enumerate(sources)]


def sources_of(run: RunSettings) -> Iterator[tuple[SourceSettings, SourceKey]]:
    """Yield all sources of a run with their keys, validation's own sources too."""
    yield from with_keys(run.data.sources)
    yield from with_keys(run.validation.sources, VALIDATION)
