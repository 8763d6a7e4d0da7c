"""`Throttle`: a limit on how far the host runs ahead of the device.

Without a limit the host launches minutes of work within a second, and a stop comes that much too late. A host that
waited at every layer would leave the device idle between short layers. So the limit follows the time of the layers.

Invariant: the host is at most `LEAD` boundaries or about `LEAD_S` seconds ahead of the device, whichever is more.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

# Enough to keep the device busy, little enough to stop within two layers or two seconds.
LEAD, LEAD_S = 2, 2.0


class Throttle:
    """Events at the boundaries that the device has yet to pass, and the times between the last ones that it passed."""

    def __init__(self) -> None:
        self.ahead: deque[tuple[Any, str]] = deque()
        self.last: Any = None
        self.spare: list[Any] = []
        # Milliseconds between two boundaries.
        self.times: deque[float] = deque(maxlen=64)

    def advance(self, label: str, before: str) -> str:
        """Launch boundary `label`, waiting if the host is too far ahead; return the label that the device has passed.

        `before`: the label that was returned last.
        """
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        self.ahead.append((event, label))
        while len(self.ahead) > LEAD and (self.ahead[0][0].query() or len(self.ahead) > self.lead):
            event, before = self.ahead.popleft()
            event.synchronize()
            if self.last is not None:
                self.times.append(self.last.elapsed_time(event))
                self.spare.append(self.last)
            self.last = event
        return before

    @property
    def lead(self) -> int:
        """Number of boundaries that the host may be ahead: `LEAD` until the longest time between two is known."""
        longest = max(self.times, default=float("inf"))
        return max(LEAD, int(1e3 * LEAD_S / max(longest, 1e-3)))
