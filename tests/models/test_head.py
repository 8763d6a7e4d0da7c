"""Which heads the loss may read by their weight alone."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, get_peft_model

from ithaca.models.head import head_is_plain
from ithaca.proof.small import small_model


def test_a_head_with_an_adapter_is_more_than_its_weight() -> None:
    plain = small_model("llama")
    assert head_is_plain(plain)
    # New, the adapter adds nothing: the logits alone do not tell.
    adapted: Any = get_peft_model(small_model("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    assert not head_is_plain(adapted.get_base_model())
