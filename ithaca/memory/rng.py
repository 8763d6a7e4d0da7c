"""Random numbers that are drawn again as they were: a state to come back to, and whether anything was drawn since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


class Rng:
    """The state of the host's generator and, where there is one, of a GPU's, as they are just now."""

    def __init__(self, device: torch.device) -> None:
        # A GPU that is only imagined has no generator.
        self.device = device if device.type == "cuda" and torch.cuda.is_initialized() else None
        self.states = self._now()

    def moved(self) -> bool:
        """Whether numbers were drawn since, by a dropout or by anything else; nothing is waited for."""
        with unset_fake_temporarily():
            return any(not torch.equal(then, now) for then, now in zip(self.states, self._now(), strict=True))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Random numbers come as they did then; afterwards they go on as if nothing had been."""
        with torch.random.fork_rng(devices=[] if self.device is None else [self.device]):
            torch.set_rng_state(self.states[0])
            if self.device is not None:
                torch.cuda.set_rng_state(self.states[1], self.device)
            yield

    def _now(self) -> list[torch.Tensor]:
        # The generator is real even where tensors are fake, which have no values to compare.
        with unset_fake_temporarily():
            states = [torch.get_rng_state()]
            return states if self.device is None else [*states, torch.cuda.get_rng_state(self.device)]
