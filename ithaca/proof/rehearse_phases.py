"""Seconds and peaks of a step, phase by phase: of a GPU as its allocator and clock tell, or of a trace.

A phase ends at its `mark`; the next one's peak starts from what is there then.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ithaca.proof.rehearse_group import Sent
from ithaca.proof.rehearse_trace import Kinds, Trace

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class DevicePhases:
    """Seconds and peaks of a GPU, phase by phase; what was held when memory was highest."""

    def __init__(self, device: torch.device, sent: Sent) -> None:
        self.device, self.sent = device, sent
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.held: dict[str, list[Tensor]] = {}
        self._last = self._filled = 0.0

    def __enter__(self) -> DevicePhases:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._last = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        torch.cuda.synchronize(self.device)
        now, filled = time.perf_counter(), self.sent.filling_s()
        self.seconds[name] = now - self._last - (filled - self._filled)
        self._last, self._filled = now, filled
        peak = torch.cuda.max_memory_allocated(self.device)
        if peak >= max(self.peaks.values(), default=0):
            self.held = held
        self.peaks[name] = peak
        torch.cuda.reset_peak_memory_stats(self.device)


class TracedPhases:
    """The same of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kinds: dict[str, Kinds] = {}
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def __enter__(self) -> TracedPhases:
        self.trace.begin()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        now = time.perf_counter()
        self.kinds[name] = self.trace.peak
        self.seconds[name], self._last = now - self._last, now
        self.trace.begin()
