"""The errors a user can cause. Each message says what was given, what is needed, and what works instead.

Numbered 0 in the house: everything may import it. `assert` is for our own invariants, never for these.
"""


class IthacaError(Exception):
    """Base of every error that is the caller's to mend. `status`: what a command that it ends ends with."""

    status = 2


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

    status = 65


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
