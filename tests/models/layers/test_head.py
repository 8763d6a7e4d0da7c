"""Heads whose weight the tiled loss reads directly."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.bound import binding_of
from ithaca.models.layers.head import head_spec
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks
from tests.tolerances import EVAL_LOSS


def test_head_spec_head_with_adapter_is_none() -> None:
    plain = small_model("llama")
    assert head_spec(plain) is not None
    # New, the adapter adds nothing: the logits alone do not tell.
    adapted: Any = get_peft_model(small_model("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    assert head_spec(adapted.get_base_model()) is None


def _softcap_taken_off(kind: str, name: str, value: float | None) -> tuple[float, float, float]:
    mesh, batch = init_mesh(sp=1), small_batch(1, 12)
    alone, parallel = (small_model(kind, dtype=torch.float32) for _ in range(2))
    parallelize(parallel, mesh)
    before = float(causal_loss(parallel, batch, mesh))
    for model in (alone, parallel):
        setattr(model.config, name, value)
    return before, float(causal_loss(parallel, batch, mesh)), float(alone(**batch).loss)


@pytest.mark.parametrize(
    ("kind", "name", "value"), [("gemma2", "final_logit_softcapping", None), ("granite", "logits_scaling", 7.0)]
)
def test_causal_loss_changed_scale_or_cap_is_followed(kind: str, name: str, value: float | None) -> None:
    [(before, after, expected)] = run_ranks(1, _softcap_taken_off, kind, name, value)
    assert after == pytest.approx(expected, abs=EVAL_LOSS)
    assert abs(before - after) > 1e-3, "the change must do something"


def _dropped_loss() -> tuple[bool, int]:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("mixtral"), mesh)
    loss = causal_loss(model, small_batch(1, 12), mesh)
    node = weakref.ref(loss)
    assert loss.requires_grad
    del loss
    return node() is None, len(binding_of(model).router_logits)


def test_dropped_loss_frees_router_logits() -> None:
    assert run_ranks(1, _dropped_loss) == [(True, 0)]
