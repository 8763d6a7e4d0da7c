"""Exceptions of the package. A message has what was given, what is needed, and the nearest choice that works.

Internal invariants use `assert`, never these classes. Exceptions that only steer control flow (`Preempted`, `Stopped`)
stand beside the code that raises them. `DeviceMemoryError` is a torch.OutOfMemoryError and stands in
`models/planner/out_of_memory.py`, because this file is imported without torch.
"""

from ithaca.exit_codes import MISTAKE, UNTRAINED


class IthacaError(Exception):
    """Base of every error that a user can mend. `status`: exit code of a command that ends with the error."""

    status = MISTAKE


class MeshError(IthacaError, ValueError):
    """Raised if the degrees of parallelism do not fit the number of ranks, or a degree does not fit the heads."""


class ConfigError(IthacaError, ValueError):
    """Raised if a run file, an override or an option has a value that is not allowed."""


class ArgumentError(IthacaError, TypeError):
    """Raised if a public function is called with an argument of a wrong name or kind, or without one that it needs."""


class DataError(IthacaError, ValueError):
    """Raised if documents are missing, not readable, or not what the run's settings say they are."""


class CheckpointError(IthacaError, RuntimeError):
    """Raised if a checkpoint is incomplete, damaged, or belongs to another run."""


class UnwrittenError(CheckpointError):
    """Raised if a file of a run cannot be written, because the disk is full or refuses it."""


class UntrainedError(IthacaError, ArithmeticError):
    """Raised if every step of a stage was skipped, so that there is no trained model to export."""

    status = UNTRAINED


class BadStepsError(IthacaError, ArithmeticError):
    """Raised if too many steps in a row have a loss or gradient that is not finite."""


class BatchError(IthacaError, ValueError):
    """Raised if a batch cannot be laid out: its shapes, ids or masks."""


class UnsupportedError(IthacaError, NotImplementedError):
    """Raised if an architecture, a setting or a wrapper would not be exact here."""


class PeerError(IthacaError, RuntimeError):
    """Raised if another rank refused its input; that rank's own message has the reason."""


class LinkError(IthacaError, RuntimeError):
    """Raised if the start-up test of the links gets a wrong result from a collective, or none."""


class MemoryPlanError(IthacaError, MemoryError):
    """Raised if no plan fits the memory; the message has the largest term and the nearest plan that fits."""


class HostMemoryError(IthacaError, MemoryError):
    """Raised if the host has less free memory than a plan pins."""


class RowError(Exception):
    """Raised if a row is no document. The message is the reason; the row is counted, named and left out."""


class ZstdError(Exception):
    """Raised if zstd frames cannot be decompressed, whichever library does it."""


class MisnamedError(Exception):
    """Raised if the first bytes of a file are not those of the format in its name."""


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
