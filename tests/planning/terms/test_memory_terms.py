"""Memory terms against numbers worked out by hand, and the directions in which they must move.

Llama-3 8B at 128K tokens: a residual stream is 131072 * 4096 * 2 bytes, 1 GiB; q as much, k and v 0.25 GiB each;
lse 131072 * 32 * 4 bytes, 1/64 GiB.
"""

from dataclasses import replace
from typing import Any

import pytest

from ithaca.constants import GIB
from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.known_models import find_model
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import (
    TensorBytes,
    attention_work,
    freed_before_attention,
    mlp_work,
    saved,
)
from ithaca.planning.terms.loss_work import loss_work
from ithaca.planning.terms.memory_terms import SLACK, memory_of
from ithaca.planning.terms.step_memory import StepMemory
from ithaca.planning.terms.terms_table import explain
from tests.planning.models import B1, B8, K

BARE = Job(128 * K, weights="none", optimizer="none")
MODES: tuple[LayerMode, LayerMode] = ("keep", "save")


def plan(mode: LayerMode = "save", *, offload: bool = True, layers: int = 32, groups: int = 1) -> MemoryPlan:
    return MemoryPlan((mode,) * layers, (offload,) * layers, mlp_tile=2048, loss_tile=2048, head_groups=groups)


def device_terms(memory: StepMemory) -> dict[str, float]:
    return {term.name: term.device_bytes / GIB for term in memory.terms if term.device_bytes}


def host_terms(memory: StepMemory) -> dict[str, float]:
    return {term.name: term.host_bytes / GIB for term in memory.terms if term.host_bytes}


@pytest.mark.parametrize(
    ("mode", "gib"),
    [
        ("save", 2 + 1 / 64),
        ("rebuild", 1 + 1 / 64),
        ("recompute", 1),
        # Inputs of both norms and the first one's output, q, k, v, output, lse.
        ("keep", 3 + 1.5 + 1 + 1 / 64),
    ],
)
def test_what_a_layer_saves(mode: LayerMode, gib: float) -> None:
    tensors = TensorBytes.of(B8, BARE, 1)
    assert sum(saved(tensors, B8.layers[0], mode, tiled=True)) == gib * GIB
    eighth = TensorBytes.of(B8, replace(BARE, sp=8), 1)
    # Among ranks a kept layer has attention's output in both orders.
    twice = eighth.out if mode == "keep" else 0
    assert sum(saved(eighth, B8.layers[0], mode, tiled=True)) == gib * GIB / 8 + twice


def test_a_kept_layer_that_is_not_tiled_has_its_mlp_too() -> None:
    # Compiled: input and output of two norms, attention, gate, up and product of 3.5 GiB each.
    whole = saved(TensorBytes.of(B8, BARE, 1), B8.layers[0], "keep", tiled=False)
    assert sum(whole) == (4 + 1.5 + 1 + 1 / 64 + 10.5) * GIB
    # Not compiled: two norms of (2 + 1 + 1) GiB, and the activation too.
    whole = saved(TensorBytes.of(B8, replace(BARE, fused=False), 1), B8.layers[0], "keep", tiled=False)
    assert sum(whole) == (8 + 1.5 + 1 + 1 / 64 + 14) * GIB


@pytest.mark.parametrize(("fused", "each"), [(True, 2), (False, 4 + 2)])
def test_norms_of_queries_and_keys_are_kept_too(fused: bool, each: int) -> None:
    """Qwen3-8B, 32 and 8 heads of 128: their norms' input in bf16; uncompiled in fp32, and what comes out."""
    known = find_model("qwen3-8b")
    assert known is not None
    sizes, job = known.sizes, replace(BARE, fused=fused)
    assert sizes.layers[0].normed == (32 + 8) * 128
    bare = replace(sizes.layers[0], normed=0)
    tensors = TensorBytes.of(sizes, job, 1)
    for tiled in (True, False):
        more = sum(saved(tensors, sizes.layers[0], "keep", tiled=tiled)) - sum(
            saved(tensors, bare, "keep", tiled=tiled)
        )
        assert more == job.tokens * 5120 * each
    assert sum(saved(tensors, sizes.layers[0], "save", tiled=True)) == sum(saved(tensors, bare, "save", tiled=True))
    # While a layer is run again they are there as well.
    work = [sum(p.bytes for p in attention_work(tensors, layer, "save")) for layer in (sizes.layers[0], bare)]
    assert work[0] - work[1] == job.tokens * 5120 * each


