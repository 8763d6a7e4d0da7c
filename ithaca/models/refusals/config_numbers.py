"""Refusal of numbers in a config that make every loss NaN: by name, and in the buffers of the built model.

For example, transformers accepts a `rope_theta` of 0 and rotates by infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ithaca.errors import CheckpointError

_ABOVE_ZERO = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor", "logits_scaling", "logit_scale")
_ABOVE_ZERO_ENDS = ("_theta", "softcapping", "softcap")
_EPSILONS = ("eps", "epsilon")
# Attributes of modules that hold factors computed from a config.
_SCALES = ("scaling", "scale", "attention_scaling", "softcap", "logit_scale", "embed_scale")


def check_numbers(config: Any, where: object) -> None:
    """Refuse a config with NaN, with a negative epsilon, or with a theta or scale that is not above zero."""
    for name, number in _numbers(config.to_dict()):
        last = name.rpartition(".")[2]
        if math.isnan(number):
            raise CheckpointError(f"{where} has {name}: NaN, from which nothing can be computed: mend it")
        positive = last in _ABOVE_ZERO or last.endswith(_ABOVE_ZERO_ENDS)
        if positive and not 0 < number < math.inf:
            raise CheckpointError(f"{where} has {name}: {number:g}, which must be above zero: mend it")
        if last.endswith(_EPSILONS) and not 0 <= number < math.inf:
            raise CheckpointError(
                f"{where} has {name}: {number:g}, which must be zero or more: mend it, such as to 1e-6"
            )


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield dotted name and value of every number in a config."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers({str(key): inner for key, inner in value.items()}, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", float(value)


def check_computed(model: nn.Module) -> None:
    """Refuse a model whose constants, such as rotary frequencies, are not finite."""
    for key, buffer in model.named_buffers():
        # A mask may hold minus infinity; NaN and infinity compare as False.
        if buffer.is_floating_point() and not buffer.is_meta and not bool((buffer < math.inf).all()):
            raise CheckpointError(
                f"the config gives {key} with NaN or infinity, so every loss would be NaN: look at its rope settings"
            )
    for where, module in model.named_modules():
        for name in _SCALES:
            value = module.__dict__.get(name)
            if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
                raise CheckpointError(
                    f"the config gives {where}.{name} as {value}, so every loss would be NaN: mend it"
                )
