"""What a verb says on stderr: our own warnings, and not what libraries say of each other."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    logging.basicConfig(level=logging.WARNING, format="ithaca: %(message)s")
    # torchao, which transformers imports where it is installed, makes torch warn of torchao's own habits. The hub's
    # client tells of every try, and we of how they ended.
    for noisy in ("torch.utils._pytree", "torchao", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # PEFT asks for a name that transformers changed in 5.23.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
