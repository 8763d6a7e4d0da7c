"""Numbers that one rank has of a split weight: refused for Ithaca's meshes, and torch's own for all others."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.state.weights.partial_values import is_spread
from ithaca.verify.small_models.features import small_model
from tests.ranks import expect_refusal, run_ranks


def _parallel() -> Any:
    return parallelize(small_model("llama"), init_mesh(sp=2))


def _of_another_mesh() -> dict[str, Any]:
    """Return torch's results of a DTensor of another mesh, after a model is parallelized."""
    ours = _parallel().lm_head.weight
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
    value = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    torch.manual_seed(int(mesh.get_rank()))
    torch.save(value, io.BytesIO())
    dropped: Any = F.dropout(value, 0.5)
    return {
        "spread": [is_spread(ours), is_spread(value), is_spread(torch.ones(1))],
        "sum": value.sum().item(),
        "whole sum": value.sum().full_tensor().item(),
        "drawn": [type(each) is DTensor for each in (torch.randn_like(value), dropped, value.normal_())],
    }


def test_dtensor_of_other_mesh_keeps_torchs_behaviour() -> None:
    for found in run_ranks(2, _of_another_mesh):
        assert found["spread"] == [True, False, False]
        assert found["drawn"] == [True] * 3
        # Torch's own way, which is why ours are refused: a rank reads its part.
        assert (found["sum"], found["whole sum"]) == (6.0, 12.0)


def _read(how: str) -> Any:
    weight = _parallel().lm_head.weight
    return weight.sum().item() if how == "item" else bool(weight.isnan().any())


def test_partial_value_read_is_refused() -> None:
    for how in ("item", "if"):
        expect_refusal(2, _read, how, error="UnsupportedError", match="call .full_tensor")


def _replicated() -> list[float]:
    """Whole weights on every rank have whole numbers."""
    model: Any = parallelize(small_model("llama"), init_mesh(sp=2), weights="replicate")
    return [float(model.lm_head.weight.sum()), float(small_model("llama").lm_head.weight.sum())]


def test_replicated_value_read_is_allowed() -> None:
    for got, wanted in run_ranks(2, _replicated):
        assert abs(got - wanted) < 1e-9


def _written_norm() -> tuple[str, float, str]:
    model = _parallel()
    model.lm_head.weight.sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([model.lm_head.weight], 1.0)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return f"{norm:.6f}", float(whole), f"{model.lm_head.weight.shape}"


def test_norm_formatted_equals_whole() -> None:
    for line, number, _ in run_ranks(2, _written_norm):
        assert line == f"{number:.6f}"


def _written_sum() -> str:
    return f"{_parallel().lm_head.weight.sum():.3f}"


def test_partial_sum_formatted_is_refused() -> None:
    expect_refusal(2, _written_sum, error="UnsupportedError", match="a number was read off split weights")
