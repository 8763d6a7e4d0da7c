"""Trainer with the one argument against Trainer without it, in fp32: losses, norms, evaluation, weights, steps, counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ithaca.integrations import model_hooks
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import (
    alone,
    arguments,
    collate_left,
    collate_left_masked,
    farthest,
    hold,
    hold_weights,
    reset,
    train,
    trainer,
)
from tests.pairs import dealt
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import EVAL_LOSS, EVAL_LOSS_AFTER_STEPS, FP64, LOGITS, LOSS

DEGREES = [(1, 2), (2, 2), (1, 4)]
SLOW = pytest.mark.slow
# Ten steps over two groups of two rows, no batch short.
EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "rows": 20}


def _world(folder: Path, degrees: tuple[int, int], script: Any = train, **options: Any) -> list[Any]:
    return run_ranks(degrees[0] * degrees[1], script, str(folder), degrees[1], **options)


def _alone(dp: int, **options: Any) -> dict[str, Any]:
    """One process with the rows of all data-parallel processes in its batch."""
    return alone(train, per_device_train_batch_size=2 * dp, per_device_eval_batch_size=2 * dp, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("degrees", "accumulate"),
    [(DEGREES[0], 1), (DEGREES[0], 2), *(pytest.param(*case, marks=SLOW) for case in dealt(DEGREES[1:], [2, 1]))],
    ids=str,
)
def test_ten_clipped_steps_equal_one_process(degrees: tuple[int, int], accumulate: int, tmp_path: Path) -> None:
    expected = _alone(degrees[0], gradient_accumulation_steps=accumulate)
    assert min(expected["norms"]) > 0.5, "clipping must bite for this to mean anything"
    results = _world(tmp_path, degrees, gradient_accumulation_steps=accumulate)
    for got in results:
        hold(got, expected)
        assert got["rates"] == expected["rates"]
    hold_weights(results[0]["weights"], expected["weights"])


@pytest.mark.slow
def test_two_groups_of_two_equal_one_process(tmp_path: Path) -> None:
    """dp=2 x sp=2 with unequal tokens on the two groups, accumulated: one division by the global count."""
    expected = _alone(2, gradient_accumulation_steps=2)
    for got in _world(tmp_path, (2, 2), gradient_accumulation_steps=2):
        hold(got, expected)


def _with_shard_means(folder: str, sp: int) -> Any:
    """Planted: every rank divides by its own shard's targets, and the means are averaged."""
    original = model_hooks.WholeBatches._loss

    def own_mean(self: Any, call: Any, output: Any) -> Any:
        call.items = (call.shard.targets != -100).sum().clamp(min=1) * self.mesh.shards
        return original(self, call, output)

    model_hooks.WholeBatches._loss = own_mean  # type: ignore[method-assign]
    try:
        return train(folder, sp, max_steps=3)
    finally:
        model_hooks.WholeBatches._loss = original  # type: ignore[method-assign]


def test_mean_of_shard_means_changes_losses(tmp_path: Path) -> None:
    expected = _alone(1, max_steps=3)
    got = _world(tmp_path, (1, 2), _with_shard_means)[0]
    assert farthest(got["losses"], expected["losses"]) > 100 * LOSS
    assert abs(got["eval_loss"] - expected["eval_loss"]) > 100 * EVAL_LOSS


def test_epochs_run_requested_number_of_steps(tmp_path: Path) -> None:
    """9 rows in batches of 2, 3 epochs: 15 steps, the last of an epoch with one row. Tokens are counted once."""
    options = {"max_steps": -1, "num_train_epochs": 3, "rows": 9, "include_num_input_tokens_seen": "non_padding"}
    expected = alone(train, **options)
    assert expected["steps"] == 15
    for got in _world(tmp_path, (1, 2), **options):
        assert got["steps"] == 15
        assert got["tokens"] == expected["tokens"] > 0
        hold(got, expected)


@pytest.mark.slow
def test_epochs_over_two_groups_equal_one_process(tmp_path: Path) -> None:
    options = {**EPOCHS, "include_num_input_tokens_seen": "non_padding"}
    expected = _alone(2, **options)
    for got in _world(tmp_path, (2, 2), **options):
        assert (got["steps"], got["tokens"]) == (10, expected["tokens"])
        hold(got, expected, drift=EVAL_LOSS_AFTER_STEPS)


def _doubled(folder: str, sp: int | None, **options: Any) -> dict[str, Any]:
    with compute_in_fp64():
        return train(folder, sp, dtype=torch.float64, **EPOCHS, **options)


