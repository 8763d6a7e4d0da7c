"""The memory of one rank at the worst moment of a step, as a list of terms with their bytes on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass

# The term of the bytes that the caching allocator holds in gaps between tensors.
GAPS = "allocator slack"


@dataclass(frozen=True, slots=True)
class Term:
    """One share of a rank's memory at the worst moment."""

    name: str
    device_bytes: int
    host_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class StepMemory:
    """All terms at the worst moment of a step, in the order in which they are allocated."""

    moment: str
    terms: tuple[Term, ...]

    @property
    def device_bytes(self) -> int:
        return sum(term.device_bytes for term in self.terms)

    @property
    def host_bytes(self) -> int:
        return sum(term.host_bytes for term in self.terms)

    @property
    def allocated(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.name != GAPS)

    def largest(self, *, host: bool = False) -> Term:
        """Return the largest term on the device, or on the host."""
        return max(self.terms, key=lambda term: term.host_bytes if host else term.device_bytes)
