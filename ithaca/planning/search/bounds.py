"""What no plan of a frame can do, told without looking at one: so that a search passes by most of its candidates.

Invariant: whatever is ruled out here does not fit; whatever is not may still turn out not to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ithaca.planning.memory_plan import MODES, LayerMode
from ithaca.planning.terms.memory_terms import SLACK, STAGED, Frame, total


class Limits:
    """One frame's on a device and a host of so many bytes."""

    def __init__(self, frame: Frame, device: int, host: int) -> None:
        self.frame, self.device = frame, device
        # Bytes that the host takes off the device: the last layers to set out are in both places.
        self._away = max(0, host - frame.host_beside - STAGED * self._least)
        self._full = frame.host_beside > host

    @cached_property
    def hopeless(self) -> bool:
        """Whether nothing fits: not the least that all layers save, or not the first layer's backward with nothing
        saved beside it, when every other layer's gradients are there."""
        frame, sizes = self.frame, self.frame.sizes
        room = self.device - frame.standing_bytes[False]
        if self._full or frame.gradient_bytes(frame.trainable) > room:
            return True
        own, more = (sizes.layer_trainable(index) for index in (0, min(1, len(frame.kinds) - 1)))
        rest = own * (len(frame.kinds) - 1) if sizes.adapters else sizes.layer_parameters - own
        rest += sizes.head_trainable
        first = frame.gradient_bytes(rest) + frame.unreduced_bytes(own, more if len(frame.kinds) > 1 else 0)
        held = min(self._alone(mode) for mode in MODES if mode != "rebuild") + frame.positions
        if first + held + int(SLACK * held) > room:
            return True
        least = ((k, min(frame.saves(frame.kinds.index(k), mode)[0] for mode in MODES)) for k in set(frame.kinds))
        return sum(frame.kinds.count(kind) * size for kind, size in least) > self.saved

    @cached_property
    def saved(self) -> float:
        """No plan saves more: what the host takes away, and what the device has room for at the loss."""
        return self._away + self._resident

    def saved_at(self, index: int, place: int, root: LayerMode) -> float:
        """No plan saves more in the layers up to `index`, which is `place` layers behind the one it is rebuilt from, which
        is under `root`: backward comes to it first, and then to that one, when nearly all of them are still there. Below
        zero where not even their own would fit."""
        frame, mode = self.frame, "rebuild" if place else root
        free = self.device - frame.standing_bytes[mode == "rebuild"]
        again = frame.flow.anchor if root == "recompute" else 0
        chain = sum(frame.saves(index - behind, "rebuild")[0] for behind in range(place))
        # A layer's own tensors are on the device whatever was offloaded, its chain's too, and the next one's to come.
        beside = frame.saves(index - place, root)[0] + (self._least if index > place and mode != "keep" else 0)
        most = self._room(index, mode, free) - place * frame.flow.x - again
        if most < chain + beside:
            return -1
        if place:
            at_root = self._room(index - place, root, free) - again
            if at_root < beside:
                return -1
            most = min(most, at_root + chain)
        return most + self._away

    def least_offloaded(self, modes: Sequence[LayerMode]) -> int:
        """With fewer of the first layers away than this, the loss has no room."""
        sizes = self.frame.all_saves(modes)
        resident, room = sum(size for size, _ in sizes), self._resident
        for index, mode in enumerate(modes):
            if resident <= room:
                return index
            resident -= 0 if mode == "keep" else sizes[index][0]
        return len(modes)

    @cached_property
    def _resident(self) -> float:
        """What saved tensors may take at the loss."""
        frame = self.frame
        free = self.device - frame.standing_bytes[False] - frame.gradient_bytes(0)
        return (free + 1) / (1 + SLACK) - total(frame.loss) - frame.positions

    @cached_property
    def _least(self) -> int:
        """What some layer saves at least."""
        frame = self.frame
        return min(frame.saves(frame.kinds.index(kind), mode)[0] for kind in set(frame.kinds) for mode in MODES)

    def _room(self, index: int, mode: LayerMode, free: int) -> float:
        """What saved and rebuilt tensors may take while a layer runs backward."""
        frame = self.frame
        return (free - frame.beside[index] + 1) / (1 + SLACK) - frame.positions - frame.layer_more(index, mode)

    def _alone(self, mode: LayerMode) -> int:
        """Activations of the first layer's backward with no other layer's beside them."""
        again = self.frame.flow.anchor if mode == "recompute" else 0
        return self.frame.saves(0, mode)[0] + self.frame.layer_more(0, mode) + again
