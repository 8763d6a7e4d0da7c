"""Counts of a source's rows: good, bad, learned; and the refusal of sources with too many bad rows."""

from __future__ import annotations

from dataclasses import dataclass

from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.read_records import RawRow
from ithaca.data.tokens.encode import Encoded
from ithaca.errors import DataError, RowError

# Bad rows that messages quote.
NAMED = 5


@dataclass(slots=True)
class RowCounts:
    """Counts of rows: all, bad, documents that spell special tokens; tokens in the loss. `named`: first bad rows."""

    rows: int = 0
    bad: int = 0
    named: tuple[str, ...] = ()
    targets: int = 0
    spelled: int = 0

    def add(self, raw: RawRow, answer: Encoded | RowError) -> None:
        self.rows += 1
        if isinstance(answer, RowError):
            self.bad += 1
            if len(self.named) < NAMED:
                self.named = (*self.named, f"{raw.origin}: {answer}")
        else:
            self.targets += answer.targets
            self.spelled += answer.spelled

    def check(self, located: FoundSource, share: float) -> None:
        """Refuse a source with more bad rows than the run allows, or with no good row."""
        name = located.name
        if not self.rows:
            raise DataError(f"{name} is empty: it holds no rows; type {located.key.words()}")
        if self.bad == self.rows or self.bad > share * self.rows:
            named = "; ".join(self.named)
            allowed = "no document is left" if self.bad == self.rows else f"data.bad_share allows {share:g} of them"
            raise DataError(
                f"{self.bad:,} of {self.rows:,} rows of {name} are no documents, {allowed}: {named}; mend them, correct "
                f"{located.key.setting('column')} and kind, or raise data.bad_share{located.advice}"
            )

    def notes(self, name: str, kind: str, as_text: bool) -> tuple[str, ...]:
        """Return a line about bad rows and a line about spellings of special tokens, each only if there are any."""
        first = f", the first: {self.named[0]}" if self.named else ""
        bad = f"{self.bad:,} of {self.rows:,} rows of {name} are no documents and are left out{first}"
        fate = "became those tokens: data.special_tokens=text leaves them text"
        if as_text or kind.startswith("chat"):
            fate = "were taken as text"
        spelled = f"{self.spelled:,} of {self.rows:,} documents of {name} spell special tokens, which {fate}"
        return (*([bad] if self.bad else ()), *([spelled] if self.spelled else ()))

    def check_learned(self, located: FoundSource) -> None:
        """Refuse a source without any token in the loss."""
        if not self.targets:
            raise DataError(
                f"nothing in {located.name} is to be learned: its documents are of one token, or no token after their first has "
                f"a label other than -100; mend them, or set {located.key.setting('labels')} to the column that has the labels"
            )