def test_8b_at_128k_on_one_rank() -> None:
    memory = memory_of(B8, BARE, plan())
    # Late in backward: nearly all gradients are there, the last two layers' tensors are back.
    assert memory.moment == "attention of layer 1, backward"
    assert host_terms(memory) == {"saved tensors, pinned": 32 * (2 + 1 / 64)}


def test_8b_at_128k_over_eight_ranks() -> None:
    memory = memory_of(B8, Job(128 * K, sp=8), plan())
    terms = device_terms(memory)
    layer = B8.layers[0].parameters
    assert terms["weights"] == pytest.approx(8_030_261_248 * 2 / 8 / GIB)
    assert terms["optimizer state"] == pytest.approx(8_030_261_248 * 4 / 8 / GIB)
    assert terms["gathered weights"] == pytest.approx((2 * layer + 2 * 128256 * 4096 + 4096) * 2 / GIB)
    assert terms["unreduced gradients"] == pytest.approx((layer * 6 + 128256 * 4096 * 2) / GIB)
    # A rank has 4 query heads and 1 kv head: an eighth of everything.
    assert terms["residual stream"] == 3 / 8
    assert terms["exchange"] == 2 * 3.5 / 8
    assert terms["kernel workspace"] == 4 / 8
    # Those of q, k, v come back when the kernel's workspace is gone.
    assert terms["gradients of attention"] == 1 / 8
    assert host_terms(memory) == {"saved tensors, pinned": 32 * (2 + 1 / 64) / 8}


def test_kv_heads_that_ranks_share_are_counted_on_each() -> None:
    tensors = TensorBytes.of(B8, replace(BARE, sp=16), 1)
    assert tensors.kv_g == 131072 * 2 * 128 * 2
    assert tensors.shares_kv
    assert not TensorBytes.of(B8, replace(BARE, sp=8), 1).shares_kv


def test_what_a_kept_layer_saves_over_ranks() -> None:
    """As it arrived: kv heads that two ranks share on both, and the output once more for the projection after it."""
    job = replace(BARE, sp=16, length=16 * 128 * K)
    norms, qkv, out, _, normed, again, _ = saved(TensorBytes.of(B8, job, 1), B8.layers[0], "keep", tiled=False)
    assert (norms / GIB, out / GIB, again / GIB, normed) == (4, 1, 1, 0)
    assert qkv / GIB == 1 + 2 * 0.5
    # In head groups q, k, v stay with their tokens, and the output is one tensor.
    job = replace(job, sp=4, length=4 * 128 * K)
    _, qkv, out, _, _, again, _ = saved(TensorBytes.of(B8, job, 2), B8.layers[0], "keep", tiled=False)
    assert (qkv / GIB, out / GIB, again) == (1.5, 1, 0)


def test_attention_of_a_kept_layer_brings_only_the_gradient() -> None:
    tensors, layer = TensorBytes.of(B8, replace(BARE, sp=8, length=8 * 128 * K), 1), B8.layers[0]
    kept, run_again = ({p.name: p.bytes / GIB for p in attention_work(tensors, layer, mode)} for mode in MODES)
    # The output's gradient, and q, k, v as the kernel wants them; elsewhere all five, twice.
    assert kept["exchange"] == 1 + 1.5
    assert run_again["exchange"] == 2 * 3.5
    # By then the MLP's own, its norm's and the projection's input are gone.
    wide = 131072 * 3 * 14336 * 2 / GIB
    assert freed_before_attention(tensors, layer, "keep", tiled=False) / GIB == wide + 2 + 1
    assert freed_before_attention(tensors, layer, "keep", tiled=True) / GIB == 1 + 1
    assert freed_before_attention(tensors, layer, "save", tiled=False) == 0


def test_results_that_return_may_take_more_than_the_kernel() -> None:
    """With as many kv heads as query heads the workspace is small, and dq, dk, dv are there three times."""
    sizes = replace(B8, kv_heads=32)
    tensors = TensorBytes.of(sizes, replace(BARE, sp=8, length=8 * 128 * K), 1)
    pieces = {p.name: p.bytes / GIB for p in attention_work(tensors, sizes.layers[0], "keep")}
    assert pieces["kernel workspace"] == 2
    assert pieces["exchange"] + pieces["kernel workspace"] == 1 + 3 * 3


