"""A raw Accelerator loop with the one argument against the same loop without it; what the Accelerator tells its users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from ithaca.integrations.config import UlyssesConfig
from ithaca.mesh import init_mesh
from ithaca.verify.small_models.features import small_batch, small_model
from tests.integrations.loops import loop
from tests.integrations.runs import alone, farthest, hold_weights, reset
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import LOSS, NORM, NORM_RATIO

SLOW = pytest.mark.slow


def _hold(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(got["losses"]) == len(expected["losses"]) > 0
    assert farthest(got["losses"], expected["losses"]) < LOSS
    assert farthest(got["norms"], expected["norms"]) < NORM
    assert got["seen"] == expected["seen"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("degrees", "accumulate"),
    [((1, 2), 1), ((1, 2), 2), *(pytest.param(*case, marks=SLOW) for case in (((2, 2), 2), ((1, 4), 1)))],
    ids=str,
)
def test_ten_clipped_steps(degrees: tuple[int, int], accumulate: int, tmp_path: Path) -> None:
    dp, sp = degrees
    options = {"steps": 10 * accumulate, "accumulate": accumulate, "rows": 80}
    expected = alone(loop, batch=2 * dp, **options)
    assert len(expected["norms"]) == 10
    assert min(expected["norms"]) > 0.5, "clipping must bite for this to mean anything"
    results = run_ranks(dp * sp, loop, str(tmp_path), sp, **options)
    for got in results:
        if dp == 1:
            _hold(got, expected)
            assert got["rates"] == expected["rates"]
        else:
            # accelerate steps a schedule once for every data-parallel process, here two, not for every rank.
            assert got["rates"][:2] == pytest.approx([3e-3 * (1 - 2 * s / 100) for s in _stepped(accumulate)])
    if dp == 1:
        hold_weights(results[0]["weights"], expected["weights"])


def _stepped(accumulate: int) -> tuple[int, int]:
    return (1, 2) if accumulate == 1 else (0, 1)


def _constant(folder: str, sp: int | None, **options: Any) -> dict[str, Any]:
    return loop(folder, sp, step_scheduler_with_optimizer=False, **options)


@pytest.mark.slow
def test_two_groups_of_two(tmp_path: Path) -> None:
    """The token mean over both groups' rows: what one process has that gets them in one batch."""
    expected = alone(_constant, batch=4, rows=40)
    for got in run_ranks(4, _constant, str(tmp_path), 2, rows=40):
        _hold(got, expected)


def test_unseeded_shuffling_gives_a_group_the_same_rows(tmp_path: Path) -> None:
    """FIELD case 14: every process has another random state, and one order all the same."""
    results = run_ranks(2, loop, str(tmp_path), 2, shuffle=True, steps=3)
    assert results[0]["seen"] == results[1]["seen"]


def _stopped(folder: str, sp: int) -> Any:
    whole = loop(folder, sp, save_at=4)
    return whole, loop(folder, sp, save_at=4, resume=True)


def test_state_saved_and_loaded_in_the_middle(tmp_path: Path) -> None:
    expected = alone(loop)
    for whole, again in run_ranks(2, _stopped, str(tmp_path), 2):
        _hold(whole, expected)
        assert farthest(again["losses"], expected["losses"][4:]) < LOSS
        assert farthest(again["norms"], expected["norms"][4:]) < NORM
        assert again["rates"] == expected["rates"][4:]


def _gathers() -> dict[str, Any]:
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    group = accelerator.process_index
    if accelerator.state.process_index == 3:
        accelerator.set_trigger()
    return {
        "processes": accelerator.num_processes,
        "process": accelerator.process_index,
        "main": accelerator.is_main_process,
        "last": accelerator.is_last_process,
        "gather": accelerator.gather(torch.tensor([group, 10 + group])).tolist(),
        "scalar": accelerator.gather(torch.tensor(group)).tolist(),
        "nested": accelerator.gather({"x": (torch.tensor([group]),)})["x"][0].tolist(),
        "objects": accelerator.gather_for_metrics([f"row {group}"], use_gather_object=True),
        "sum": accelerator.reduce(torch.tensor(group + 1)).item(),
        "mean": accelerator.reduce(torch.tensor(group + 1.0), "mean").item(),
        "trigger": accelerator.check_trigger(),
        "class": type(accelerator).__name__,
        "other": Accelerator.__name__,
    }


@pytest.mark.slow
def test_a_sequence_group_is_one_process() -> None:
    for rank, told in enumerate(run_ranks(4, _gathers)):
        assert told == {
            "processes": 2, "process": rank // 2, "main": rank == 0, "last": rank == 3, "gather": [0, 10, 1, 11],
            "scalar": [0, 1], "nested": [0, 1], "objects": ["row 0", "row 1"], "sum": 3, "mean": 1.5, "trigger": True,
            "class": "UlyssesAccelerator", "other": "Accelerator",
        }  # fmt: skip


def _different_rows() -> None:
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    model = accelerator.prepare(small_model("llama", dtype=torch.float32))
    model(**small_batch(1, 12, seed=accelerator.state.process_index))


def test_different_rows_in_a_group_are_refused() -> None:
    """FIELD case 14: nothing trains on a mixture without a word."""
    expect_refusal(2, _different_rows, error="BatchError", match="share one sequence but were handed different batches")


def _dispatched() -> None:
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    reset()
    asked = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2), dataloader_config=asked)
    accelerator.prepare(DataLoader([1, 2]))  # type: ignore[arg-type]


def test_dispatched_batches_are_refused() -> None:
    expect_refusal(2, _dispatched, error="UnsupportedError", match="dispatch_batches=True")


def _evaluated_length() -> int:
    """The most tokens any attention layer's projections see in evaluation, of a row of 40."""
    reset()
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    model = accelerator.prepare(small_model("llama", dtype=torch.float32)).eval()
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    with torch.no_grad():
        model(**small_batch(1, 40))
    return max(seen)


def test_evaluation_is_sharded() -> None:
    """FIELD case 7: what trains at a length is evaluated at it."""
    assert run_ranks(2, _evaluated_length) == [20, 20]


def _gradient_scale() -> float:
    """The gradient norm of one batch here over that of the same model alone."""
    reset()
    batch = small_batch(2, 24)
    single = small_model("llama", dtype=torch.float32)
    single(**batch).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 1e9)
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    model = accelerator.prepare(small_model("llama", dtype=torch.float32))
    accelerator.backward(model(**batch).loss)
    return float(accelerator.clip_grad_norm_(model.parameters(), 1e9) / expected)


def test_gradients_are_not_scaled_by_the_degree() -> None:
    """FIELD case 5."""
    assert run_ranks(2, _gradient_scale) == pytest.approx([1.0, 1.0], abs=NORM_RATIO)


def _untouched() -> Any:
    """Another Accelerator class, another model and the mesh are as they were."""
    reset()
    first = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    own, other = small_model("llama", dtype=torch.float32), small_model("llama", dtype=torch.float32)
    first.prepare(own)
    reset()
    plain = Accelerator(cpu=True)
    mesh = init_mesh(sp=2)
    return type(plain) is Accelerator, plain.num_processes, "forward" in other.__dict__, mesh.sp


def test_nothing_else_is_touched() -> None:
    assert run_ranks(2, _untouched) == [(True, 2, False, 2)] * 2
