"""TRL scripts as users write them, by trainer: data, tokenizer and a run of a few steps with every number it logs."""

from __future__ import annotations

import shutil
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ithaca.verify.small_models.features import small_model
from tests.doors.trainer_scripts import logged, shared_folder, told
from tests.integrations.runs import config, reset
from tests.integrations.sft import text, tokenizer

STEPS = 3


def pairs(count: int = 12) -> Dataset:
    """Prompts with a chosen and a rejected completion, of unequal lengths."""
    return Dataset.from_list(
        [
            {
                "prompt": text(index, 3 + index % 4) + " ",
                "chosen": text(index + 7, 2 + (index * 3) % 6),
                "rejected": text(index + 29, 3 + (index * 5) % 7),
            }
            for index in range(count)
        ]
    )


def judged(count: int = 12) -> Dataset:
    """Completions that are good or bad, for KTO."""
    return Dataset.from_list(
        [
            {
                "prompt": text(index, 3 + index % 4) + " ",
                "completion": text(index + 7, 2 + index % 6),
                "label": index % 3 > 0,
            }
            for index in range(count)
        ]
    )


def triples(count: int = 12) -> Dataset:
    """Pairs with a reference completion beside them, for TPO."""
    return Dataset.from_list([{**row, "reference": text(at + 3, 3 + at % 5)} for at, row in enumerate(pairs(count))])


def chats(count: int = 12) -> Dataset:
    """Questions and answers, for distillation."""
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": text(index, 3 + index % 4)},
                    {"role": "assistant", "content": text(index + 7, 2 + (index * 3) % 6)},
                ]
            }
            for index in range(count)
        ]
    )


def from_file(rows: Dataset, folder: str, name: str, sp: int | None) -> Dataset:
    """The same rows read from a file, with one cache for all ranks."""
    path = f"{folder}/{name}.json"
    if sp is None or dist.get_rank() == 0:
        rows.to_json(path)
        Dataset.from_json(path, cache_dir=f"{folder}/cache")
    if sp is not None:
        dist.barrier()
    return Dataset.from_json(path, cache_dir=f"{folder}/cache")


def plain_model(seed: int = 0, attention: str = "sdpa", **overrides: Any) -> PreTrainedModel:
    model = small_model("llama", seed=seed, **overrides)
    model.set_attn_implementation(attention)
    return model


def lora(model: PreTrainedModel, name: str = "default") -> Any:
    torch.manual_seed(5)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", lora_alpha=8)
    made = get_peft_model(model, adapter, adapter_name=name)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            # A new adapter adds nothing; one that does is told from its reference.
            if "lora_B" in key:
                weight.copy_(torch.randn_like(weight) * 0.1)
    return made


def options(sp: int | None, folder: str, **own: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "max_steps": STEPS, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 3,
        "use_cpu": True, "dataloader_pin_memory": False, "bf16": False, "optim": "sgd", "max_grad_norm": 1e9,
        "gradient_checkpointing": False, "parallelism_config": config(sp),
    }  # fmt: skip
    return defaults | own


def run(sp: int | None, make: Any, *, evaluate: bool = True) -> dict[str, Any]:
    """Train (and evaluate) what `make(folder)` gives; all the numbers it logged."""
    reset()
    torch.manual_seed(0)
    folder = shared_folder(sp)
    try:
        trainer = make(folder)
        trainer.train()
        numbers = logged(trainer)
        if evaluate:
            numbers |= {key: value for key, value in trainer.evaluate().items() if told(key)}
        trainer.accelerator.wait_for_everyone()
        return numbers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def words() -> PreTrainedTokenizerFast:
    return tokenizer()
