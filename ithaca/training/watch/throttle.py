"""How far the host may run ahead of the device.

Unchecked it hands the device minutes of work within a second, and what it hears of a stop then comes too late. Held at
every layer, it leaves the device idle where layers are short. So it is held by the time that layers take.

Invariant: at most `LEAD` boundaries or about `LEAD_S` seconds of the device's work are ahead of it, the larger of both.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

# Boundaries the host may be ahead of the device whatever they take, and seconds of its work where they take little:
# enough to keep it busy, few enough to stop within two layers or seconds.
LEAD, LEAD_S = 2, 2.0


class Pace:
    """Events at the boundaries that the device has yet to pass, and what the last ones took."""

    def __init__(self) -> None:
        self.ahead: deque[tuple[Any, str]] = deque()
        self.last: Any = None
        self.spare: list[Any] = []
        # Milliseconds between the last boundaries that the device has passed.
        self.taken: deque[float] = deque(maxlen=64)

    def keep(self, label: str, before: str) -> str:
        """Pass boundary `label`; gives the last one that the device is known to have passed, `before` if no other."""
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        self.ahead.append((event, label))
        while len(self.ahead) > LEAD and (self.ahead[0][0].query() or len(self.ahead) > self.lead):
            event, before = self.ahead.popleft()
            event.synchronize()
            if self.last is not None:
                self.taken.append(self.last.elapsed_time(event))
                self.spare.append(self.last)
            self.last = event
        return before

    @property
    def lead(self) -> int:
        """Boundaries that the host may be ahead: `LEAD` until it is known how long the longest takes."""
        longest = max(self.taken, default=float("inf"))
        return max(LEAD, int(1e3 * LEAD_S / max(longest, 1e-3)))
