"""Rehearsed without a GPU: fake tensors have the bytes of real ones under every mode, and what a job keeps on the host
counts there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ithaca.attention.kernels import blockwise
from ithaca.config.schema import OptimizerSettings
from ithaca.mesh import init_mesh
from ithaca.planning.memory_plan import Job, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.rehearse import rehearsal as rehearse_module
from ithaca.rehearse.cut_model import RankJob
from ithaca.rehearse.lone_group import simulated_world
from ithaca.rehearse.measured_step import Figures, measure
from ithaca.rehearse.rehearsal import rehearse
from ithaca.verify.small_models.features import small_config
from tests.pairs import cover, dealt
from tests.rehearse.test_rehearsal import LAYERS, LENGTH, MIXED, SAVE, job, request, shards
from tests.tolerances import TRACED_MEMORY

GROUPS = MemoryPlan(("save", "rebuild", "recompute", "keep"), (True, True, True, False), 32, 64, head_groups=2)


def figures(plan: MemoryPlan, kind: str = "llama", **changes: Any) -> Figures:
    with simulated_world(2, 1, like="gloo"):
        return measure(replace(job(kind), **changes), range(LAYERS), plan, init_mesh(sp=2, device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [MIXED, *(pytest.param(each, marks=pytest.mark.slow) for each in (SAVE, GROUPS))],
    ids=["mixed", "save", "groups"],
)
def test_fake_tensors_every_mode_same_bytes_as_real(plan: MemoryPlan) -> None:
    real, fake = figures(plan), figures(plan, fake=True)
    assert fake.seconds == {}
    assert fake.kinds["backward"] == real.kinds["backward"]
    # Its tokens are cut before they are faked: a row of them, of targets and of marks is not there twice.
    assert abs(fake.peaks["forward"] - real.peaks["forward"]) <= 3 * LENGTH * 8
    assert (fake.pinned, fake.host) == (real.pinned, real.host)
    # Ranks also agree on a real batch, by sums.
    assert fake.sent | {"all-reduce": 0} == real.sent | {"all-reduce": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_fake_blockwise_attention_runs_largest_block_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and softcaps: a block has the bytes of all, and a million tokens have tens of thousands."""
    blocks: list[int] = []
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", 2**12)
    monkeypatch.setattr(blockwise, "_grouped", _counted(blockwise._grouped, blocks))
    real, ran = figures(SAVE, kind), len(blocks)
    fake = figures(SAVE, kind, fake=True)
    assert fake.kinds["backward"] == real.kinds["backward"]
    assert abs(fake.peaks["forward"] - real.peaks["forward"]) <= 3 * LENGTH * 8
    assert (len(blocks) - ran) * 2 < ran


def _counted(run: Callable[..., torch.Tensor], calls: list[int]) -> Callable[..., torch.Tensor]:
    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return run(*args)

    return counted


def test_fake_tensors_leave_random_state_unchanged() -> None:
    """Its values decide whether a layer drew, and are the same before and after a rehearsal."""
    before = torch.get_rng_state()
    figures(SAVE, fake=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [MIXED, SAVE], ids=["mixed", "save"])
def test_fake_tensors_on_host_count_as_host_memory(plan: MemoryPlan) -> None:
    here, away = figures(plan, fake=True), figures(plan, fake=True, on_host="everything", away=True)
    for phase, kinds in away.kinds.items():
        assert (kinds.weights, kinds.optimizer, kinds.gradients) == (0, 0, 0)
        assert kinds.working <= here.kinds[phase].total
    # Forward finds no gradients: beside what rests on the host the moment and its bytes are the same.
    assert away.kinds["forward"].working == here.kinds["forward"].working
    own = here.kinds["optimizer"]
    assert away.host == here.host + own.weights + own.optimizer + own.gradients
    assert away.pinned == here.pinned + own.weights + own.gradients


