"""Optimizers made before `parallelize`: their parameters and state are exchanged for the shards.

FSDP2 replaces parameters by sharded ones. An optimizer made before keeps the old parameters, which get no gradients any
more, and would train nothing without an error. So:

    before    optimizer.param_groups -> old weight [4096, 4096],  state exp_avg [4096, 4096]
    after     optimizer.param_groups -> shard      [1024, 4096],  state exp_avg [1024, 4096], same groups and scheduler

Every torch.optim.Optimizer of the process with such parameters is found. State of another shape than the weight's is
refused. Any other holder of an old parameter (a list to be clipped, an optimizer of another kind) gets an error at the
first use.
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
from ithaca.state.weights.equal_weights import differing_of, digest, fingerprint
from ithaca.state.weights.partial_values import is_spread
from ithaca.state.weights.shards import bounds

Named = list[tuple[str, weakref.ref[nn.Parameter]]]
# Attribute of an optimizer: a function that is called with a dict of old parameters to new ones.
FOLLOWER = "_ithaca_follower"


class ShardedAwayParameter(nn.Parameter):
    """Old parameter whose shard is now in the model; every use is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            "a parameter from before ithaca.parallelize is used, which the model no longer has: make the optimizer, and "
            "take lists of parameters to clip, average or freeze, from model.parameters() after parallelize"
        )


@dataclass(eq=False)
class ExistingOptimizers:
    """Parameters of a model before sharding, and the optimizers of the process that have them.

    The references are weak: FSDP2 frees each layer's whole weights after it has sharded them.
    """

    named: Named
    optimizers: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> ExistingOptimizers:
        """Find the optimizers of this model's parameters."""
        found = cls([(name, weakref.ref(p)) for name, p in model.named_parameters(remove_duplicate=False)])
        if found._holders():
            # Optimizers that only wait for garbage collection do not count.
            gc.collect()
            found.optimizers = found._holders()
        return found

    def check_state(self) -> None:
        """Refuse state that cannot be cut like its weight."""
        for optimizer, name, parameter in self._stepped():
            _check_state(optimizer, name, optimizer.state[parameter], parameter)

    def check_equal(self, mesh: Mesh) -> None:
        """Refuse state that differs between ranks, which would be mixed from their parts; called on all ranks."""
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
        """Exchange the parameters of every optimizer for the model's present ones."""
        now = dict(model.named_parameters(remove_duplicate=False))
        moved = {old: now[name] for name, old in self._living()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # In place: LBFGS and others keep a reference to the list.
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
        # The type and not isinstance, which runs the __class__ of other libraries' proxies.
        everyone = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        return [each for each in everyone if mine & {id(p) for group in _groups(each) for p in group["params"]}]

    def _stepped(self) -> Iterable[tuple[Any, str, nn.Parameter]]:
        """Yield each optimizer with each parameter that it has state of, once."""
        first = {id(parameter): (name, parameter) for name, parameter in reversed(self._living())}
        for optimizer in self.optimizers:
            for name, parameter in first.values():
                if parameter in optimizer.state:
                    yield optimizer, name, parameter


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups, none of an optimizer whose __init__ has not finished."""
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
    """Cut whole state that `load_state_dict` has put beside sharded weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if is_spread(parameter) else None
            if not state:
                continue
            whole = [key for key, value in state.items() if type(value) is Tensor and value.shape == parameter.shape]
            if not whole:
                # load_state_dict brings state of all weights or of none, so the first weight decides.
                return
            state.update({key: _carried(state[key], parameter.shape, parameter) for key in whole})


def _carried(value: Any, shape: torch.Size, new: nn.Parameter) -> Any:
    """Return one entry of an optimizer's state, cut or moved for the model's present parameter."""
    if not isinstance(value, Tensor) or value.shape != shape or value.ndim == 0:
        return value
    if not isinstance(new, DTensor):
        # The weights may have moved to the device since.
        return value.to(new.device)
    piece = value[bounds(new)].to(new.device, copy=True).contiguous()
    return DTensor.from_local(
        piece, new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
    )
