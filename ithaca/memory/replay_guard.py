"""Guard of a recomputation: refuse to run modules again in backward if they have changed since forward.

`ModuleSnapshot.of` records the weights, PEFT's adapters and the training mode of a layer or a unit in forward. Before
backward runs the same modules again, `refuse_changed` compares them with the record:

    snapshot = ModuleSnapshot.of([layer])   # in forward
    ...                                     # optimizer.step(), model.eval(), another adapter: a different function
    snapshot.refuse_changed()               # in backward: UnsupportedError names what changed

Weights are compared where they are used, because an optimizer may step some while others still wait for backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ithaca.errors import UnsupportedError

# Instead of a version: PEFT's target_parameters changes the version of frozen weights in every run.
_FROZEN = -1


@dataclass(frozen=True, eq=False, slots=True)
class ModuleSnapshot:
    """Record of some modules and all their submodules at one time."""

    modules: list[nn.Module]
    training: list[bool]
    parameters: list[nn.Parameter | None]
    versions: list[int]
    adapters: tuple[Any, ...]

    @classmethod
    def of(cls, roots: Iterable[nn.Module]) -> ModuleSnapshot:
        # By hand and not by modules(): this runs once a layer in every forward, and needs neither names nor order.
        modules = list(roots)
        for module in modules:
            modules.extend(child for child in module._modules.values() if child is not None)
        parameters = _parameters(modules)
        training = [module.training for module in modules]
        return cls(modules, training, parameters, _versions(parameters), _adapters(modules))

    @property
    def mode_changed(self) -> bool:
        """True if train() or eval() has changed the mode of a module since."""
        return [module.training for module in self.modules] != self.training

    def refuse_changed(self) -> None:
        """Refuse other weights, changed weights, and other adapters than in the record."""
        name = type(self.modules[0]).__name__
        # In any order: PEFT removes adapted parameters for a run and puts them back at the end.
        if set(map(id, _parameters(self.modules))) != set(map(id, self.parameters)):
            raise UnsupportedError(
                f"{name} is run again in backward and has other weights than in its forward pass (as under "
                "torch.func.functional_call): call backward while those are in place, or use "
                "parallelize(..., memory=None)"
            )
        # Adapters before versions: selecting an adapter may write to its weights.
        if _adapters(self.modules) != self.adapters:
            raise UnsupportedError(
                f"{name} is run again in backward and has other adapters on than in its forward pass: call backward "
                "before others are chosen, switched off or merged, or use parallelize(..., memory=None)"
            )
        if _versions(self.parameters) != self.versions:
            raise UnsupportedError(
                f"{name} is run again in backward and its weights were changed or frozen since its forward pass: "
                "call backward before optimizer.step() or whatever else does so"
            )

    def refuse_changed_mode(self) -> None:
        """Refuse modules that draw random numbers in training and whose mode has changed."""
        raise UnsupportedError(
            f"{type(self.modules[0]).__name__} is run again in backward, draws random numbers in training, and "
            "model.train() or model.eval() was called since its forward pass: call backward before that, go back to "
            "the mode of the forward pass, or use parallelize(..., memory=None)"
        )


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter | None]:
    return [parameter for module in modules for parameter in module._parameters.values()]


def _versions(parameters: list[nn.Parameter | None]) -> list[int]:
    """Return the version counters of trained weights, which autograd compares for the tensors it saves.

    torch counts neither steps of fused optimizers nor writes to the shards that FSDP2 gathers weights from. Autograd
    misses the same changes.
    """
    return [p._version if p.requires_grad else _FROZEN for p in parameters if p is not None]


def _adapters(modules: list[nn.Module]) -> tuple[Any, ...]:
    return adapters_now([module for module in modules if "base_layer" in module._modules])


def adapters_now(layers: list[Any]) -> tuple[Any, ...]:
    """Return the active adapters of PEFT's layers and their scales, which are attributes that no graph records."""
    return tuple(
        (
            getattr(layer, "disable_adapters", None),
            tuple(getattr(layer, "active_adapters", ())),
            tuple(getattr(layer, "merged_adapters", ())),
            tuple(sorted(getattr(layer, "scaling", {}).items())),
        )
        for layer in layers
    )
