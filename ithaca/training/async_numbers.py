"""`AsyncNumbers`: a step's numbers, copied from the device to pinned host memory without blocking the host.

The host launches the next step before `read()`, so that reading rows and writing metrics overlap with the device's work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ithaca.attention.clock import moment, seconds_between


class AsyncNumbers:
    """Named numbers of a step, and the moment at which the device finished the step."""

    def __init__(self, device: torch.device, **numbers: Tensor) -> None:
        self._shapes = {name: number.shape for name, number in numbers.items()}
        flat = torch.cat([number.to(device, torch.float64).flatten() for number in numbers.values()])
        # torch copies to pinned memory where `non_blocking` is set.
        self._numbers = flat.to("cpu", non_blocking=True)
        self._end = record_event(device)

    def read(self) -> dict[str, Any]:
        """Return the numbers as floats and lists; wait for this step, but not for steps launched later."""
        if not isinstance(self._end, float):
            self._end.synchronize()
        parts = self._numbers.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.view(shape).tolist() for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def seconds_since(self, start: AsyncNumbers | Any) -> float:
        """Return the seconds from another step's end, or from a `record_event`, to this step's end; both must have passed."""
        return seconds_between(start._end if isinstance(start, AsyncNumbers) else start, self._end)


def record_event(device: torch.device) -> Any:
    """Record the present moment: on a GPU the moment at which its stream gets there."""
    return moment(device, awaited=True)
