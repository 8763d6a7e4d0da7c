"""Before a step all ranks compare notes: different data inside a sequence group, or a bad batch anywhere, raises on all.

Elsewhere the first trains on a mixture of two batches in silence and the second hangs in a collective. Nothing here
may leave a rank waiting, and the step after a refused one must work and be right.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh, init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks

IDS = torch.arange(3, 15).view(1, 12)
POSITIONS = torch.arange(12)[None]
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
PACKED_ELSEWHERE = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])
EMBEDS = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0)) * 0.01


def setup(sp: int = 2) -> tuple[Any, Mesh]:
    mesh = init_mesh(sp=sp)
    return parallelize(small_model("llama", dtype=torch.float32), mesh, allow_untested=True), mesh


def swapped(ids: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return a batch with the ids in another order: a plain sum is equal."""
    other = ids.clone()
    other[0, a], other[0, b] = ids[0, b], ids[0, a]
    return other


def unlike(rank: int, batch: dict[str, Any], change: dict[str, Any], sp: int) -> None:
    """Rank `rank` alone is handed another batch."""
    model, mesh = setup(sp)
    causal_loss(model, batch | change if mesh.rank == rank else batch, mesh)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({"input_ids": IDS}, {"input_ids": IDS.repeat(2, 1)}, "rows: 1 and 2"),
    "length": ({"input_ids": IDS}, {"input_ids": IDS[:, :-1]}, "tokens a row: 12 and 11"),
    "targets": ({"input_ids": IDS}, {"labels": IDS.masked_fill(IDS == 5, -100)}, "targets: 11 and 10"),
    "ids": ({"input_ids": IDS}, {"input_ids": IDS.flip(1)}, "unlike in tokens' content"),
    "order": ({"input_ids": IDS}, {"input_ids": swapped(IDS, 6, 7)}, "unlike in tokens' content"),
    "labels": ({"input_ids": IDS, "labels": IDS}, {"labels": IDS + 1}, "unlike in labels' content"),
    "documents": (
        {"input_ids": IDS, "position_ids": PACKED, "labels": IDS},
        {"position_ids": PACKED_ELSEWHERE},
        "unlike in documents and positions",
    ),
    "positions": (
        {"input_ids": IDS, "position_ids": POSITIONS},
        {"position_ids": POSITIONS + 9},
        "unlike in documents and positions",
    ),
    "embeddings": (
        {"inputs_embeds": EMBEDS, "labels": IDS},
        {"inputs_embeds": EMBEDS * 1.01},
        "unlike in tokens' content",
    ),
    "nan": (
        {"inputs_embeds": EMBEDS, "labels": IDS},
        {"inputs_embeds": EMBEDS * torch.nan},
        "unlike in tokens' content",
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("what", DIFFERENT)
def test_agree_different_batches_in_group_raise_on_all(what: str) -> None:
    batch, change, message = DIFFERENT[what]
    expect_refusal(
        2,
        unlike,
        1,
        batch,
        change,
        2,
        error="BatchError",
        match=f"ranks 0 and 1 share one sequence .*{message}.*dp_rank",
    )


@pytest.mark.slow
def test_agree_bad_group_elsewhere_raises_on_all() -> None:
    batch, change, _ = DIFFERENT["order"]
    expect_refusal(4, unlike, 3, batch, change, 2, error="BatchError", match="ranks 2 and 3 share one sequence")


def frozen_on_one(when: str, sp: int) -> None:
    """Rank 1 alone does not train one weight, from `when` on; or records no gradients in its second step."""
    mesh, model = init_mesh(sp=sp), small_model("llama", dtype=torch.float32)
    weight = "model.layers.1.mlp.down_proj.weight"
    model.get_parameter(weight).requires_grad_(not (when == "before" and mesh.rank == 1))
    model = parallelize(model, mesh, allow_untested=True)
    model.get_parameter(weight).requires_grad_(not (when == "after" and mesh.rank == 1))
    causal_loss(model, GOOD, mesh).backward()
    with torch.set_grad_enabled(not (when == "no_grad" and mesh.rank == 1)):
        model.get_parameter(weight).requires_grad_(not (when == "between steps" and mesh.rank == 1))
        causal_loss(model, GOOD, mesh)


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize(
    ("when", "match"),
    [
        ("before", "models differ in their weights' .* requires_grad .*: build the same model on every rank"),
        ("after", "ranks 0 and 1 train different weights: set the same requires_grad on every rank"),
        ("between steps", "ranks 0 and 1 train different weights"),
        ("no_grad", r"rank 1 runs under torch.no_grad\(\) and rank 0 does not"),
    ],
)
def test_agree_different_trained_weights_raise(when: str, match: str, sp: int) -> None:
    """A gradient is reduced by all ranks: without the refusal the others wait for ever."""
    expect_refusal(2, frozen_on_one, when, sp, error="UnsupportedError", match=match, timeout=60)


def own_options(options: dict[str, float], sp: int) -> None:
    """Rank 1 alone passes `options`."""
    model, mesh = setup(sp)
    causal_loss(model, GOOD, mesh, **(options if mesh.rank == 1 else {"count": 22}))  # type: ignore[arg-type]


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"count": 11}, "count"),
        ({}, "count"),
        ({"count": 22, "z_loss": 1e-4}, "z_loss"),
        ({"count": 22, "label_smoothing": 0.1}, "label_smoothing"),
        ({"count": 11, "z_loss": 1e-4}, "count, z_loss"),
    ],
    ids=str,
)
def test_agree_different_counts_raise(options: dict[str, float], names: str, sp: int) -> None:
    """Such as a number of targets that each rank counted by itself: the parts would add up to no mean."""
    said = f"ranks 0 and 1 differ in {names}: pass the same on every rank; .*count_tokens"
    expect_refusal(2, own_options, options, sp, error="BatchError", match=said)