def test_copies_for_experts() -> None:
    """Their weights' gradients come when most copies are gone."""
    known = find_model("Qwen/Qwen3-30B-A3B")
    assert known is not None
    layer, hidden, width = known.sizes.layers[0], 2048, 8 * 768
    for tokens, copies, values in ((128 * K, 5, 5), (K, 2, 3)):
        tensors = TensorBytes.of(known.sizes, replace(BARE, length=tokens), 1)
        [tile] = [
            p.bytes for p in mlp_work(tensors, layer, "keep", tokens, trains=True, reduces=True) if p.name == "MLP tile"
        ]
        weights = layer.mlp * 2 if copies == 5 else 0
        [frozen] = [
            p.bytes
            for p in mlp_work(tensors, layer, "keep", tokens, trains=False, reduces=True)
            if p.name == "MLP tile"
        ]
        assert frozen == tokens * (5 * 8 * hidden + 5 * width + 4 * hidden) * 2
        assert tile == tokens * (copies * 8 * hidden + values * width + 4 * hidden) * 2 - weights


def test_head_groups_cut_the_workspace() -> None:
    terms = device_terms(memory_of(B8, BARE, plan(groups=8)))
    assert terms["kernel workspace"] == 4 / 8
    assert terms["head group"] == 3.5 / 8
    # More groups than kv heads are as many as kv heads.
    assert memory_of(B8, BARE, plan(groups=64)) == memory_of(B8, BARE, plan(groups=8))


def test_an_mlp_in_one_tile_has_no_gradient_beside_its_own() -> None:
    """Beside gate, up, product and a gradient of 3.5 GiB: both norms' outputs, the MLP's input, the layer's gradient."""
    tensors, layer = TensorBytes.of(B8, BARE, 1), B8.layers[0]
    pieces = {p.name: p.bytes / GIB for p in mlp_work(tensors, layer, "save", 128 * K, trains=True, reduces=True)}
    assert pieces == {"residual stream": 3, "q, k, v": 1.5, "MLP tile": 4 * 3.5 + 1}
    # Tiles fill the input's gradient one by one: it is there from the start.
    tiled = {p.name: p.bytes / GIB for p in mlp_work(tensors, layer, "save", 64 * K, trains=False, reduces=True)}
    assert tiled["residual stream"] == 4


def test_of_two_head_groups_the_second_has_none_behind_it() -> None:
    """Results return beside the next group's buffers: that takes a third group."""
    among = replace(BARE, sp=2)
    two, four = (
        {p.name: p.bytes / GIB for p in attention_work(TensorBytes.of(B8, among, n), B8.layers[0], "save")}
        for n in (2, 4)
    )
    # 8 and 4 of 32 query heads, 2 and 1 of 8 kv heads over all tokens: bundles of 0.875 GiB, half of that.
    assert two["exchange"] == 4 * 0.875
    assert four["exchange"] == 4 * 0.4375 + 2 * 0.1875


def test_a_chain_holds_the_inputs_it_rebuilt() -> None:
    modes: tuple[LayerMode, ...] = ("recompute", "rebuild", "rebuild", "rebuild") * 8
    chained = MemoryPlan(modes, (True,) * 32, mlp_tile=2048, loss_tile=2048, head_groups=8)
    assert chained.chain[:6] == (0, 1, 2, 3, 0, 1)
    memory = memory_of(B8, BARE, chained)
    assert memory.moment == "attention of layer 3, backward"
    terms = device_terms(memory)
    assert terms["rebuilt inputs"] == 3
    # One tensor of each of the chain's layers: its first one's input, three anchors.
    assert terms["staged for the host"] == 1 + 3 * (1 + 1 / 64)
    assert terms["attention run again"] == 1 + 1 / 64


def test_gradients_of_earlier_micro_batches_are_there_from_the_start() -> None:
    once, again = BARE, replace(BARE, accumulate=True)
    resident = plan(offload=False)
    difference = memory_of(B8, again, resident).device_bytes - memory_of(B8, once, resident).device_bytes
    assert difference == pytest.approx((8_030_261_248 - 128256 * 4096) * 2, rel=1e-3)


