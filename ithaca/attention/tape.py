"""Record of a layer's attention results (anchors), read when the layer is recomputed in backward.

An anchor is the saved result of one attention call (the "attention output and lse" of selective checkpointing): the
output, kept token-sharded, and its lse. A layer that runs again in backward takes the anchor instead of attending
again, so its replay costs no collective and no attention forward:

    forward            q, k, v -> attention -> out        tape.anchors = [Anchor(out, lse)]
    replay in backward q, k, v -> (nothing)  -> out        read from the tape, in order of the calls
    backward           q, k, v, dout, out, lse -> dq, dk, dv
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ithaca.sequence.layout import SequenceLayout


@dataclass(frozen=True, slots=True)
class Anchor:
    """Attention output of all heads for this rank's tokens, and for each head group the lse of this rank's heads."""

    out_BLHE: Tensor
    lse_BhS: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out_BLHE, *self.lse_BhS]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Anchor:
        return cls(tensors[0], tuple(tensors[1:]))


@dataclass(slots=True)
class Tape:
    """Anchors of one run of a layer, in the order of its attention calls."""

    anchors: list[Anchor] = field(default_factory=list)
    replaying: bool = False
    position: int = 0

    def read(self) -> Anchor | None:
        """Return the next anchor when replaying; None when recording."""
        if not self.replaying:
            return None
        self.position += 1
        return self.anchors[self.position - 1]

    def for_replay(self) -> Tape:
        return Tape(self.anchors, replaying=True)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Argument of every attention call of a pass: the layout, and the layer's tape if the layer is replayed."""

    layout: SequenceLayout
    tape: Tape | None = None
