"""What a run of modules depends on beside its input: which weights, which adapters, whether it trains.

Noted in forward, and looked at again before the same is run again in backward: a second run that would not be the
first is refused. Weights are compared where they are used, since an optimizer may step some while others still have
their backward to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ithaca.errors import UnsupportedError

# In place of a count: that of frozen weights moves with every run where PEFT adapts parameters (target_parameters).
_FROZEN = -1


@dataclass(frozen=True, eq=False, slots=True)
class Noted:
    """Modules, all that are in them too, as they were at one time."""

    modules: list[nn.Module]
    training: list[bool]
    parameters: list[nn.Parameter | None]
    versions: list[int]
    adapters: tuple[Any, ...]

    @classmethod
    def of(cls, roots: Iterable[nn.Module]) -> Noted:
        modules = list(roots)
        for module in modules:
            modules.extend(child for child in module._modules.values() if child is not None)
        parameters = _parameters(modules)
        return cls(modules, _training(modules), parameters, _versions(parameters), _adapters(modules))

    @property
    def switched(self) -> bool:
        """Whether train() or eval() made another of some module since."""
        return _training(self.modules) != self.training

    def refuse_changed(self) -> None:
        """Other weights, the same with other values, or other adapters than noted."""
        name = type(self.modules[0]).__name__
        # In any order: PEFT takes parameters that it adapts out for a run and puts them back at the end.
        if set(map(id, _parameters(self.modules))) != set(map(id, self.parameters)):
            raise UnsupportedError(
                f"{name} is run again in backward and has other weights than in its forward pass (as under "
                "torch.func.functional_call): call backward while those are in place, or use "
                "parallelize(..., memory=None)"
            )
        # Adapters first: choosing one may touch its weights.
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

    def refuse_switched(self) -> None:
        """For what draws random numbers in training."""
        raise UnsupportedError(
            f"{type(self.modules[0]).__name__} is run again in backward, draws random numbers in training, and "
            "model.train() or model.eval() was called since its forward pass: call backward before that, go back to "
            "the mode of the forward pass, or use parallelize(..., memory=None)"
        )


def _training(modules: list[nn.Module]) -> list[bool]:
    return [module.training for module in modules]


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter | None]:
    return [parameter for module in modules for parameter in module._parameters.values()]


def _versions(parameters: list[nn.Parameter | None]) -> list[int]:
    """How often trained weights were changed in place, as autograd asks of what it saved.

    torch does not count fused optimizers' steps, nor what happens to the shards that FSDP2 gathers these from: those
    pass unseen, as they do elsewhere.
    """
    return [p._version if p.requires_grad else _FROZEN for p in parameters if p is not None]


def _adapters(modules: list[nn.Module]) -> tuple[Any, ...]:
    return adapters_now([module for module in modules if "base_layer" in module._modules])


def adapters_now(layers: list[Any]) -> tuple[Any, ...]:
    """Of PEFT's layers: which adapters are on and how much they count. Attributes, which no graph looks at again."""
    return tuple(
        (
            getattr(layer, "disable_adapters", None),
            tuple(getattr(layer, "active_adapters", ())),
            tuple(getattr(layer, "merged_adapters", ())),
            tuple(sorted(getattr(layer, "scaling", {}).items())),
        )
        for layer in layers
    )
