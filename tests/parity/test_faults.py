"""Every parity property, shown to fail: a fault is planted and the comparison must see it."""

from __future__ import annotations

import pytest

from tests.faults import FAULTS
from tests.parity.cases import worst
from tests.tolerances import FAULT, FP64

DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    "max_position_embeddings": 8,
}
# Kinds whose rows differ in what is shown.
ROWS = {"bounded": 3, "padded_shards": 2}
# fault -> architecture, mesh, kinds of batch, settings
WHERE: dict[str, tuple[str, tuple[int, int], list[str], dict[str, object]]] = {
    "positions_not_offset": ("llama", (1, 2), ["plain"], {}),
    "document_leak": ("llama", (1, 2), ["packed"], {}),
    "padding_attended": ("llama", (1, 2), ["left_padded"], {}),
    "labels_shifted_after_cutting": ("llama", (1, 2), ["plain"], {}),
    "mean_of_means": ("llama", (1, 2), ["plain"], {}),
    "gradients_times_world": ("llama", (2, 2), ["plain"], {}),
    "dropped_head": ("llama", (1, 2), ["plain"], {}),
    "kv_gradients_of_one_copy": ("llama", (1, 4), ["plain"], {}),
    "window_dropped": ("mistral", (1, 2), ["plain"], {}),
    "softcap_dropped": ("gemma2", (1, 2), ["plain"], {}),
    "not_causal": ("llama", (1, 2), ["plain"], {}),
    "sinks_not_sliced": ("gpt_oss", (1, 2), ["plain"], {}),
    "sinks_without_gradient": ("gpt_oss", (1, 2), ["plain"], {}),
    "rope_sees_the_shard": ("llama", (1, 2), ["plain"], DYNAMIC),
    "auxiliary_loss_of_the_shard": ("mixtral", (1, 2), ["plain"], {}),
    "nan_on_masked_shards": ("llama", (1, 4), ["learned_at_the_end"], {}),
    "joined_on_shard_bounds": ("llama", (1, 2), ["bounded"], {}),
    "bounds_of_the_first_row": ("llama", (1, 2), ["bounded"], {}),
    "single_tokens_joined": ("llama", (1, 2), ["bounded"], {}),
    "documents_end_after_two_shards": ("llama", (1, 3), ["plain"], {}),
    "padded_shards_attended": ("llama", (1, 2), ["padded_shards"], {}),
    "targets_over_shard_bounds": ("llama", (1, 2), ["bounded"], {}),
}


def test_faults_have_a_case_each() -> None:
    assert WHERE.keys() == FAULTS.keys()


@pytest.mark.few(6)
@pytest.mark.parametrize("fault", WHERE)
def test_parity_planted_fault_fails(fault: str) -> None:
    kind, mesh, kinds, settings = WHERE[fault]
    assert worst(kind, mesh, ROWS.get(kinds[0], 1), kinds, **settings) < FP64, (
        "the comparison must hold before a fault is planted"
    )
    error = worst(kind, mesh, ROWS.get(kinds[0], 1), kinds, fault=fault, **settings)
    assert not error < FAULT, f"{fault} changed nothing that the comparison sees: {error}"
