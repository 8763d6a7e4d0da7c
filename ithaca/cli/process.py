"""Process-wide settings of a verb, made before torch is imported: the CUDA allocator, and libraries' log messages."""

from __future__ import annotations

import logging
import os
import sys
import warnings

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Set torch's allocator for this process and its children, unless the user has set it."""
    # The tensors of a long step have many sizes, and fixed segments leave gaps between them: 2.8 GB beside a peak of
    # 10 GB in one rehearsal, 1.8 GB with expandable segments.
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def show_own_warnings_only() -> None:
    """Print Ithaca's warnings on stderr, and drop those of libraries about each other."""
    logging.basicConfig(level=logging.WARNING, format="ithaca: %(message)s")
    # transformers imports torchao if it is installed, and torch then warns of torchao's pytree registrations. The hub's
    # client logs every retry; our own errors have the outcome.
    for noisy in ("torch.utils._pytree", "torchao", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # PEFT reads an attribute that transformers deprecated in 5.23.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