def test_a_short_step_is_worst_at_its_end() -> None:
    job = Job(128, weights="none", optimizer="adamw")
    memory = memory_of(B8, job, plan(offload=False))
    assert memory.moment == "optimizer step"
    # Torch's AdamW has two states like the weights that are trained.
    assert memory.device_bytes == 8_030_261_248 * (2 + 2 + 4)
    wide = replace(job, weight_bytes=4, gradient_bytes=4)
    assert memory_of(B8, wide, plan(offload=False)).device_bytes == 8_030_261_248 * (4 + 4 + 8)
    adapted = B8.with_lora(16)
    state = memory_of(adapted, replace(job, gradient_bytes=4), plan()).terms[1]
    assert (state.name, state.device_bytes) == ("optimizer state", adapted.adapters * 8)


def test_a_loss_in_place_has_one_tile_of_logits() -> None:
    tile = 2048 * B8.vocabulary * 2
    names = ("loss tile", "head weight gradient")
    for job, logits in ((BARE, 2 * tile), (replace(BARE, loss_in_place=True), tile)):
        pieces = {piece.name: piece.bytes for piece in loss_work(TensorBytes.of(B8, job, 1), B8, 2048, trains=True)}
        # Products are added to the weight's gradient in fp32 as they are made.
        assert [pieces[name] for name in names] == [logits, 4 * B8.embedding]
    apart = {p.name: p.bytes for p in loss_work(TensorBytes.of(B8, replace(BARE, fused=False), 1), B8, 64, trains=True)}
    assert apart["head weight gradient"] > 4 * B8.embedding


def test_lora_has_gradients_and_state_for_its_adapters() -> None:
    terms = device_terms(memory_of(B8.with_lora(16), replace(BARE, optimizer="adamw"), plan()))
    assert terms["optimizer state"] == pytest.approx(41_943_040 * 4 / GIB)
    assert terms["gradients"] < 0.1


def test_more_tokens_take_more() -> None:
    totals = [
        memory_of(B8, replace(BARE, length=length * K), plan()).device_bytes for length in (32, 64, 128, 256, 512)
    ]
    assert totals == sorted(set(totals))
    rows = memory_of(B8, replace(BARE, length=64 * K, batch=2), plan())
    assert rows.device_bytes == memory_of(B8, BARE, plan()).device_bytes


@pytest.mark.parametrize("groups", [1, 4])
def test_more_ranks_take_less(groups: int) -> None:
    jobs = [Job(128 * K, sp=sp) for sp in (1, 2, 4, 8, 16, 32)]
    totals = [memory_of(B8, job, plan(groups=groups)).device_bytes for job in jobs]
    assert totals == sorted(totals, reverse=True)
    copies = [memory_of(B8, Job(128 * K, sp=4, dp=dp), plan()).device_bytes for dp in (1, 2, 4)]
    assert copies == sorted(copies, reverse=True)


def test_offloading_moves_bytes_to_the_host() -> None:
    before = memory_of(B8, BARE, plan(offload=False))
    for number in range(1, 33):
        offload = tuple(index < number for index in range(32))
        memory = memory_of(B8, BARE, replace(plan(), offload=offload))
        assert memory.device_bytes <= before.device_bytes
        assert memory.host_bytes > before.host_bytes
        before = memory


@pytest.mark.parametrize("name", ["weights", "gradients", "optimizer"])
def test_state_on_the_host(name: str) -> None:
    job = Job(32 * K, sp=4)
    here, there = (memory_of(B8, j, plan()) for j in (job, replace(job, **{f"{name}_on_host": True})))
    assert there.device_bytes < here.device_bytes
    assert there.host_bytes > here.host_bytes


def test_sharding() -> None:
    jobs = [
        Job(32 * K, sp=8),
        Job(32 * K, sp=8, replicas=4),
        Job(32 * K, sp=8, weights="replicate"),
    ]
    weights = [device_terms(memory_of(B8, job, plan()))["weights"] for job in jobs]
    assert weights[1] == pytest.approx(4 * weights[0])
    assert weights[2] == pytest.approx(8 * weights[0])


