"""Seconds and peaks of a step, phase by phase: of a GPU as its allocator and clock tell, or of a trace.

A phase ends at its `mark`; the next one's peak starts from what is there then. Layers are clocked one by one, from the
beginning of one to that of the next, so that nothing says where the last one of a phase ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.attention.clock import moment, seconds_between
from ithaca.rehearse.lone_group import Sent
from ithaca.rehearse.memory_trace import Kinds, Trace, bytes_of
from ithaca.training.watch.layer_boundaries import put_boundaries

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
# A tenth of a second or so.
WAIT_CYCLES = 200_000_000
# The threads of a real group hold a collective's buffers a little longer than it takes.
LETTING_GO_S = 0.05


class _Layers:
    """When each layer's forward and backward began, and how many buffers had been filled by then."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, sent: Sent) -> None:
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
        """By phase, layer by layer, without the filling of buffers."""
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
    """Seconds and peaks of a GPU, phase by phase; `held` are bytes of the device and of the host at the end of each.

    The device is kept waiting at first, so that the host is ahead of it, as it is in a run: what the host does before a
    step's first kernel is done while the step before is still computed.
    """

    def __init__(self, device: torch.device, sent: Sent, layers: Sequence[nn.Module]) -> None:
        self.device, self.sent = device, sent
        self.peaks: dict[str, int] = {}
        self.held: dict[str, dict[str, tuple[int, int]]] = {}
        self._layers = _Layers(layers, device, sent)
        self._ends: list[tuple[str, Any, int]] = []

    def __enter__(self) -> DevicePhases:
        self._layers.__enter__()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda._sleep(WAIT_CYCLES)
        self._ends = [("", moment(self.device), len(self.sent.spans))]
        return self

    def __exit__(self, *error: object) -> None:
        self._layers.__exit__()

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        self._ends.append((name, moment(self.device), len(self.sent.spans)))
        self.peaks[name] = torch.cuda.max_memory_allocated(self.device)
        self.held[name] = {kind: (_bytes(own, "cuda"), _bytes(own, "cpu")) for kind, own in held.items()}
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def seconds(self) -> dict[str, float]:
        """Of the phases marked so far, without the filling of buffers; waits for them."""
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
        """Most bytes of weights, optimizer state and gradients that live there."""
        return max(sum(there for _, there in held.values()) for held in self.held.values())

    def layers(self) -> dict[str, list[float | None]]:
        return self._layers.seconds()


class TracedPhases:
    """The same of a trace."""

    def __init__(self, trace: Trace, sent: Sent, layers: Sequence[nn.Module]) -> None:
        self.trace = trace
        self.kinds: dict[str, Kinds] = {}
        self.seconds: dict[str, float] = {}
        self._held: list[dict[str, int]] = []
        self._layers = _Layers(layers, torch.device("cpu"), sent)
        self._last = 0.0

    def __enter__(self) -> TracedPhases:
        self._layers.__enter__()
        self.trace.begin()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._layers.__exit__()

    def mark(self, name: str, held: dict[str, list[Tensor]]) -> None:
        now = time.perf_counter()
        self.kinds[name] = self.trace.peak
        self.seconds[name] = now - self._last
        self._held.append({kind: bytes_of(own) for kind, own in held.items()} if self.trace.holds_away else {})
        time.sleep(LETTING_GO_S)
        self.trace.begin()
        self._last = time.perf_counter()

    def on_host(self, kinds: Sequence[str] = ("weights", "optimizer", "gradients")) -> int:
        """Most bytes of these that count as the host's."""
        return max(sum(held.get(kind, 0) for kind in kinds) for held in self._held)

    def layers(self) -> dict[str, list[float | None]]:
        return self._layers.seconds()


def _bytes(tensors: list[Tensor], kind: str) -> int:
    return sum(x.nbytes for x in tensors if x.device.type == kind)
