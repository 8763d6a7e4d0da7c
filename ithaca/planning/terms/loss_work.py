"""The bytes of the head and the loss on one rank, forward and backward, tile by tile."""

from __future__ import annotations

from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import FP32, Allocation, TensorBytes


def _logits(tensors: TensorBytes, *, one: bool) -> tuple[int, str]:
    """Return the bytes for each logit of a tile, and their formula: the logit, its gradient and, uncompiled, fp32 values.

    `one`: a single tile goes through torch's own operations, whose backward takes most.
    """
    if one:
        return 3 * FP32, "3 * 4"
    if tensors.loss_in_place:
        return tensors.c, "c"
    return (2 * tensors.c, "2 * c") if tensors.fused else (tensors.c + 5 * FP32 + 1, "(c + 5 * 4 + 1)")


def loss_work(tensors: TensorBytes, sizes: ModelSizes, tile: int, *, trains: bool) -> list[Allocation]:
    """Return what the head and the loss allocate, forward and backward, tile by tile."""
    if tensors.whole_logits:
        allocations = [
            Allocation("residual stream", 3 * tensors.x, "3 X: the last layer's output, its norm, their gradient"),
            Allocation("whole logits", tensors.tokens * sizes.vocabulary * (tensors.c + 2 * FP32), "B*L*V*(c + 2 * 4)"),
        ]
        return (
            [*allocations, Allocation("head weight gradient", sizes.embedding * tensors.c, "V*hidden*c")]
            if trains
            else allocations
        )
    tokens = min(tile, tensors.tokens)
    one = tokens == tensors.tokens and not tensors.fused
    each, formula = _logits(tensors, one=one)
    lasting = ("the last layer's output", "its norm", "their gradient")[: 2 if one else 3]
    allocations = [
        Allocation("residual stream", len(lasting) * tensors.x, f"{len(lasting)} X: {', '.join(lasting)}"),
        Allocation("loss tile", tokens * sizes.vocabulary * each, f"{tokens} tokens * V * {formula}"),
    ]
    if trains:
        # The sum over tiles. Uncompiled code also allocates each tile's own gradient, when most of the logits are freed.
        own = (
            0 if tensors.fused else max(0, sizes.embedding * tensors.c - tokens * sizes.vocabulary * (each - tensors.c))
        )
        total, formula = (
            (0, "V*hidden*c, less logits") if one else (sizes.embedding * FP32, "V*hidden*4, summed over tiles")
        )
        allocations.append(Allocation("head weight gradient", total + own, formula))
    return allocations
