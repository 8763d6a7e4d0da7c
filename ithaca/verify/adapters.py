"""LoRA in `ithaca verify`: the run's adapters on both models, the base frozen, gradients compared where there are some.

A fresh adapter's B is zero, and with it every gradient of A: nothing of the adapters would be seen. So B is drawn here.
Dropout is off, since no two processes drop alike.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ithaca.config.schema import LoraSettings
from ithaca.models.files.pretrained import add_adapters

# Large enough that an adapter moves the logits, small enough that the model computes as it did.
_SPREAD = 0.05


def adapted(model: PreTrainedModel, lora: LoraSettings, *, seed: int) -> PreTrainedModel:
    """The PEFT model around `model`, its adapters in the same dtype; a function of `seed`."""
    dtype = next(model.parameters()).dtype
    made: Any = add_adapters(model, lora.model_copy(update={"dropout": 0.0}), seed=seed).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * _SPREAD)
    return cast(PreTrainedModel, made.train())


def notes_on(lora: LoraSettings) -> list[str]:
    """What the page says of them."""
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    off = [f"lora.dropout 0 for {lora.dropout:g}"] if lora.dropout else []
    return [f"LoRA of rank {lora.rank} on {targets}, B drawn, all else frozen", *off]


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def load_adapters(plain: Any, folder: Path) -> Any:
    """`plain` again, its adapters those of `folder`, put on by peft itself."""
    from peft import PeftModel

    base = copy.deepcopy(plain).unload()
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True, autocast_adapter_dtype=False)
