"""Optimizers made before the weights were sharded: they go on with the shards, and so does the state they have.

FSDP2 puts new parameters in the place of those that it shards. An optimizer made before still has the old ones, which
get no gradient any more: it would train nothing, and no error would say so. Every torch.optim.Optimizer of the process
that has some of them is found, its parameters are exchanged where they stand (groups, schedulers and whatever else
holds the optimizer stay as they are), and state of a weight's shape is cut as the weight is. State of any other shape is
refused. Whoever else kept an old parameter, an optimizer that is no torch.optim.Optimizer or a list to be clipped, gets
an error at its first use.
"""

from __future__ import annotations

import gc
import numbers
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError
from ithaca.handle import Handle
from ithaca.mesh import Mesh
from ithaca.state.weights.partial_values import is_spread
from ithaca.state.weights.same_start import differing_of, digest, fingerprint
from ithaca.state.weights.shards import bounds

Named = list[tuple[str, weakref.ref[nn.Parameter]]]
# Under this name an optimizer may have a function that is called with the parameters before and after.
FOLLOWER = "_ithaca_follower"


class ShardedAwayParameter(nn.Parameter):
    """A parameter that FSDP2 took a shard of; the model has the shard, and every use of this one is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            "a parameter from before ithaca.parallelize is used, which the model no longer has: make the optimizer, and "
            "take lists of parameters to clip, average or freeze, from model.parameters() after parallelize"
        )


@dataclass(eq=False)
class ExistingOptimizers:
    """The parameters of a model that is about to be sharded, and the optimizers that have them.

    What nobody else holds is freed as FSDP2 goes from layer to layer, so the references are weak.
    """

    named: Named
    optimizers: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> ExistingOptimizers:
        """Find the optimizers of this model's parameters."""
        found = cls([(name, weakref.ref(p)) for name, p in model.named_parameters(remove_duplicate=False)])
        if found._holders():
            # Those that nobody has any more, and that only wait to be collected, are no matter.
            gc.collect()
            found.optimizers = found._holders()
        return found

    def check_state(self) -> None:
        """Refuse what could not be cut."""
        for optimizer, name, parameter in self._stepped():
            _check_state(optimizer, name, optimizer.state[parameter], parameter)

    def check_alike(self, mesh: Mesh) -> None:
        """Refuse state that differs between ranks, of which each would keep its own part; on all ranks."""
        known = [
            (name, key, fingerprint(value) if isinstance(value, Tensor) and value.numel() else value)
            for optimizer, name, parameter in self._stepped()
            for key, value in optimizer.state[parameter].items()
        ]
        if mesh.world > 1 and differing_of([digest(repr(sorted(known, key=repr)).encode())], mesh):
            raise UnsupportedError(
                "the ranks' optimizers have different state of the weights that are to be sharded: step them alike on all "
                "ranks, or make the optimizer after parallelize"
            )

    def follow(self, model: nn.Module, handle: Handle) -> None:
        """Exchange the parameters of every optimizer for those that the model has now."""
        now = dict(model.named_parameters(remove_duplicate=False))
        moved = {old: now[name] for name, old in self._living()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # In place: LBFGS and others have the list itself.
                group["params"][:] = [moved.get(p, p) for p in group["params"]]
            for old, new in moved.items():
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    optimizer.state[new] = {key: _carried(value, old.shape, new) for key, value in state.items()}
            handle.steps_by(optimizer)
            if FOLLOWER in optimizer.__dict__:
                optimizer.__dict__[FOLLOWER](moved)
        for old, new in moved.items():
            if old is not new:
                old.__class__ = ShardedAwayParameter

    def _living(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, reference in self.named if (parameter := reference()) is not None]

    def _holders(self) -> list[Any]:
        mine = {id(parameter) for _, parameter in self._living()}
        # The type itself is asked: isinstance would have proxies of all libraries make up their class.
        everyone = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        return [each for each in everyone if mine & {id(p) for group in _groups(each) for p in group["params"]}]

    def _stepped(self) -> Iterable[tuple[Any, str, nn.Parameter]]:
        """Each optimizer with each parameter that it has state of, once."""
        first = {id(parameter): (name, parameter) for name, parameter in reversed(self._living())}
        for optimizer in self.optimizers:
            for name, parameter in first.values():
                if parameter in optimizer.state:
                    yield optimizer, name, parameter


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """None yet of one whose __init__ is still running, or has failed."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _check_state(optimizer: Any, name: str, state: dict[str, Any], parameter: nn.Parameter) -> None:
    for key, value in state.items():
        plain = type(value) is Tensor and (value.ndim == 0 or value.shape == parameter.shape)
        if not (plain or value is None or isinstance(value, numbers.Number)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} has stepped, and its state {key!r} of {name} is not of the weight's shape, so "
                "it cannot be cut as the weight is: call parallelize before the first step, or make the optimizer after it"
            )


def cut_loaded_state(optimizer: Any) -> None:
    """Cut state that one process wrote and `load_state_dict` put beside shards, as it stands in memory: whole."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if is_spread(parameter) else None
            if not state:
                continue
            whole = [key for key, value in state.items() if type(value) is Tensor and value.shape == parameter.shape]
            if not whole:
                # State comes for all weights or for none.
                return
            state.update({key: _carried(state[key], parameter.shape, parameter) for key in whole})


def _carried(value: Any, shape: torch.Size, new: nn.Parameter) -> Any:
    """One entry of an optimizer's state, for the parameter that the model has now."""
    if not isinstance(value, Tensor) or value.shape != shape or value.ndim == 0:
        return value
    if not isinstance(new, DTensor):
        # The weights may have moved to the device meanwhile.
        return value.to(new.device)
    piece = value[bounds(new)].to(new.device, copy=True).contiguous()
    return DTensor.from_local(
        piece, new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
    )
