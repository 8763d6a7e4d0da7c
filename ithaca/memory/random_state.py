"""Random generator states: saved in forward and restored for a recomputation, and a separate stream for each shard.

rng = Rng(device)         # the states now
run(layer)
if rng.moved():           # the layer drew numbers, by a dropout or by anything else
    with rng.again():     # in backward: the same numbers once more
        run(layer)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


class Rng:
    """Current states of the host's generator and of the GPU's, if there is one."""

    def __init__(self, device: torch.device) -> None:
        # A rehearsal's fake CUDA device has no generator.
        self.device = device if device.type == "cuda" and torch.cuda.is_initialized() else None
        self.states = self._now()

    def moved(self) -> bool:
        """True if numbers were drawn since; CUDA's state is on the host, so nothing waits for the device."""
        with unset_fake_temporarily():
            return any(not torch.equal(then, now) for then, now in zip(self.states, self._now(), strict=True))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside the block; continue afterwards from the current states."""
        with torch.random.fork_rng(devices=[] if self.device is None else [self.device]):
            self.restore()
            yield

    def restore(self) -> None:
        """Set the generators to the saved states."""
        torch.set_rng_state(self.states[0])
        if self.device is not None:
            torch.cuda.set_rng_state(self.states[1], self.device)

    def _now(self) -> list[torch.Tensor]:
        # Generators are real under FakeTensorMode too, but the state tensors would be fake: without values to compare.
        with unset_fake_temporarily():
            states = [torch.get_rng_state()]
            return states if self.device is None else [*states, torch.cuda.get_rng_state(self.device)]


class ShardRng:
    """Separate random numbers of one shard, for the time of a forward pass.

    With one seed on all ranks a dropout would drop the same positions of every shard. The generators are therefore
    seeded by their state and the shard's number. A recomputation starts from states that were saved inside the pass.
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
        """Restore the caller's generators, advanced by one draw if the pass drew numbers.

        `drew`: another rank may have drawn numbers, even if this rank did not.
        """
        drew = drew or self.begun.moved()
        self.before.restore()
        if drew:
            with unset_fake_temporarily():
                for device in ("cpu", self.before.device):
                    if device is not None:
                        torch.empty((), device=device).uniform_()
