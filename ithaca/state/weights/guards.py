"""Guards of sharded weights: refusals and corrections where torch is silently wrong or speaks of DTensors.

The list is in order. The guards stay for as long as the weights are sharded.
"""

from __future__ import annotations

from torch import nn

from ithaca.handle import Handle
from ithaca.state.optimizer.whole_step import watch_steps
from ithaca.state.weights.assigned_data import refuse_assigned
from ithaca.state.weights.dtensor_errors import name_unknown_operations
from ithaca.state.weights.partial_values import refuse_own_numbers
from ithaca.state.weights.whole_weight_methods import refuse_whole_weights
from ithaca.state.weights.written_rows import write_rows_back


def guard_weights(handle: Handle, model: nn.Module, base: nn.Module) -> None:
    """Guard the placed weights of `model`, which is `base` or a wrapper around it."""
    # Of this model.
    refuse_assigned(handle, model)
    refuse_whole_weights(handle, model, base)
    # Of the process: DTensors over the meshes of sharded weights, and steps of optimizers of such weights.
    refuse_own_numbers(model)
    write_rows_back()
    watch_steps()
    name_unknown_operations()
