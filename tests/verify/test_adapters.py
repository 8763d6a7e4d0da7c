"""A run with LoRA is verified as it trains: adapters on both models, the base frozen, faults seen through adapters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ithaca.config.schema import LoraSettings
from ithaca.mesh import init_mesh
from ithaca.verify.batches import made_up
from ithaca.verify.checklist import verify
from ithaca.verify.checks import Line
from ithaca.verify.gpus import verify_devices
from ithaca.verify.small_models.features import VOCABULARY, small_model
from ithaca.verify.small_subject import with_adapters
from tests import faults
from tests.ranks import run_ranks

LENGTH = 47


def built(kind: str, targets: Any, dtype: torch.dtype = torch.float64) -> Any:
    return with_adapters(small_model(kind, dtype=dtype), LoraSettings(rank=3, dropout=0.3, targets=targets), seed=5)


def on_rank(kind: str, targets: Any, fault: str | None) -> list[Line]:
    mesh = init_mesh(sp=torch.distributed.get_world_size())
    with faults.FAULTS[fault]() if fault else nullcontext():
        return verify(lambda: built(kind, targets), made_up(VOCABULARY, LENGTH), mesh)


def lines_of(kind: str, targets: Any = "all-linear", fault: str | None = None) -> dict[str, Line]:
    answers = run_ranks(2, on_rank, kind, targets, fault)
    assert answers[0] == answers[1]
    return {line.name: line for line in answers[0]}


def test_with_adapters_every_adapter_has_a_gradient_and_no_other_weight() -> None:
    model = built("llama", "all-linear")
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    again = dict(built("llama", "all-linear").named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in model.named_parameters()), "the same on every rank"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", "all-linear"),
        # Nothing below the first adapter goes back, the first layer's attention among it.
        ("llama", ["down_proj"]),
        pytest.param("qwen3_moe", ["q_proj", "v_proj"], marks=pytest.mark.slow),
        pytest.param("gemma2", ["o_proj"], marks=pytest.mark.slow),
    ],
)
def test_verify_with_adapters_all_lines_right(kind: str, targets: Any) -> None:
    lines = lines_of(kind, targets)
    assert not {name: (line.figure, line.limit) for name, line in lines.items() if not line.ok}
    assert "weights of adapters, none of" in lines["gradients"].detail
    assert ".lora_" in lines["gradients"].detail
    assert "adapters saved by themselves, loaded by peft" in lines["save"].detail
    assert {"resume", "layers run again", "attention is sharded"} <= lines.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("gradients_times_world", {"gradients", "accumulation"}),
        pytest.param("document_leak", {"documents", "isolation"}, marks=pytest.mark.slow),
        pytest.param("positions_not_offset", {"loss", "gradients", "positions"}, marks=pytest.mark.slow),
    ],
)
def test_verify_with_adapters_planted_fault_is_off(fault: str, wanted: set[str]) -> None:
    assert wanted <= {name for name, line in lines_of("llama", fault=fault).items() if not line.ok}


def on_rank_as_on_gpus() -> list[Line]:
    """The list for GPUs, on CPU ranks."""
    return verify_devices(
        lambda: built("llama", "all-linear", torch.float32), made_up(VOCABULARY, LENGTH), init_mesh(sp=2)
    )


@pytest.mark.slow
def test_verify_devices_with_adapters_all_lines_right() -> None:
    lines = run_ranks(2, on_rank_as_on_gpus)[0]
    assert {"bf16 loss", "bf16 gradients", "save", "resume"} <= {line.name for line in lines}
    assert not [line for line in lines if not line.ok]
