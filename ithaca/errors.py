"""The errors a user can cause. Each message says what was given, what is needed, and what works instead.

Numbered 0 in the house: everything may import it. `assert` is for our own invariants, never for these.
"""


class IthacaError(Exception):
    """Base of every error that is the caller's to mend."""


class MeshError(IthacaError, ValueError):
    """The degrees do not fit the world, or a degree does not fit the heads."""


class BatchError(IthacaError, ValueError):
    """A batch that cannot be laid out: shapes, ids, masks."""


class UnsupportedError(IthacaError, NotImplementedError):
    """An architecture, a setting or a wrapping that would not be exact here, refused by name."""


class PeerError(IthacaError, RuntimeError):
    """Another rank refused its input; its own message says why."""


class MemoryPlanError(IthacaError, MemoryError):
    """No plan fits the memory there is; the message names the largest term and what would fit."""