def by_data_rank() -> float:
    model, mesh = setup()
    batch = small_batch(1 + mesh.dp_rank, 9 + 4 * mesh.dp_rank, seed=mesh.dp_rank)
    return float(causal_loss(model, batch, mesh))


@pytest.mark.slow
def test_agree_different_data_ranks_pass() -> None:
    assert len(set(run_ranks(4, by_data_rank))) == 1


GOOD = small_batch(1, 12)


def recover(bad: dict[str, Any], culprit: int) -> tuple[str, float, float]:
    """Return this rank's error in a bad step, the loss of the next step, and the loss of a fresh model."""
    model, mesh = setup()
    before = float(causal_loss(model, GOOD, mesh).detach())
    said = "nothing"
    try:
        causal_loss(model, bad if mesh.rank == culprit else GOOD, mesh).backward()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    loss = causal_loss(model, GOOD, mesh)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return said, float(loss.detach()), before


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "BatchError: .*the batch is empty"),
    "labels of another shape": (GOOD | {"labels": IDS[:, :5]}, r"BatchError: labels has shape \[1, 5\]"),
    "vocabulary": ({"input_ids": IDS + 60}, "BatchError: input_ids has the id 74: .* 0 to 60"),
    "unsigned labels": (
        GOOD | {"labels": (IDS - 103).to(torch.uint8)},
        r"BatchError: labels has the id 167 in torch.uint8, which holds no -100: this model's vocabulary is 0 to 60",
    ),
    "4-D mask": (GOOD | {"attention_mask": torch.ones(1, 1, 12, 12)}, "UnsupportedError: attention_mask is 4-D"),
    "no tokens": ({"labels": IDS}, "BatchError: .*neither input_ids nor inputs_embeds"),
    "a list": ({"input_ids": [[1, 2, 3]]}, "BatchError: input_ids is a list: a tensor is needed"),
    "floats": ({"input_ids": IDS.float()}, "BatchError: input_ids is of torch.float32: ids are whole numbers"),
    "ragged cu_seqlens": (GOOD | {"cu_seqlens": [[0, 1], [2]]}, "BatchError: cu_seqlens is a list: whole numbers"),
    "not a batch": ([1, 2, 3], "BatchError: the batch is a list: a dict with"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("what", BAD)
def test_agree_bad_batch_on_one_rank_next_step_works(what: str) -> None:
    bad, own = BAD[what]
    said = run_ranks(2, recover, bad, 1, timeout=30)
    assert_said(said[1][0], own)
    assert_said(said[0][0], "PeerError: rank 1 refused its batch or options and says why")
    for _, after, before in said:
        assert after == before == said[0][2]


def assert_said(said: str, pattern: str) -> None:
    assert re.match(pattern, said), said


ONE_RANK: dict[str, tuple[dict[str, Any], str]] = {
    "negative count": ({"count": -1}, "BatchError: count=-1: pass what"),
    "count of text": ({"count": "22"}, "BatchError: count='22': pass what"),
    "label_smoothing of text": ({"label_smoothing": "x"}, "BatchError: label_smoothing='x'"),
    "label_smoothing": ({"label_smoothing": 1.5}, "BatchError: label_smoothing=1.5"),
    "z_loss": ({"z_loss": -1.0}, "BatchError: label_smoothing=0.0, z_loss=-1.0"),
    "by_position": ({"by_position": 3}, "ArgumentError: by_position is 3"),
    "num_items_in_batch": ({}, "BatchError: the batch has num_items_in_batch"),
    "added weight": ({}, "UnsupportedError: LlamaForCausalLM got 1 parameters after parallelize"),
    "a forward put on": ({}, "UnsupportedError: model.norm was given a forward after parallelize"),
    "plain model": ({}, "UnsupportedError: LlamaForCausalLM is not parallelized"),
    "no model": ({}, "UnsupportedError: the model is a dict"),
    "another mesh": ({}, "MeshError: mesh is .* the model was parallelized over"),
}


def refused_on_one(what: str) -> tuple[str, float, float]:
    """Return this rank's error where rank 1 alone passes something wrong, and the losses after and before."""
    model, mesh = setup()
    mine, batch, options, other = model, dict(GOOD), {"count": 22}, init_mesh(sp=1)
    before = float(causal_loss(model, GOOD, mesh).detach())
    said = "nothing"
    if mesh.rank == 1:
        options |= ONE_RANK[what][0]
        mine = {"plain model": small_model("llama"), "no model": {}}.get(what, model)
        batch |= {"num_items_in_batch": 5} if what == "num_items_in_batch" else {}
        if what == "num_items_in_batch":
            options = {}
        if what == "a forward put on":
            model.model.norm.forward = lambda x: x
        if what == "added weight":
            model.model.layers[1].mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    try:
        causal_loss(mine, batch, other if what == "another mesh" and mesh.rank == 1 else mesh, **options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    if what == "added weight" and mesh.rank == 1:
        del model.model.layers[1].mlp.extra
    model.model.norm.__dict__.pop("forward", None)
    return said, float(causal_loss(model, GOOD, mesh).detach()), before


@pytest.mark.parametrize("what", ONE_RANK)
def test_agree_refusal_on_one_rank_raises_on_all(what: str) -> None:
    """Rank 0 waits in the agreement, and learns there that rank 1 never calls the model."""
    (others, *losses), (own, *_) = run_ranks(2, refused_on_one, what, timeout=30)
    assert_said(own, ONE_RANK[what][1])
    assert_said(others, "PeerError: rank 1 refused its batch or options and says why")
    assert losses[0] == losses[1]


def count(bad: bool) -> str:
    mesh = init_mesh(sp=2)
    own = [small_batch(1, 5 + mesh.dp_rank, learned=1.0), small_batch(2, 7, learned=1.0)]
    if bad and mesh.rank == 1:
        own[1]["labels"] = own[1]["labels"][:, 1:]
    try:
        return str(count_tokens(own, mesh))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_count_tokens_counts_each_sequence_once() -> None:
    assert run_ranks(4, count, False, timeout=30) == [str((4 + 12) + (5 + 12))] * 4
    said = run_ranks(4, count, True, timeout=30)
    assert_said(said[1], r"BatchError: labels has shape \[2, 6\]")
    for rank in (0, 2, 3):
        assert_said(said[rank], "PeerError: another rank could not count its batches")


def negative_count() -> None:
    model, mesh = setup()
    causal_loss(model, GOOD, mesh, count=-1)


def test_causal_loss_negative_count_is_refused() -> None:
    expect_refusal(2, negative_count, error="BatchError", match="count=-1: pass what ithaca.count_tokens")


def unbound() -> None:
    causal_loss(small_model("llama"), GOOD, init_mesh(sp=2))


def test_causal_loss_plain_model_is_refused() -> None:
    expect_refusal(
        2, unbound, error="UnsupportedError", match=r"LlamaForCausalLM is not parallelized: call ithaca\.para"
    )


def turned_arguments() -> None:
    causal_loss(GOOD, small_model("llama"), init_mesh(sp=2))  # type: ignore[arg-type]


def test_causal_loss_batch_as_model_is_refused() -> None:
    expect_refusal(2, turned_arguments, error="UnsupportedError", match="the model is a dict: pass what ithaca.paral")


def loss_of_nothing() -> tuple[float, float]:
    """Return loss and largest gradient of a batch with all labels -100: zero and not NaN, and backward runs on every rank."""
    model, mesh = setup()
    loss = causal_loss(model, GOOD | {"labels": torch.full_like(GOOD["input_ids"], -100)}, mesh)
    loss.backward()
    largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())  # type: ignore[union-attr]
    dist.barrier()
    return float(loss.detach()), largest


def test_causal_loss_without_targets_is_zero() -> None:
    assert run_ranks(2, loss_of_nothing, timeout=30) == [(0.0, 0.0)] * 2
