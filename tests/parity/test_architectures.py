"""The listed architectures, each with its windows, caps, sinks, scales and experts, against transformers alone."""

from __future__ import annotations

import pytest

from ithaca.verify.small_models.features import LISTED, WITH_EXPERTS
from tests.batches import KINDS
from tests.pairs import dealt
from tests.parity.cases import worst
from tests.tolerances import FP64

# An auxiliary loss is computed over a micro-batch's real tokens; transformers can only do that from a mask, which
# switches its packed rows off, so experts with packed rows are compared without it.
UNPACKED = [kind for kind in KINDS if kind not in ("packed", "bounded")]


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", LISTED)
def test_architecture_sp2_equals_one_process(kind: str) -> None:
    assert worst(kind, (1, 2), 2, list(KINDS), experts=False) < FP64


# Architectures differ in mechanisms (windows, caps, sinks, experts, latent attention), each of which several share: two
# meshes an architecture bring each mechanism to each mesh.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), dealt(LISTED, [(1, 3), (1, 4), (1, 8), (2, 2), (2, 3)], each=2), ids=str)
def test_architecture_other_mesh_equals_one_process(kind: str, mesh: tuple[int, int]) -> None:
    assert worst(kind, mesh, 1, list(KINDS), experts=False) < FP64


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_router_logits_sp2_equals_one_process(kind: str) -> None:
    assert worst(kind, (1, 2), 2, UNPACKED) < FP64


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), dealt(WITH_EXPERTS, [(1, 3), (1, 8), (2, 3), (2, 2)], each=1), ids=str)
def test_router_logits_other_mesh_equals_one_process(kind: str, mesh: tuple[int, int]) -> None:
    assert worst(kind, mesh, 1, UNPACKED) < FP64


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}),
        ("llama", {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 8}),
        ("phi3", {
            "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 8.0,
        }),
    ],
    ids=lambda value: value if isinstance(value, str) else value["rope_type"],
)  # fmt: skip
def test_rope_kind_sp4_equals_one_process(kind: str, rope: dict[str, object]) -> None:
    # phi3 checks its factors against hidden_size / heads, not head_dim.
    settings = {"rope_parameters": rope, "max_position_embeddings": 16, "hidden_size": 64}
    assert worst(kind, (1, 4), 1, ["plain", "packed", "left_padded"], **settings) < FP64
