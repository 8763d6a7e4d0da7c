"""Llama over meshes, head counts and batches: loss, logits and every gradient equal one process in fp64.

The quick slice accumulates one micro-batch of every awkward kind in a single comparison. The full matrix covers pairs of
mesh, heads, kind, rows and placement of the weights; most cases have one kind, so that no error hides behind another.
"""

from __future__ import annotations

import pytest

from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_model
from tests.batches import KINDS
from tests.pairs import cover
from tests.parity.cases import worst
from tests.ranks import expect_refusal
from tests.tolerances import FP64

HEADS = [(8, 8), (8, 2), (4, 1), (7, 7), (9, 3), (14, 2), (28, 4)]
MESHES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 3)]
# Every head count, every sp but 8 and every dp in a few cells; the whole matrix is slow.
QUICK = [
    *[((1, 2), heads, 1) for heads in ((8, 8), (4, 1), (7, 7))],
    ((1, 1), (8, 2), 3),
    ((1, 3), (14, 2), 1),
    ((1, 4), (28, 4), 1),
    ((1, 4), (14, 2), 3),
    ((2, 2), (9, 3), 1),
]
# In place of a kind: a micro-batch of each in one step.
ALL = "all"
MATRIX = cover(
    MESHES,
    HEADS,
    [*KINDS, ALL],
    [1, 3],
    ["shard", "replicate", "none"],
    allowed=lambda mesh, heads, *_: bool(mesh[1] <= heads[0]),
)
NOT = [(mesh, heads) for mesh in MESHES for heads in HEADS if mesh[1] > heads[0]]


def settings(heads: tuple[int, int]) -> dict[str, int]:
    return {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}


@pytest.mark.few(3)
@pytest.mark.parametrize(("mesh", "heads", "rows"), QUICK, ids=str)
def test_llama_all_kinds_equals_one_process(mesh: tuple[int, int], heads: tuple[int, int], rows: int) -> None:
    assert worst("llama", mesh, rows, list(KINDS), **settings(heads)) < FP64


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "heads", "kind", "rows", "weights"), MATRIX, ids=str)
def test_llama_matrix_equals_one_process(
    mesh: tuple[int, int], heads: tuple[int, int], kind: str, rows: int, weights: str
) -> None:
    kinds = list(KINDS) if kind == ALL else [kind]
    assert worst("llama", mesh, rows, kinds, weights=weights, **settings(heads)) < FP64


def test_llama_replicated_weights_equals_one_process() -> None:
    assert worst("llama", (2, 2), 1, ["plain", "packed"], weights="replicate") < FP64


def _bind(degrees: tuple[int, int], heads: tuple[int, int]) -> None:
    parallelize(small_model("llama", **settings(heads)), init_mesh(dp=degrees[0], sp=degrees[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "heads"), NOT, ids=str)
def test_mesh_more_ranks_than_heads_is_refused(mesh: tuple[int, int], heads: tuple[int, int]) -> None:
    match = rf"{heads[0]} heads over sp={mesh[1]}: .* use sp=4 with dp=2"
    expect_refusal(mesh[0] * mesh[1], _bind, mesh, heads, error="MeshError", match=match)
