"""Kernels for Hugging Face's names of attention implementations."""

from __future__ import annotations

from ithaca.attention.kernels import KERNELS
from ithaca.errors import UnsupportedError

# "sdpa" and "eager" leave the choice open, and "auto" takes the device's fastest kernel. torch's own flash kernel is
# FlashAttention-2.
_KERNELS = {
    "sdpa": "auto",
    "eager": "auto",
    "ithaca": "auto",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash_attn_3",
    "flash_attention_4": "flash_attn_4",
    "flex_attention": "flex",
}
_HUB = {"flash-attn2": "flash", "flash-attn3": "flash_attn_3", "flash-attn4": "flash_attn_4"}


def kernel_for(attention: str) -> str:
    """Return the kernel for an `attn_implementation` or `sp_attn_implementation`; a kernel's name is returned as is."""
    if attention in _KERNELS:
        return _KERNELS[attention]
    if attention in KERNELS:
        return attention
    hub = next((kernel for part, kernel in _HUB.items() if part in attention), None)
    if hub is None:
        known = ", ".join((*_KERNELS, *KERNELS))
        raise UnsupportedError(f"the attention implementation {attention!r} has no kernel here: use one of {known}")
    return hub
