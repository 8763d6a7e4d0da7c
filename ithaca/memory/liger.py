"""Liger's cross-entropy kernel on a tile of logits, where Liger is installed: in place, faster than torch.compile.

Liger's public functions round the loss to the logits' dtype and wait for the device to count the targets. The kernel
does neither, so it is launched directly. Its arguments are private (the names below are those of liger-kernel 0.8): a version
whose kernel takes other arguments is not used, and tiles are compiled instead.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Columns that a Triton program reads at once.
MOST_COLUMNS = 32_768
UNUSED = {
    "weight_ptr": None, "weight_sum": 0.0, "sum_non_ignore_weight": 1, "n_non_ignore": 1, "z_loss_ptr": None,
    "token_accuracy_ptr": None, "token_accuracy_stride": 0, "predicted_tokens_ptr": None, "predicted_tokens_stride": 0,
    "RETURN_Z_LOSS": False, "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False, "HAS_WEIGHT": False,
}  # fmt: skip
USED = {
    "X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride", "n_cols", "ignore_index", "lse_square_scale",
    "label_smoothing", "reduction", "softcap", "HAS_SOFTCAPPING", "HAS_GRADIENTS", "BLOCK_SIZE",
}  # fmt: skip


@cache
def tile_kernel() -> Any | None:
    """Return the kernel; None if Liger is not installed or its kernel takes other arguments."""
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        return None
    try:
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel
    except ImportError:
        return None
    return kernel if set(kernel.arg_names) == USED | UNUSED.keys() else None


def in_place(
    kernel: Any, logits_TV: Tensor, targets_T: Tensor, *, softcap: float | None, smoothing: float, z: float, ignore: int
) -> Tensor:
    """Return the fp32 loss of each token; overwrite the logits by the gradient of the losses' sum."""
    tokens, vocabulary = logits_TV.shape
    # Zeros: the kernel writes no loss for ignored targets.
    loss_T = logits_TV.new_zeros(tokens, dtype=torch.float32)
    kernel[(tokens,)](
        X_ptr=logits_TV,
        X_stride=logits_TV.stride(0),
        Y_ptr=targets_T,
        Y_stride=targets_T.stride(0),
        loss_ptr=loss_T,
        loss_stride=1,
        n_cols=vocabulary,
        ignore_index=ignore,
        lse_square_scale=z,
        label_smoothing=smoothing,
        reduction="sum",
        softcap=softcap,
        HAS_SOFTCAPPING=softcap is not None,
        HAS_GRADIENTS=True,
        BLOCK_SIZE=min(MOST_COLUMNS, 1 << (vocabulary - 1).bit_length()),
        num_warps=_warps(logits_TV),
        **UNUSED,
    )
    return loss_T


def _warps(logits_TV: Tensor) -> int:
    """Return Liger's own number of warps: fewer on Blackwell in half precision."""
    new = logits_TV.is_cuda and torch.cuda.get_device_capability(logits_TV.device)[0] >= 10
    return 8 if new and logits_TV.element_size() == 2 else 32