@pytest.mark.slow
def test_drift_over_two_groups_is_rounding(tmp_path: Path) -> None:
    """In fp64 two groups step and evaluate as one process does: in fp32 only the order of their sums differs."""
    exact = alone(_doubled, per_device_train_batch_size=4, per_device_eval_batch_size=4)
    for got in _world(tmp_path, (2, 2), _doubled):
        assert abs(got["eval_loss"] - exact["eval_loss"]) < FP64
        assert farthest(got["norms"], exact["norms"]) < FP64


def _resumed(folder: str, sp: int, **options: Any) -> Any:
    whole = train(folder, sp, save_strategy="steps", save_steps=4, **options)
    again = train(folder, sp, resume=f"{folder}/checkpoint-4", **options)
    return whole, again


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "accumulate"), [((1, 2), 1), ((2, 2), 2)], ids=["sp2", "dp2 sp2 accumulated"])
def test_resume_inside_epoch_equals_uninterrupted(degrees: tuple[int, int], accumulate: int, tmp_path: Path) -> None:
    expected = _alone(degrees[0], gradient_accumulation_steps=accumulate, rows=96)
    results = _world(tmp_path, degrees, _resumed, gradient_accumulation_steps=accumulate, rows=96)
    for _, again in results:
        hold(again, expected)
    hold_weights(results[0][1]["weights"], results[0][0]["weights"])


def _continued(folder: str, sp: int, checkpoint: str) -> Any:
    return train(folder, sp, resume=checkpoint)


@pytest.mark.slow
def test_resume_at_other_degrees_equals_uninterrupted(tmp_path: Path) -> None:
    """Two ranks wrote the checkpoint, four go on."""
    expected = _alone(1)
    _world(tmp_path / "two", (1, 2), save_strategy="steps", save_steps=4)
    for got in _world(tmp_path / "four", (1, 4), _continued, checkpoint=str(tmp_path / "two/checkpoint-4")):
        hold(got, expected)


def test_saved_model_loads_in_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = _world(tmp_path, (1, 2), max_steps=2)[0]["weights"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config._attn_implementation == "sdpa"
    state = model.state_dict()
    assert all(torch.equal(state[key], saved[key]) for key in saved)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.1])
def test_label_smoothing_equals_one_process(smoothing: float, tmp_path: Path) -> None:
    expected = _alone(1, label_smoothing_factor=smoothing)
    plain = _alone(1)
    assert farthest(expected["losses"], plain["losses"]) > 100 * LOSS
    for got in _world(tmp_path, (1, 2), label_smoothing_factor=smoothing):
        hold(got, expected)


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, over whole logits: cross-entropy squared, token by token; an eighth of it, so that loss
    and gradients are of the size the tolerances are for."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (
        losses.square().sum() / 8 / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())
    )


@pytest.mark.parametrize("degrees", [(1, 2), pytest.param((2, 2), marks=SLOW)], ids=str)
def test_own_loss_function_equals_one_process(degrees: tuple[int, int], tmp_path: Path) -> None:
    expected = _alone(degrees[0], compute_loss_func=squared)
    for got in _world(tmp_path, degrees, compute_loss_func=squared):
        hold(got, expected)


def _predict(folder: str, sp: int | None, batch: int = 2, **ulysses: Any) -> tuple[Any, ...]:
    reset()
    made = trainer(folder, sp, ulysses, per_device_eval_batch_size=batch)
    output = made.predict(made.eval_dataset)
    return output.predictions, output.label_ids, output.metrics["test_loss"]


@pytest.mark.parametrize("degrees", [(1, 2), pytest.param((2, 2), marks=SLOW)], ids=str)
def test_predict_with_whole_logits_equals_one_process(degrees: tuple[int, int], tmp_path: Path) -> None:
    """Trainer's loss is the mean over batches, and a batch is that of all data-parallel processes."""
    logits, labels, loss = alone(_predict, batch=2 * degrees[0])
    for got_logits, got_labels, got_loss in _world(tmp_path, degrees, _predict, whole_logits=True):
        assert numpy.array_equal(got_labels, labels)
        real = labels != -100
        assert numpy.abs(got_logits - logits)[real].max() < LOGITS
        assert abs(got_loss - loss) < EVAL_LOSS


def test_predict_without_whole_logits_equals_one_process(tmp_path: Path) -> None:
    """At padding too."""
    logits, labels, loss = alone(_predict)
    for got_logits, got_labels, got_loss in _world(tmp_path, (1, 2), _predict):
        assert numpy.array_equal(got_labels, labels)
        assert numpy.abs(got_logits - logits).max() < LOGITS
        assert abs(got_loss - loss) < EVAL_LOSS


