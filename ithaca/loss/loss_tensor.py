"""`LossTensor`: the loss that users hold, with a `backward` that refuses calls whose gradients would be silently wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ithaca.errors import UnsupportedError
from ithaca.memory.replay import WHOLE_BACKWARD
from ithaca.models.binding_state import Binding


class LossTensor(Tensor):
    """The loss, with a `backward` that refuses silently wrong calls and reports the memory by kind if memory runs out.

    Three reasons for a subclass of Tensor: `backward(inputs=...)` runs none of Ithaca's code, since the weights of a
    recomputed layer are no nodes of the graph. A function set on the tensor object would be lost with a temporary, as in
    `causal_loss(...).backward()`. And sharded weights in a term that is added, such as an L2 norm, must be summed over
    ranks first. What is computed from a loss with a gradient, as in `(loss / 4).backward(inputs=...)`, is a `LossTensor`
    too: autograd runs no hook at all for inputs that it does not reach, so only the tensor itself can refuse them.
    """

    binding: Binding

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `func`, with terms of sharded weights, such as an L2 norm, summed over ranks first."""
        flat, tree = tree_flatten((args, kwargs or {}))
        if func is torch.autograd.grad:
            _refuse_shards(flat)
        terms = any(isinstance(value, DTensor) for value in flat)
        args, kwargs = (
            tree_unflatten([_sum_over_ranks(value) for value in flat], tree) if terms else (args, kwargs or {})
        )
        with torch._C.DisableTorchFunctionSubclass():
            given = func(*args, **kwargs)
        binding = next((value.binding for value in flat if isinstance(value, cls)), None)
        return given if binding is None else tree_map_only(Tensor, lambda x: as_loss(x, binding), given)

    def __format__(self, how: str) -> str:
        """Format the loss as a plain tensor, as torch formats no subclass: `f"{loss:.4f}"`."""
        return self.detach().as_subclass(Tensor).__format__(how)

    def tolist(self) -> Any:
        """Return the loss as a number, which torch makes of plain tensors only."""
        return self.detach().as_subclass(Tensor).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor, as in `torch.save({"step": step, "loss": loss}, file)`."""
        plain = self.detach().as_subclass(Tensor).requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        # A recomputed layer's weights are no inputs of its node: autograd would leave their gradients out silently.
        if inputs is not None and self.binding.memory is not None and self.binding.replays:
            raise UnsupportedError(WHOLE_BACKWARD)
        _refuse_shards(tree_flatten(inputs)[0])
        if create_graph:
            raise UnsupportedError(
                "backward(create_graph=True): exchanges, tiles and layers that are run again have no second derivatives; "
                "use a model without parallelize for them"
            )
        with self.binding.handle.accounting():
            torch.autograd.backward([self], [gradient], retain_graph, inputs=inputs)


def _refuse_shards(inputs: list[Any]) -> None:
    """Refuse gradients of sharded weights: layers compute with gathered weights, not with the shards."""
    if any(isinstance(value, nn.Parameter) and isinstance(value, DTensor) for value in inputs):
        raise UnsupportedError(
            "torch.autograd.grad and backward(inputs=...) find no gradients of sharded weights: call loss.backward() and "
            "read weight.grad, with requires_grad_(False) on what shall have none"
        )


def _sum_over_ranks(value: Any) -> Any:
    """Return a sharded term summed over ranks, as a collective of all ranks; any other value as it is."""
    if not isinstance(value, DTensor):
        return value
    # NCCL takes no tensors of the host.
    on_device: Any = value.to(value.device_mesh.device_type)
    return on_device.full_tensor()


def as_loss(loss: Tensor, binding: Binding) -> Tensor:
    """Return a loss as a `LossTensor`; a loss without a gradient as it is."""
    # A rehearsal's fake tensors are a subclass too.
    if not loss.requires_grad or type(loss) is not Tensor:
        return loss
    found = loss.as_subclass(LossTensor)
    found.binding = binding
    return found
