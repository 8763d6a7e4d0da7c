"""The exceptions of the package. A message says what was given, what is needed, and the nearest choice that works.

`assert` is for our own invariants, never for a user's mistake. Exceptions that only steer control flow (`Preempted`,
`Stopped`) stand beside the code that raises them; `DeviceMemoryError` is a torch.OutOfMemoryError and stands in
`models/planner/out_of_memory.py`, because this file is imported where torch is not.
"""

from ithaca.exit_codes import MISTAKE, UNTRAINED


class IthacaError(Exception):
    """Base of every error that is the caller's to mend. `status`: what a command that it ends ends with."""

    status = MISTAKE


class MeshError(IthacaError, ValueError):
    """The degrees do not fit the world, or a degree does not fit the heads."""


class ConfigError(IthacaError, ValueError):
    """A run's file or override that says what cannot be."""


class ArgumentError(IthacaError, TypeError):
    """A call with an argument that the function does not take, or without one that it needs."""


class DataError(IthacaError, ValueError):
    """Documents that are not there, not readable, or not what the run says they are."""


class CheckpointError(IthacaError, RuntimeError):
    """A checkpoint that is not whole, or is another run's."""


class UnwrittenError(CheckpointError):
    """A file of a run that its disk did not take."""


class UntrainedError(IthacaError, ArithmeticError):
    """A stage whose every step was skipped: there is no trained model to export."""

    status = UNTRAINED


class BadStepsError(IthacaError, ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class BatchError(IthacaError, ValueError):
    """A batch that cannot be laid out: shapes, ids, masks."""


class UnsupportedError(IthacaError, NotImplementedError):
    """An architecture, a setting or a wrapping that would not be exact here, refused by name."""


class PeerError(IthacaError, RuntimeError):
    """Another rank refused its input; its own message says why."""


class LinkError(IthacaError, RuntimeError):
    """A collective between ranks that gives a wrong answer, or none."""


class MemoryPlanError(IthacaError, MemoryError):
    """No plan fits the memory there is; the message names the largest term and what would fit."""


class HostMemoryError(IthacaError, MemoryError):
    """The host has not the memory that was asked to be pinned."""


class RowError(Exception):
    """A row that is no document; the message is the reason. Counted and named, not fatal."""


class ZstdError(Exception):
    """Zstd frames that cannot be decompressed, in whichever library."""


class MisnamedError(Exception):
    """A file whose first bytes are not what its name says."""


NOT_PICKLED = (
    "pickle and torch.save cannot take a parallelized model, which holds its ranks' process groups: write its weights with "
    "ithaca.save_pretrained(model, folder) on every rank, or torch.save what torch.distributed.checkpoint.state_dict."
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) gives"
)

PART_NOT_PICKLED = (
    "pickle and torch.save were given weights, or an optimizer's state, that are spread over ranks, and would write this "
    "rank's part alone: call ithaca.save_pretrained(model, folder) on every rank; torch.save what torch.distributed."
    "checkpoint.state_dict.get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)) gives; or call "
    "torch.distributed.checkpoint.save"
)
