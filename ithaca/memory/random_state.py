"""Random numbers that are drawn again as they were: a state to come back to, and whether anything was drawn since; and
numbers of its own for each shard of a sequence."""

from __future__ import annotations

import hashlib
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
            self.restore()
            yield

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self.states[0])
        if self.device is not None:
            torch.cuda.set_rng_state(self.states[1], self.device)

    def _now(self) -> list[torch.Tensor]:
        # The generator is real even where tensors are fake, which have no values to compare.
        with unset_fake_temporarily():
            states = [torch.get_rng_state()]
            return states if self.device is None else [*states, torch.cuda.get_rng_state(self.device)]


class ShardRng:
    """The random numbers of one shard's forward pass: its own, where all ranks' generators stand alike.

    With one seed on all ranks a dropout would drop the same numbers of every shard: token t of each of them alike. So the
    generators are seeded anew for the time of a pass, by their state and the shard. What is run again in backward starts
    from states that were taken inside the pass, and draws what it drew there.
    """

    def __init__(self, device: torch.device, shard: int) -> None:
        self.before = Rng(device)
        digest = hashlib.blake2b(repr(shard).encode(), digest_size=7)
        for state in self.before.states:
            digest.update(state.numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "big")
        torch.default_generator.manual_seed(seed)
        if self.before.device is not None:
            torch.cuda.manual_seed(seed)
        self.begun = Rng(device)

    def end(self, *, drew: bool = False) -> None:
        """Give the caller's generators back: as they were if nothing was drawn, else one draw further, on every rank.

        `drew`: other ranks may have drawn, whatever this one did.
        """
        drew = drew or self.begun.moved()
        self.before.restore()
        if drew:
            with unset_fake_temporarily():
                for device in ("cpu", self.before.device):
                    if device is not None:
                        torch.empty((), device=device).uniform_()
