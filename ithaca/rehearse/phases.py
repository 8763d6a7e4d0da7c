"""Seconds and memory peaks of a step, phase by phase: from a GPU's allocator and events, or from a trace.

    with DevicePhases(...) as phase:
        loss = forward();     phase.mark("forward", held)
        loss.backward();      phase.mark("backward", held)
        optimizer.step();     phase.mark("optimizer", held)

A phase ends at its `mark`, and the next phase's peak starts from what is alive then. A layer is timed from its own
beginning to the beginning of the next, so the seconds of a phase's last layer are unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.attention.clock import moment, seconds_between
from ithaca.rehearse.lone_group import TrafficCounter
from ithaca.rehearse.memory_trace import Kinds, Trace, bytes_of
from ithaca.training.watch.layer_boundaries import put_boundaries

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
# About a tenth of a second.
WAIT_CYCLES = 200_000_000
# The threads of a real group hold a collective's buffers a little longer than the collective takes.
RELEASE_S = 0.05


class _LayerClock:
    """The begin of each layer's forward and backward, and the number of buffers filled by then."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, sent: TrafficCounter) -> None:
        self.layers, self.device, self.sent = layers, device, sent
        self._began: dict[str, tuple[Any, int]] = {}
        self._remove: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._remove = put_boundaries(self.layers, self._at)

    def __exit__(self, *error: object) -> None:
        if self._remove is not None:
            self._remove()

    def _at(self, label: str) -> None:
        self._began[label] = moment(self.device), len(self.sent.spans)

    def seconds(self) -> dict[str, list[float | None]]:
        """Return seconds by phase and layer, without the filling of buffers; None where unknown."""
        count = len(self.layers)
        return {
            FORWARD: [self._between(f"forward layer {i}", f"forward layer {i + 1}") for i in range(count)],
            BACKWARD: [self._between(f"backward layer {i}", f"backward layer {i - 1}") for i in range(count)],
        }

    def _between(self, one: str, other: str) -> float | None:
        if one not in self._began or other not in self._began:
            return None
        (start, filled), (end, more) = self._began[one], self._began[other]
        return seconds_between(start, end) - self.sent.filling_s(filled, more)


class DevicePhases:
    """Seconds and peaks of a GPU; `held`: bytes on the device and on the host at the end of each phase, by kind."""

    def __init__(self, device: torch.device, sent: TrafficCounter, layers: Sequence[nn.Module]) -> None:
        self.device, self.sent = device, sent
        self.peaks: dict[str, int] = {}
        self.held: dict[str, dict[str, tuple[int, int]]] = {}
        self._clock = _LayerClock(layers, device, sent)
        self._ends: list[tuple[str, Any, int]] = []

    def __enter__(self) -> DevicePhases:
        self._clock.__enter__()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        # Keep the device busy, so that the host is ahead of it, as in a run: there the host prepares a step's first kernel
        # while the step before is still computed.
        torch.cuda._sleep(WAIT_CYCLES)
        self._ends = [("", moment(self.device), len(self.sent.spans))]
        return self

    def __exit__(self, *error: object) -> None:
        self._clock.__exit__()

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        self._ends.append((name, moment(self.device), len(self.sent.spans)))
        self.peaks[name] = torch.cuda.max_memory_allocated(self.device)
        self.held[name] = {kind: (_bytes(own, "cuda"), _bytes(own, "cpu")) for kind, own in held.items()}
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the phases marked so far, without the filling of buffers; waits for the device."""
        torch.cuda.synchronize(self.device)
        return {
            name: seconds_between(start, end) - self.sent.filling_s(filled, more)
            for (_, start, filled), (name, end, more) in pairwise(self._ends)
        }

    @property
    def kinds(self) -> dict[str, Kinds]:
        device = {name: {kind: here for kind, (here, _) in held.items()} for name, held in self.held.items()}
        return {name: Kinds(**own, working=self.peaks[name] - sum(own.values())) for name, own in device.items()}

    def on_host(self) -> int:
        """Return the most bytes of weights, optimizer state and gradients on the host."""
        return max(sum(there for _, there in held.values()) for held in self.held.values())

    def layers(self) -> dict[str, list[float | None]]:
        return self._clock.seconds()


class TracedPhases:
    """Seconds and peaks of a traced step on the CPU."""

    def __init__(self, trace: Trace, sent: TrafficCounter, layers: Sequence[nn.Module]) -> None:
        self.trace = trace
        self.kinds: dict[str, Kinds] = {}
        self.seconds: dict[str, float] = {}
        self._held: list[dict[str, int]] = []
        self._clock = _LayerClock(layers, torch.device("cpu"), sent)
        self._last = 0.0

    def __enter__(self) -> TracedPhases:
        self._clock.__enter__()
        self.trace.begin()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._clock.__exit__()

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        now = time.perf_counter()
        self.kinds[name] = self.trace.peak
        self.seconds[name] = now - self._last
        self._held.append({kind: bytes_of(own) for kind, own in held.items()} if self.trace.holds_away else {})
        time.sleep(RELEASE_S)
        self.trace.begin()
        self._last = time.perf_counter()

    def on_host(self, kinds: Sequence[str] = ("weights", "optimizer", "gradients")) -> int:
        """Return the most bytes of these kinds that count as the host's."""
        return max(sum(held.get(kind, 0) for kind in kinds) for held in self._held)

    def layers(self) -> dict[str, list[float | None]]:
        return self._clock.seconds()


def _bytes(tensors: list[Tensor], kind: str) -> int:
    return sum(x.nbytes for x in tensors if x.device.type == kind)