@pytest.mark.slow
def test_rehearse_everything_on_host_agrees_with_plan() -> None:
    memory = {"on_host": "everything", "budget": "1GiB"}
    result = rehearse(request(None, 12, fake=True, memory=memory))
    assert abs(result.memory_error) < TRACED_MEMORY
    assert result.kinds.weights == result.predicted.kinds.weights == 0
    assert result.host == pytest.approx(result.predicted.memory.host_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4", "starcoder2"])
def test_plan_architecture_features_agree_with_fake_tensors(kind: str) -> None:
    """Experts, norms after an MLP and layer norms, as the CPU's operators keep them."""
    like = request(None, 12, fake=True, precision="mixed", stages=[{"length": 2048, "steps": 1, "batch": 1}])
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": None}
    result = rehearse(replace(like, config=small_config(kind, num_hidden_layers=12, **sizes)))
    assert abs(result.memory_error) < TRACED_MEMORY


WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 1000, "num_hidden_layers": 24, "layer_types": ["full_attention"] * 24, "sliding_window": None,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "casts", "budget", "targets"),
    cover(["llama", "qwen3"], [True, False], ["8GiB", "1GiB"], ["all-linear", ["q_proj", "v_proj"]]),
)
def test_plan_adapters_agree_with_fake_tensors(
    kind: str, casts: bool, budget: str, targets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT keeps them in fp32 over weights in bf16. They compute in bf16, or else every input of theirs is there in
    fp32 too."""
    if not casts:
        monkeypatch.setattr(rehearse_module, "precision_of", lambda *_: (torch.bfloat16, None))
    one = [{"length": 16384, "steps": 1, "batch": 1}]
    like = request(
        0, 24, fake=True, precision="bf16", stages=one, memory={"budget": budget}, lora={"rank": 4, "targets": targets}
    )
    result = rehearse(replace(like, config=small_config(kind, **WIDE)))
    got, said = result.kinds, result.predicted.kinds
    assert got.optimizer == pytest.approx(said.optimizer, rel=0.01)
    assert abs(result.memory_error) < TRACED_MEMORY
    assert result.predicted.job.adapter_bytes == (2 if casts else 4)


def said_and_seen(kind: str, plan: MemoryPlan, **changes: Any) -> tuple[int, int]:
    """Bytes of a step of 16K tokens over two ranks: planned, and as the CPU's operators keep them."""
    full = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "sliding_window": 16384}
    config = small_config(kind, **{**WIDE, **full, **changes})
    of = RankJob(config, 16384, 1, torch.bfloat16, None, OptimizerSettings(), fake=True)
    with simulated_world(2, 1, like="gloo"):
        got = measure(of, range(LAYERS), plan, init_mesh(sp=2, device="cpu"))
    job = Job(16384, sp=2, fused=False)
    terms = memory_of(ModelSizes.from_config(config.to_dict()), job, plan).allocated
    return sum(term.device_bytes for term in terms), max(got.peaks.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tile"),
    # Two kinds of every norm: RMS norms, of heads, after the MLP, layer norms; each is in tiles and whole.
    dealt(["llama", "helium", "qwen3", "gemma3_text", "glm4", "olmo2", "starcoder2", "cohere"], [1024, 16384]),
)
def test_plan_norms_in_tiles_agree_with_fake_tensors(kind: str, tile: int) -> None:
    """Without recompute, a norm's values in fp32 stay only if the norm is not cut into tiles."""
    said, seen = said_and_seen(kind, MemoryPlan(("keep",) * LAYERS, (False,) * LAYERS, tile, 4096))
    assert said == pytest.approx(seen, rel=TRACED_MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1024, 16384])
def test_plan_shared_norm_agrees_with_fake_tensors(tile: int) -> None:
    """A recomputed layer's output is alive once."""
    said, seen = said_and_seen("cohere", MemoryPlan(("save",) * LAYERS, (False,) * LAYERS, tile, 4096))
    assert said == pytest.approx(seen, rel=TRACED_MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [4096, 8192])
def test_plan_loss_of_one_tile_agrees_with_fake_tensors(tile: int) -> None:
    """A rank's 8,192 tokens at once go through torch's own operations."""
    plan = MemoryPlan(("save",) * LAYERS, (False,) * LAYERS, 1024, tile)
    said, seen = said_and_seen("llama", plan, vocab_size=32000)
    assert said == pytest.approx(seen, rel=TRACED_MEMORY)


def in_8_bits(numbers: int) -> int:
    """Both moments: codes, a scale for each 256 of them and their 256 values; small or odd ones whole."""
    coded = numbers >= 4096 and numbers % 256 == 0
    return 2 * (numbers + numbers // 256 * 4 + 256 * 4 if coded else numbers * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights", "state"),
    [("adamw8bit", torch.float32, in_8_bits), ("bf16_sr", torch.bfloat16, lambda numbers: 2 * numbers * 2)],
)
def test_fake_step_torchao_optimizer_makes_its_state(
    name: Any, weights: torch.dtype, state: Callable[[int], int]
) -> None:
    wide = small_config("llama", num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=256)
    of = {"config": wide, "optimizer": OptimizerSettings(name=name), "weights": weights}
    got = figures(SAVE, fake=True, **of).kinds["optimizer"]
    with simulated_world(2, 1, like="gloo"):
        sizes = [math.prod(shape) for shape in shards(replace(job(), **of), SAVE, 2).values()]
    assert got.optimizer == sum(map(state, sizes))