def test_the_table_adds_up() -> None:
    memory = memory_of(B1, Job(256 * K), plan(layers=16))
    text = explain(memory.terms, 24 * GIB, 125 * GIB)
    lines = text.splitlines()
    rows = [float(line[24:32]) for line in lines if not line.startswith(("device", "host"))]
    assert sum(rows) * GIB == pytest.approx(memory.device_bytes + memory.host_bytes, rel=0.01)
    assert "device, GiB" in text
    assert "of 24.0" in text
    assert "too much" in explain(memory.terms, GIB)
    assert max(map(len, lines)) < 160


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="a plan of 16 layers for a model of 32"):
        memory_of(B8, BARE, plan(layers=16))
    with pytest.raises(MemoryPlanError, match="must follow"):
        MemoryPlan(("rebuild", "save"), (False, False), 1, 1)
    with pytest.raises(MemoryPlanError, match="must follow"):
        MemoryPlan(("keep", "rebuild"), (False, False), 1, 1)
    with pytest.raises(MemoryPlanError, match="'discard'"):
        MemoryPlan(("discard",), (False,), 1, 1)  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="1 layer modes, 2 offload flags"):
        MemoryPlan(("save",), (False, False), 1, 1)
    with pytest.raises(MemoryPlanError, match="mlp_tile=0"):
        MemoryPlan(("save",), (False,), 0, 1)
    with pytest.raises(MemoryPlanError, match="length=0"):
        Job(0)
    with pytest.raises(MemoryPlanError, match="'sgd': choose one of adamw"):
        Job(1, optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="replicas=3 over 8 ranks"):
        Job(1, sp=8, replicas=3)
    with pytest.raises(MeshError, match="use sp=32"):
        memory_of(B8, Job(K, sp=64), plan())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mlp_tile": 2.5}, "mlp_tile=2.5: a whole number of at least 1 is needed"),
        ({"mlp_tile": "4"}, "mlp_tile='4': a whole number of at least 1 is needed"),
        ({"mlp_tile": True}, "mlp_tile=True: a whole number of at least 1 is needed"),
        ({"loss_tile": None}, "loss_tile=None: a whole number of at least 1 is needed"),
        ({"loss_tile": 2.5}, "loss_tile=2.5: a whole number of at least 1 is needed"),
        ({"head_groups": 1.5}, "head_groups=1.5: a whole number of at least 1 is needed"),
        ({"offload": None}, "offload=None: one entry a layer is needed, such as (True, False)"),
        ({"offload": True}, "offload=True: one entry a layer is needed, such as (True, False)"),
        ({"offload": ("no", "no")}, "offload flag 'no': True or False is needed"),
        ({"offload": (True, 1)}, "offload flag 1: True or False is needed"),
        ({"layers": "save"}, "layers='save': one entry a layer is needed, such as ('save', 'recompute')"),
        ({"layers": None}, "layers=None: one entry a layer is needed, such as ('save', 'recompute')"),
        ({"layers": ("swap", 3)}, "layer mode 'swap': choose among keep, save, rebuild, recompute"),
        ({"layers": ("save", ["keep"])}, "layer mode ['keep']: choose among keep, save, rebuild, recompute"),
    ],
    ids=str,
)
def test_a_plan_of_other_types_is_refused_when_it_is_made(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"layers": ("save", "keep"), "offload": (True, False), "mlp_tile": 4, "loss_tile": 4}
    MemoryPlan(**given)
    with pytest.raises(MemoryPlanError) as raised:
        MemoryPlan(**given | change)
    assert str(raised.value) == said


def test_keys_and_values_that_layers_share_are_counted() -> None:
    """Two layers' keys and values, and their gradients, whatever the modes; nothing where no layer shares."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 1000, "intermediate_size": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 512,
    }  # fmt: skip
    alone, shared = (ModelSizes.from_config(config | {"num_kv_shared_layers": count}) for count in (0, 2))
    job = Job(length=32768)
    every: tuple[LayerMode, ...] = ("keep", "save", "recompute")
    for mode in every:
        kept = plan(mode, offload=False, layers=6)
        terms = {term.name: term.device_bytes for term in memory_of(shared, job, kept).terms}
        assert terms["keys and values that layers share"] == 2 * 2 * 32768 * 2 * (256 + 256) * 2
        more = memory_of(shared, job, kept).device_bytes - memory_of(alone, job, kept).device_bytes
        assert more == pytest.approx(terms["keys and values that layers share"] * (1 + SLACK), abs=2)


def test_head_sizes_of_single_layers_are_read() -> None:
    config = {
        "model_type": "gemma4_text", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000, "intermediate_size": 1024,
        "per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 1}},
    }  # fmt: skip
    sizes = ModelSizes.from_config(config)
    assert (sizes.key_size, sizes.value_size, sizes.kv_heads) == (128, 128, 4)
    first, second = (layer.attention for layer in sizes.layers)
    assert first == 512 * 64 * (8 + 4 + 4 + 8)
    assert second == 512 * 128 * (8 + 1 + 1 + 8)
