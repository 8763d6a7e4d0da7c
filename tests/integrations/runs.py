"""Scripts of the integration tests, run on one process or on a rank, with or without the one argument."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from ithaca.integrations.config import UlyssesConfig
from ithaca.verify.small_models.features import small_model
from tests.tolerances import EVAL_LOSS, LOSS, NORM, WEIGHT

Example = dict[str, list[int]]
# Of a script's options those that Trainer takes itself; the others are its arguments'.
OWN = ("compute_loss_func", "compute_metrics", "optimizer_cls_and_kwargs")


# Models by a name of their own: the cases in which others are silently wrong.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven heads": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 7}),
    "dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
}


def reset() -> None:
    """accelerate keeps its state for the life of a process; a rank of the pool lives through many tests."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def examples(count: int, seed: int = 0) -> list[Example]:
    """Unequal lengths, unequal numbers of learned tokens: any mean of means shows."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(3, 61, (7 + (index * 5) % 17,), generator=generator).tolist()
        learned = 2 + (index * 3) % 5
        made.append({"input_ids": ids, "labels": [-100] * (len(ids) - learned) + ids[-learned:]})
    return made


def collate(rows: list[Example]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(mask, batch_first=True),
    }


def collate_left(rows: list[Example]) -> dict[str, torch.Tensor]:
    """Padded on the left and all learned: the label of a row's first token is nobody's target."""
    batch = collate([{"input_ids": row["input_ids"][::-1], "labels": row["input_ids"][::-1]} for row in rows])
    return {name: value.flip(1) for name, value in batch.items()}


def collate_left_masked(rows: list[Example]) -> dict[str, torch.Tensor]:
    """The same, written so that transformers alone does not learn it from padding either."""
    batch = collate_left(rows)
    before = torch.nn.functional.pad(batch["attention_mask"][:, :-1], (1, 0), value=1)
    return {**batch, "labels": batch["labels"].masked_fill(before == 0, -100)}


def config(sp: int | None, **options: Any) -> UlyssesConfig | None:
    return None if sp is None else UlyssesConfig(sp_size=sp, **options)


def arguments(folder: str, sp: int | None, ulysses: dict[str, Any], **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3,
        "max_steps": 10, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "max_grad_norm": 0.5, "use_cpu": True, "seed": 3, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**defaults | options, parallelism_config=config(sp, **ulysses))


def logged(trainer: Trainer, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def trainer(folder: str, sp: int | None, ulysses: dict[str, Any], **options: Any) -> Trainer:
    own = {key: options.pop(key) for key in OWN if key in options}
    rows, eval_rows = options.pop("rows", 24), options.pop("eval_rows", 8)
    stream, collator = options.pop("stream", False), options.pop("collate", collate)
    made: Any = Dataset.from_list(examples(rows))
    name = options.pop("kind", "llama")
    kind, overrides = VARIANTS.get(name, (name, {}))
    return Trainer(
        model=small_model(kind, dtype=options.pop("dtype", torch.float32), **overrides),
        args=arguments(folder, sp, ulysses, **options),
        train_dataset=made.to_iterable_dataset() if stream else made,
        eval_dataset=Dataset.from_list(examples(eval_rows, seed=1)),
        data_collator=collator,
        **own,
    )


def train(
    folder: str, sp: int | None, *, resume: str | None = None, ulysses: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A user's Trainer script: trains, evaluates and saves."""
    reset()
    made = trainer(folder, sp, ulysses or {}, **options)
    first = made.evaluate()
    result = made.train(resume_from_checkpoint=resume)
    evaluated = made.evaluate()
    made.save_model(folder)
    return {
        "losses": logged(made, "loss"),
        "norms": logged(made, "grad_norm"),
        "rates": logged(made, "learning_rate"),
        "steps": result.global_step,
        "tokens": made.state.num_input_tokens_seen,
        "eval_first": first["eval_loss"],
        "eval_loss": evaluated["eval_loss"],
        "weights": weights(folder) if made.args.process_index == 0 else None,
    }


@cache
def alone(script: Callable[..., Any], **options: Any) -> Any:
    """The same script on one process without the argument, once a session; its output is what ranks are held against."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        return script(folder, None, **options)


def hold(got: dict[str, Any], expected: dict[str, Any], *, drift: float = EVAL_LOSS) -> None:
    """Steps in fp32 against one process; `drift` is what the steps may have done to the evaluation after them."""
    assert len(got["losses"]) == len(expected["losses"]) > 0
    assert farthest(got["losses"], expected["losses"]) < LOSS
    assert farthest(got["norms"], expected["norms"]) < NORM
    assert abs(got["eval_loss"] - expected["eval_loss"]) < drift
    assert abs(got.get("eval_first", 0) - expected.get("eval_first", 0)) < EVAL_LOSS


def farthest(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    saved = next(file for file in sorted(Path(folder).glob("*.safetensors")))
    loaded: dict[str, torch.Tensor] = load_file(saved)
    return loaded


def hold_weights(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert max(float((got[key] - expected[key]).abs().max()) for key in got) < WEIGHT
