"""Where a step's time goes: the exchange and the attention clock themselves while somebody wants to know.

On a GPU the times are those of its stream, between two events: of the exchange, the packing and what nothing hid.
One clock a process, because backward runs on threads of torch's own; switched off it costs a microsecond a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
EXCHANGE, ATTENTION = "exchange", "attention"


class Spans(list[tuple[str, Any, Any]]):
    """What was clocked: names, each with where it began and ended."""

    def seconds(self) -> dict[str, float]:
        """By name; on a GPU its stream must have come to the end of all of them."""
        totals = {EXCHANGE: 0.0, ATTENTION: 0.0}
        for name, start, end in self:
            totals[name] += seconds_between(start, end)
        return totals


class Clock:
    """Gathers spans of time between `running` and the end of it."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._spans = Spans()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[Spans]:
        self._spans, self._device = Spans(), device
        try:
            yield self._spans
        finally:
            self._device = None

    def clocked(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function whose time counts under `name`."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @wraps(function)
            def timed(*args: P.args, **kwargs: P.kwargs) -> R:
                device = self._device
                if device is None:
                    return function(*args, **kwargs)
                start = moment(device)
                result = function(*args, **kwargs)
                self._spans.append((name, start, moment(device)))
                return result

            return timed

        return decorate


def moment(device: torch.device, *, awaited: bool = False) -> Any:
    """Now, on the device's own clock; `awaited`: a thread that waits for it sleeps meanwhile."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, blocking=awaited)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """On a GPU its stream must have come to the end."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


CLOCK = Clock()
