"""What is refused, or made right, of weights that are spread over ranks: everything that torch gets wrong in silence or
says in words about DTensors. The list is in order; it stays for as long as the weights are spread."""

from __future__ import annotations

from torch import nn

from ithaca.handle import Handle
from ithaca.state.optimizer.whole_step import watch_steps
from ithaca.state.weights.assigned import refuse_assigned
from ithaca.state.weights.dtensor_errors import name_unknown_operations
from ithaca.state.weights.partial_values import refuse_own_numbers
from ithaca.state.weights.whole_weight_methods import refuse_whole_weights
from ithaca.state.weights.written_rows import write_rows_back


def guard_weights(handle: Handle, model: nn.Module, base: nn.Module) -> None:
    """Guard the weights of `model`, which is `base` or is wrapped around it, after they were placed."""
    # On this model.
    refuse_assigned(handle, model)
    refuse_whole_weights(handle, model, base)
    # On DTensors over the meshes that weights were spread over, and on steps of optimizers that have such weights.
    refuse_own_numbers(model)
    write_rows_back()
    watch_steps()
    name_unknown_operations()
