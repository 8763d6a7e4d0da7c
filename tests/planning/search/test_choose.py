"""Plans for the jobs this library is built for, the order in which memory is saved, and what an error says."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from ithaca.constants import GIB
from ithaca.errors import MemoryPlanError
from ithaca.planning.memory_plan import Decided, Job, LayerMode, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.search.phrases import LIBRARY, RUN_FILE
from ithaca.planning.search.tilings import head_groups_for, loss_tile_for, mlp_tile_for
from ithaca.planning.terms.cost import copy_cost, recompute_cost, tile_cost
from ithaca.planning.terms.memory_terms import memory_of
from tests.counted import calls_of
from tests.planning.models import B1, B8, LLAMA_8B, K

# About four times what the plan takes.
MOST_CALLS = 150_000


def bare(length: int) -> Job:
    """Forward and backward alone, as the benchmarks run them."""
    return Job(length, weights="none", optimizer="none")


def chosen(sizes: ModelSizes, job: Job, device: float, host: float) -> MemoryPlan:
    """The plan, once its memory has been checked against the budgets."""
    plan = plan_or_refuse(sizes, job, int(device * GIB), int(host * GIB))
    memory = memory_of(sizes, job, plan)
    assert memory.device_bytes <= device * GIB
    assert memory.host_bytes <= host * GIB
    return plan


def test_everything_is_kept_where_memory_is_free() -> None:
    plan = chosen(B8, bare(32 * K), 250, 0)
    assert set(plan.layers) == {"keep"}
    assert plan.mlp_tile == 32 * K
    assert recompute_cost(B8, bare(32 * K), plan) == 0


def test_8b_32k_in_120_gib_keeps_what_it_can() -> None:
    plan = chosen(B8, bare(32 * K), 120, 125)
    counts = Counter(plan.layers)
    assert counts["keep"] + counts["save"] == 32
    assert counts["keep"] >= 20
    assert plan.mlp_tile == 32 * K
    assert plan.head_groups == 1
    # Kept layers stay on the device; without a host fewer fit.
    assert not any(away for away, mode in zip(plan.offload, plan.layers, strict=True) if mode == "keep")
    assert Counter(chosen(B8, bare(32 * K), 120, 0).layers)["keep"] < counts["keep"]


def test_8b_32k_in_40_gib_saves() -> None:
    plan = chosen(B8, bare(32 * K), 40, 125)
    assert Counter(plan.layers) == {"save": 28, "keep": 4}
    assert not any(chosen(B8, bare(32 * K), 40, 0).offload)


def test_8b_128k_in_55_gib_saves_and_offloads() -> None:
    plan = chosen(B8, bare(128 * K), 55, 125)
    assert Counter(plan.layers)["save"] >= 28
    # The first layers go, the last ones are needed first.
    assert plan.offload == tuple(index < sum(plan.offload) for index in range(32))
    assert 16 <= sum(plan.offload) <= 32
    assert plan.head_groups > 1


def test_8b_512k_recomputes_some_layers() -> None:
    job = Job(512 * K, weights="none", optimizer="adamw8bit")
    plan = chosen(B8, job, 104, 118)
    counts = Counter(plan.layers)
    assert 1 <= counts["recompute"] <= 14
    assert counts["rebuild"] >= 16
    assert Counter(chosen(B8, job, 130, 118).layers)["recompute"] < counts["recompute"]
    assert Counter(chosen(B8, job, 104, 300).layers)["save"] >= 31


def test_1b_256k_in_24_gib() -> None:
    assert Counter(chosen(B1, bare(256 * K), 24, 125).layers)["save"] >= 15


def test_1b_1m_with_its_optimizer() -> None:
    plan = chosen(B1, Job(1024 * K, weights="none", optimizer="adamw"), 104, 118)
    assert not set(plan.layers) & {"rebuild", "recompute"}
    assert any(plan.offload)


def test_less_memory_never_means_less_work_again() -> None:
    job = bare(128 * K)
    costs = [
        recompute_cost(B8, job, plan) + copy_cost(B8, job, plan) + tile_cost(B8, job, plan.mlp_tile)
        for plan in (chosen(B8, job, device, 125) for device in (200, 120, 104, 80, 60, 55, 50))
    ]
    assert costs == sorted(costs)


@pytest.mark.parametrize(("host", "modes"), [(50, {"save"}), (34, {"save", "rebuild"}), (18, {"rebuild", "recompute"})])
def test_a_short_host_rebuilds_first_and_recomputes_then(host: int, modes: set[LayerMode]) -> None:
    used = set(chosen(B8, bare(128 * K), 48, host).layers)
    assert modes <= used
    assert ("recompute" in used) == ("recompute" in modes)


def test_short_rows_recompute_rather_than_wait_for_copies() -> None:
    # 2K tokens: copies out would outlast the attention beside them many times.
    rows = Job(2 * K, batch=64, weights="none", optimizer="none")
    plan = chosen(B8, rows, 90, 125)
    assert not any(plan.offload)
    plan = chosen(B8, rows, 70, 125)
    assert "recompute" in plan.layers
    assert not any(plan.offload)
    plan = chosen(B8, bare(128 * K), 60, 125)
    assert "recompute" not in plan.layers


def test_windowed_layers_recompute_first() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    windowed = ModelSizes.from_config(
        {**LLAMA_8B, "hidden_size": 2048, "head_dim": 128, "sliding_window": 1024, "layer_types": types}
    )
    plan = chosen(windowed, bare(128 * K), 60, 0)
    again = {index for index, mode in enumerate(plan.layers) if mode == "recompute"}
    assert again
    assert all(index % 2 for index in again)


def test_experts_are_never_rebuilt() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 7168}
    sizes = ModelSizes.from_config({**LLAMA_8B, **experts})
    plan = chosen(sizes, bare(128 * K), 48, 20)
    assert set(plan.layers) == {"save", "recompute"}
    assert "rebuild" in chosen(B8, bare(128 * K), 48, 20).layers


def test_pieces_follow_the_sizes() -> None:
    job = bare(128 * K)
    assert mlp_tile_for(B8, job) == 2048
    assert mlp_tile_for(B1, job) == 4096
    assert mlp_tile_for(B8, bare(1000)) == 1000
    assert loss_tile_for(B8, job) == 4096
    # Uncompiled, four fp32 values of each logit live at once.
    assert loss_tile_for(B8, replace(job, fused=False)) == 512
    assert loss_tile_for(B8, bare(7)) == 7
    assert head_groups_for(B8, bare(8 * K), 100 * GIB) == 1
    # Indices: 1M tokens of 32 heads of 128 are 2^32 elements.
    assert head_groups_for(B8, bare(1024 * K), 10**6 * GIB) == 3
    assert head_groups_for(B8, Job(1024 * K, sp=8), 100 * GIB) == 1


def test_what_is_given_stays() -> None:
    job = bare(32 * K)
    whole = Decided(layers="recompute", offload=True, mlp_tile=512, loss_tile=300, head_groups=2)
    plan = plan_or_refuse(B8, job, 100 * GIB, 100 * GIB, whole)
    assert plan == MemoryPlan(("recompute",) * 32, (True,) * 32, mlp_tile=512, loss_tile=300, head_groups=2)
    modes: tuple[LayerMode, ...] = ("save",) * 16 + ("recompute",) * 16
    assert plan_or_refuse(B8, job, 100 * GIB, decided=Decided(layers=modes)).layers == modes
    assert plan_or_refuse(B8, job, 250 * GIB, decided=Decided(layers="keep")).mlp_tile == 32 * K
    assert not any(plan_or_refuse(B8, bare(64 * K), 55 * GIB, 200 * GIB, Decided(offload=False)).offload)


def test_what_is_offloaded_may_be_decided_alone() -> None:
    """Kept layers have nothing to offload; the modes are chosen with the decision in view."""
    job = bare(64 * K)
    away = plan_or_refuse(B8, job, 60 * GIB, 200 * GIB, Decided(offload=True))
    assert "keep" in away.layers
    assert away.offload == tuple(mode != "keep" for mode in away.layers)
    here = plan_or_refuse(B8, job, 60 * GIB, 200 * GIB, Decided(offload=False))
    free = plan_or_refuse(B8, job, 60 * GIB, 200 * GIB)
    assert any(free.offload)
    assert recompute_cost(B8, job, free) < recompute_cost(B8, job, here)
    first = Decided(offload=(True,) * 8 + (False,) * 24)
    plan = plan_or_refuse(B8, job, 70 * GIB, 200 * GIB, first)
    assert plan.offload == first.offload
    assert "keep" not in plan.layers[:8]


def test_a_refusal_says_what_decision_to_take_back() -> None:
    kept = Decided(layers="keep", mlp_tile=4096)
    with pytest.raises(MemoryPlanError, match=r"any one of these fits: memory='auto'; "):
        plan_or_refuse(B8, bare(64 * K), 60 * GIB, 200 * GIB, kept)
    phrases = LIBRARY._replace(free=RUN_FILE.free)
    with pytest.raises(MemoryPlanError, match=r"any one of these fits: memory\.layers=null memory\.mlp_tile=null; "):
        plan_or_refuse(B8, bare(64 * K), 60 * GIB, 200 * GIB, kept, phrases=phrases)
    # Where it is not the decision that is to blame, it is not named.
    with pytest.raises(MemoryPlanError) as caught:
        plan_or_refuse(B8, bare(4096 * K), 30 * GIB, 0, kept)
    assert "memory='auto'" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": 3}, "layers=3: a mode, or one a layer, is needed"),
        ({"layers": "rebuild"}, 'a "rebuild" layer must follow'),
        ({"layers": ["save", "kep"]}, "layer mode 'kep'"),
        ({"offload": "yes"}, "offload flag 'yes'"),
        ({"layers": ["keep", "save"], "offload": [True, False]}, "layer 0 keeps everything and is to be offloaded"),
        ({"layers": ["keep", "save"], "offload": [False]}, "2 layer modes, 1 offload flags"),
        ({"layers": ("keep", "keep"), "offload": True}, "every layer keeps everything and is to be offloaded"),
        ({"mlp_tile": 0}, "mlp_tile=0: a whole number of at least 1"),
        ({"head_groups": True}, "head_groups=True: a whole number"),
    ],
)
def test_what_cannot_be_decided_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(MemoryPlanError, match=re.escape(said)):
        Decided.of(given)


def test_plan_and_refusal_make_few_calls() -> None:
    def refused() -> None:
        with pytest.raises(MemoryPlanError):
            chosen(B8, Job(1024 * K), 40, 10)

    assert calls_of(lambda: chosen(B8, Job(512 * K, weights="none", optimizer="adamw8bit"), 104, 118)) < MOST_CALLS
    assert calls_of(refused) < MOST_CALLS


def test_the_error_names_the_term_and_changes_that_fit() -> None:
    job = Job(1024 * K, weights="none", optimizer="adamw8bit")
    with pytest.raises(MemoryPlanError) as raised:
        plan_or_refuse(B8, job, 104 * GIB, 118 * GIB)
    message = str(raised.value)
    assert "1,048,576 tokens over sp=1 do not fit" in message
    assert "'saved on the device'" in message
    length = int(re.findall(r"length=([\d,]+)", message)[-1].replace(",", ""))
    assert 512 * K < length < 1024 * K
    chosen(B8, replace(job, length=length), 104, 118)
    with pytest.raises(MemoryPlanError):
        plan_or_refuse(B8, replace(job, length=length + 2 * K), 104 * GIB, 118 * GIB)
    sp = int(re.findall(r"[;:] sp=(\d+)", message)[0])
    chosen(B8, replace(job, sp=sp), 104, 118)
    device = int(re.findall(r"(\d+) GiB of device memory", message)[0])
    chosen(B8, job, device, 118)


def test_the_error_asks_for_host_memory_where_that_is_short() -> None:
    job = bare(512 * K)
    with pytest.raises(MemoryPlanError) as raised:
        plan_or_refuse(B8, job, 104 * GIB, 10 * GIB)
    host = int(re.findall(r"fits: parallelize\(\.\.\., host_budget='(\d+)GiB'", str(raised.value))[0])
    chosen(B8, job, 104, host)
    with pytest.raises(MemoryPlanError):
        chosen(B8, job, 104, host - 1)


def test_the_error_sends_the_optimizer_to_the_host() -> None:
    with pytest.raises(MemoryPlanError, match=r"'optimizer state', 29\.9 GiB.*on_host='everything'"):
        plan_or_refuse(B8, Job(8 * K, weights="none"), 59 * GIB, 125 * GIB)


def test_the_error_counts_what_is_already_on_the_host() -> None:
    job = Job(8 * K, weights="none", optimizer_on_host=True)
    with pytest.raises(MemoryPlanError, match=r"29\.9 of 0\.0 GiB on the host.*'optimizer state'"):
        plan_or_refuse(B8, job, 60 * GIB)


@pytest.mark.parametrize(("length", "dp", "device"), [(128 * K, 2, 60), (32 * K, 4, 36)])
def test_an_advised_degree_fits_on_the_ranks_there_are(length: int, dp: int, device: int) -> None:
    job = Job(length, sp=1, dp=dp, weight_bytes=4, gradient_bytes=4)
    with pytest.raises(MemoryPlanError) as refused:
        plan_or_refuse(B8, job, device * GIB)
    [said] = (int(found) for found in re.findall(r"[:;] sp=(\d+)", str(refused.value)))
    plan_or_refuse(B8, replace(job, sp=said, dp=max(1, dp // said)), device * GIB)


def test_a_refusal_beside_replicas_is_the_jobs_own() -> None:
    """No degree is tried that the replicas cannot be cut into."""
    job = Job(1024 * K, sp=1, dp=6, replicas=3, weight_bytes=4, gradient_bytes=4)
    with pytest.raises(MemoryPlanError, match="do not fit"):
        plan_or_refuse(B8, job, 20 * GIB)


def test_what_is_kept_cannot_be_away() -> None:
    with pytest.raises(MemoryPlanError, match="layer 1 keeps everything and is to be offloaded"):
        MemoryPlan(("save", "keep"), (True, True), 8, 8)


def test_logits_that_are_not_tiled_are_planned_whole() -> None:
    tiled = Job(64 * K, weights="none", optimizer="none")
    whole = replace(tiled, whole_logits=True)
    plan = plan_or_refuse(B8, whole, 130 * GIB, 60 * GIB)
    memory = memory_of(B8, whole, plan)
    assert plan.loss_tile == whole.tokens
    assert memory.moment == "loss"
    terms = {term.name: term.device_bytes for term in memory.terms}
    assert terms["whole logits"] == whole.tokens * B8.vocabulary * (2 + 2 * 4)
    assert plan_or_refuse(B8, tiled, 130 * GIB, 60 * GIB).loss_tile < whole.tokens
    # A tile that was asked for is no tile either.
    assert memory_of(B8, whole, replace(plan, loss_tile=64)) == memory
