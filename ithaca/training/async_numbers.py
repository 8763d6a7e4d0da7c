"""A step's numbers on their way from the device to the host, which need not wait for them.

The host hands the next step over first and hears of this one meanwhile: what it does for a step, reading rows, writing
metrics, counting, is then done while the device works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ithaca.attention.clock import moment, seconds_between


class Told:
    """Numbers of a step, by name, and when the device was through with it."""

    def __init__(self, device: torch.device, **numbers: Tensor) -> None:
        self._shapes = {name: number.shape for name, number in numbers.items()}
        flat = torch.cat([number.to(device, torch.float64).flatten() for number in numbers.values()])
        # A copy that nobody waits for goes to pinned memory.
        self._numbers = flat.to("cpu", non_blocking=True)
        self._end = mark(device)

    def read(self) -> dict[str, Any]:
        """As numbers and lists of them; waits for the step, not for what was handed over after it."""
        if not isinstance(self._end, float):
            self._end.synchronize()
        parts = self._numbers.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.view(shape).tolist() for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def seconds_since(self, other: Told | Any) -> float:
        """From another step's end, or a `mark`, to this one's; both must have been reached."""
        return seconds_between(other._end if isinstance(other, Told) else other, self._end)


def mark(device: torch.device) -> Any:
    """This moment: on a GPU when its stream comes to it."""
    return moment(device, awaited=True)
