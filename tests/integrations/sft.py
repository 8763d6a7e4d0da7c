"""SFTTrainer scripts of every kind, with a word-level tokenizer and chats made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import config, logged, reset

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<bot>"]
WORDS = SPECIAL + [f"w{number}" for number in range(56)]
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% else %}<bot> {% generation %}{{ message['content'] }} </s> {% endgeneration %}{% endif %}{% endfor %}"
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packing": True, "max_length": 24},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 24},
    "padding_free": {"padding_free": True, "max_length": None},
    "assistant_only": {"assistant_only_loss": True},
    "completion_only": {},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = CHAT
    return made


def text(index: int, length: int) -> str:
    return " ".join(f"w{(index * 13 + place * place * 7) % 56}" for place in range(length))


def dataset(kind: str, count: int = 24) -> Dataset:
    rows: list[dict[str, Any]] = []
    for index in range(count):
        first, second = text(index, 3 + index % 7), text(index + 31, 4 + (index * 5) % 11)
        if kind == "assistant_only":
            rows.append({"messages": [{"role": "user", "content": first}, {"role": "assistant", "content": second}]})
        elif kind == "completion_only":
            rows.append({"prompt": first + " ", "completion": second})
        else:
            rows.append({"text": f"{first} {second}"})
    return Dataset.from_list(rows)


def fine_tune(
    folder: str,
    sp: int | None,
    *,
    kind: str,
    lora: bool = False,
    stream: bool = False,
    rows: int = 24,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """A user's SFTTrainer script."""
    from peft import LoraConfig

    reset()
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3,
        "max_steps": 10, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "max_grad_norm": 0.5, "use_cpu": True, "seed": 3, "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", lora_alpha=8)
    made = dataset(kind, rows)
    trainer = SFTTrainer(
        model=small_model("llama", dtype=torch.float32),
        args=SFTConfig(**defaults | KINDS[kind] | options, parallelism_config=config(sp)),
        train_dataset=made.to_iterable_dataset() if stream else made,
        eval_dataset=dataset(kind, 8),
        processing_class=tokenizer(),
        peft_config=adapter if lora else None,
    )
    first = trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    trainer.save_model(folder)
    return {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "tokens": logged(trainer, "num_tokens"),
        "accuracy": logged(trainer, "mean_token_accuracy"),
        "entropy": logged(trainer, "entropy"),
        "eval_first": first["eval_loss"],
        "eval_loss": evaluated["eval_loss"],
        "eval_accuracy": evaluated["eval_mean_token_accuracy"],
    }