def test_iterable_dataset_gives_a_group_the_same_rows(tmp_path: Path) -> None:
    expected = alone(train, stream=True)
    for got in _world(tmp_path, (1, 2), stream=True):
        hold(got, expected)


@pytest.mark.slow
def test_iterable_dataset_over_two_groups_equals_one_process(tmp_path: Path) -> None:
    expected = _alone(2, stream=True, rows=48)
    for got in _world(tmp_path, (2, 2), stream=True, rows=48):
        hold(got, expected)


def test_gradient_checkpointing_becomes_memory_plan(tmp_path: Path) -> None:
    expected = _alone(1)
    for got in _world(tmp_path, (1, 2), gradient_checkpointing=True):
        hold(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}, {"every_n_layers": 2}], ids=str)
@pytest.mark.parametrize("memory", ["auto", None])
def test_gradient_checkpointing_kwargs_equal_one_process(
    memory: str | None, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """With a memory plan they say nothing any more; without one they are transformers' again."""
    expected = _alone(1)
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    for got in _world(tmp_path, (1, 2), ulysses={"memory": memory}, **asked):
        hold(got, expected)


@pytest.mark.slow
def test_labels_without_target_are_not_counted(tmp_path: Path) -> None:
    """Left padding: Trainer counts labels before the model can say which of them it learns."""
    expected = _alone(1, collate=collate_left_masked)
    counted = _alone(1, collate=collate_left)
    assert farthest(counted["losses"], expected["losses"]) > 100 * LOSS
    for got in _world(tmp_path, (1, 2), collate=collate_left):
        hold(got, expected)


def _best(folder: str, sp: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    # The best by a measure that says the worst: the weights of the first evaluation, not the last ones.
    return train(folder, sp, load_best_model_at_end=True, greater_is_better=True, **options)


@pytest.mark.slow
def test_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    expected = alone(_best)
    assert expected["eval_loss"] > _alone(1)["eval_loss"] + 100 * EVAL_LOSS
    for got in _world(tmp_path, (1, 2), _best):
        hold(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "auto"])
@pytest.mark.parametrize("placing", ["shard", "replicate"])
def test_config_settings_equal_one_process(memory: str | None, placing: str, tmp_path: Path) -> None:
    expected = _alone(1)
    settings = {"memory": memory, "weights": placing, "kernel": "cpu"}
    for got in _world(tmp_path, (1, 2), ulysses=settings):
        hold(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("kind", ["mistral", "dynamic rope", "uneven heads", "gpt_oss", "mixtral"])
def test_shift_and_documents_equal_one_process(kind: str, sp: int, tmp_path: Path) -> None:
    """FIELD cases 3 (a window), 8 (RoPE by length), 10 (heads), 17 (sinks), 21 (the router's loss), at lengths that the
    degree does not divide (1) and shards without a label (4)."""
    expected = alone(_exactly, kind=kind)
    for got in _world(tmp_path, (1, sp), _exactly, kind=kind):
        assert farthest(got["losses"], expected["losses"]) < FP64
        assert abs(got["eval_loss"] - expected["eval_loss"]) < FP64


def _exactly(folder: str, sp: int | None, kind: str) -> dict[str, Any]:
    with compute_in_fp64():
        return train(folder, sp, dtype=torch.float64, kind=kind)


def _state_space(folder: str, sp: int) -> None:
    train(folder, sp, kind="mamba")


def test_inexact_layers_are_refused(tmp_path: Path) -> None:
    """FIELD case 9."""
    expect_refusal(2, _state_space, str(tmp_path), 2, error="UnsupportedError", match="architecture 'mamba' is refused")


def _sgd(folder: str, sp: int | None) -> dict[str, Any]:
    return train(folder, sp, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}))


def test_own_optimizer_class_equals_one_process(tmp_path: Path) -> None:
    expected = alone(_sgd)
    assert farthest(expected["losses"], _alone(1)["losses"]) > 100 * LOSS
    for got in _world(tmp_path, (1, 2), _sgd):
        hold(got, expected)


def _optimizers(folder: str, sp: int) -> None:
    """An optimizer and a schedule made before Trainer, of parameters that will be sharded."""
    from transformers import Trainer

    reset()
    model = small_model("llama", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(model, arguments(folder, sp, {}), optimizers=(optimizer, schedule))


def test_optimizer_made_before_is_refused(tmp_path: Path) -> None:
    """Trainer itself refuses such an optimizer, for all weights that FSDP holds."""
    expect_refusal(2, _optimizers, str(tmp_path), 2, error="RuntimeError", match="Passing `optimizers` is not allowed")
