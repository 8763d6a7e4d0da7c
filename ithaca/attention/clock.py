"""Timers around the exchange and the attention kernels: CUDA events on a GPU, the host's clock elsewhere.

    with CLOCK.recording(device) as spans:
        step()
    spans.seconds()     # {"exchange": ..., "attention": ...}

On a GPU the exchange's time is that of packing and of the part of the collective that no computation hides. There is
one clock for the process, because backward runs on threads of torch's own. A stopped clock costs a microsecond a call.
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
    """Timed calls: name, start and end of each."""

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each name; a GPU's stream must have passed the last end."""
        totals = {EXCHANGE: 0.0, ATTENTION: 0.0}
        for name, start, end in self:
            totals[name] += seconds_between(start, end)
        return totals


class Clock:
    """Collects the times of decorated functions while a `recording` block lasts."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._spans = Spans()

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[Spans]:
        """Time all decorated functions inside the block."""
        self._spans, self._device = Spans(), device
        try:
            yield self._spans
        finally:
            self._device = None

    def timed(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator that times a function under `name`."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @wraps(function)
            def timed_function(*args: P.args, **kwargs: P.kwargs) -> R:
                device = self._device
                if device is None:
                    return function(*args, **kwargs)
                start = moment(device)
                result = function(*args, **kwargs)
                self._spans.append((name, start, moment(device)))
                return result

            return timed_function

        return decorate


def moment(device: torch.device, *, awaited: bool = False) -> Any:
    """Return the current time, an event on a GPU; `awaited`: a thread that waits for the event sleeps."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, blocking=awaited)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two moments; a GPU's stream must have passed the later one."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


CLOCK = Clock()
