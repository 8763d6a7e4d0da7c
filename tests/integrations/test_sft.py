"""SFTTrainer with the one argument against SFTTrainer without it: every way it makes batches, adapters, token counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ithaca.integrations.config import UlyssesConfig
from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import alone, farthest, hold, logged, reset, weights
from tests.integrations.sft import KINDS, dataset, fine_tune, tokenizer
from tests.pairs import dealt
from tests.ranks import run_ranks
from tests.tolerances import EVAL_LOSS, EVAL_LOSS_AFTER_STEPS, LOSS

SLOW = pytest.mark.slow
QUICK = ("padding_free",)


def _hold(results: list[Any], expected: dict[str, Any]) -> None:
    for got in results:
        hold(got, expected)
        assert got["tokens"] == expected["tokens"]
        for key in ("accuracy", "entropy"):
            assert farthest(got[key], expected[key]) < LOSS
        assert abs(got["eval_accuracy"] - expected["eval_accuracy"]) < EVAL_LOSS


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=SLOW) for k in KINDS])
def test_every_kind_of_batch(kind: str, tmp_path: Path) -> None:
    _hold(run_ranks(2, fine_tune, str(tmp_path), 2, kind=kind), alone(fine_tune, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "degrees"), dealt(["plain", "packed", "padding_free", "assistant_only"], [(2, 2), (1, 4)]), ids=str
)
def test_more_ranks_and_accumulation(kind: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    """Rows enough for no last batch in which some have to be repeated for the second group. SFTTrainer evaluates batch
    by batch, so its evaluation is one process's with the same batch size."""
    dp, sp = degrees
    options: dict[str, Any] = {"kind": kind, "gradient_accumulation_steps": 2, "rows": 192}
    expected = alone(fine_tune, per_device_train_batch_size=2 * dp, **options)
    for got in run_ranks(dp * sp, fine_tune, str(tmp_path), sp, **options):
        hold(got, expected, drift=EVAL_LOSS_AFTER_STEPS)
        assert got["tokens"] == expected["tokens"]


@pytest.mark.parametrize("kind", ["packed", pytest.param("plain", marks=SLOW)])
def test_lora(kind: str, tmp_path: Path) -> None:
    """FIELD case 15: adapters train, and are saved as peft saves them."""
    expected = alone(fine_tune, kind=kind, lora=True)
    _hold(run_ranks(2, fine_tune, str(tmp_path), 2, kind=kind, lora=True), expected)
    from peft import PeftModel

    assert set(weights(tmp_path)) == {
        f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        for side in "AB"
    }
    model = PeftModel.from_pretrained(small_model("llama", dtype=torch.float32), tmp_path)
    assert any(float(p.abs().max()) > 0 for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_a_stream(tmp_path: Path) -> None:
    expected = alone(fine_tune, kind="plain", stream=True)
    _hold(run_ranks(2, fine_tune, str(tmp_path), 2, kind="plain", stream=True), expected)


@pytest.mark.slow
def test_dft_loss(tmp_path: Path) -> None:
    expected = alone(fine_tune, kind="plain", loss_type="dft")
    _hold(run_ranks(2, fine_tune, str(tmp_path), 2, kind="plain", loss_type="dft"), expected)


def _resumed(folder: str, sp: int, lora: bool) -> Any:
    options: dict[str, Any] = {"kind": "plain", "lora": lora}
    fine_tune(folder, sp, save_strategy="steps", save_steps=4, **options)
    return fine_tune(folder, sp, resume=f"{folder}/checkpoint-4", **options)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_resumed_in_the_middle_of_an_epoch(lora: bool, tmp_path: Path) -> None:
    expected = alone(fine_tune, kind="plain", lora=lora)
    for got in run_ranks(2, _resumed, str(tmp_path), 2, lora):
        hold(got, expected)


def _from_training_arguments(folder: str, sp: int) -> Any:
    """SFTTrainer makes an SFTConfig of other arguments, by way of their JSON."""
    from trl import SFTTrainer

    reset()
    given = TrainingArguments(
        folder, max_steps=2, use_cpu=True, report_to=[], parallelism_config=UlyssesConfig(sp_size=sp), bf16=False
    )
    given.to_json_string()
    trainer: Trainer = SFTTrainer(
        small_model("llama", dtype=torch.float32), given, train_dataset=dataset("plain"), processing_class=tokenizer()
    )
    trainer.train()
    return trainer.accelerator.num_processes, len(logged(trainer, "train_loss"))


@pytest.mark.slow
def test_training_arguments_keep_the_config(tmp_path: Path) -> None:
    assert run_ranks(2, _from_training_arguments, str(tmp_path), 2) == [(1, 1), (1, 1)]
