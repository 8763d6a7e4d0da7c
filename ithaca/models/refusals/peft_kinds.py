"""Kinds of PEFT adapters: a list of those that are exact over shards, and the reasons to refuse others.

An adapter that works on each token alone, with weights of its own in each layer, is as exact as the layer. Refused are
adapters that put tokens before every row (each rank would put them before its shard), read the whole row, bypass the
model's forward, or share weights between layers; and kinds that were never compared with one process.
Compared on peft 0.21 (tests/models/refusals/test_peft_kinds.py).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ithaca.errors import UnsupportedError

EXACT = (
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "LN_TUNING", "RANDLORA", "MISS", "SHIRA",
    "C3A", "ROAD", "TRAINABLE_TOKENS", "WAVEFT", "GRALORA", "DELORA", "HIRA", "BEFT", "GLORA", "DEFT", "PEANUT", "FROD",
)  # fmt: skip
_SHARED = "has weights that several layers share, and FSDP2 shards each layer by itself"
_REFUSED = {
    "ADALORA": "calls the model's forward past its hooks, so that whole batches would not be split",
    "ADAPTION_PROMPT": "attends to a prompt of its own past the attention that is split over ranks",
    "XLORA": "weighs its adapters by a first pass of its own, which would see a shard",
    "POLY": "reads task_ids, which no sharded batch has",
    "OSF": "has hooks on its gradients, which FSDP2 never calls",
    "PVERA": "draws random numbers for each token, on every shard the same ones",
    "VBLORA": _SHARED,
    "LILY": _SHARED,
    "TINYLORA": _SHARED,
    "UNILORA": _SHARED,
}
# Settings of LoRA that read more than one token, or add a loss of their own.
_LORA = {
    "alora_invocation_tokens": "looks for the invocation tokens in the whole row, a rank has a shard of it",
    "monteclora_config": "adds a loss of its own over weights, which are split over ranks",
    "velora_config": "groups tokens for its gradients, on every rank those of its shard",
    "arrow_config": "was not compared with one process",
}
_USE = "use LoRA, or one of the other kinds that docs/migration.md lists"


def check_adapters(model: nn.Module, *, allow_untested: bool) -> None:
    """Refuse a PEFT adapter that would not be exact, however it was added."""
    configs = getattr(model, "peft_config", None) or {}
    for adapter in configs.values() if isinstance(configs, dict) else ():
        reason = _reason(adapter, allow_untested)
        if reason is not None:
            raise UnsupportedError(f"the adapter's {type(adapter).__name__} {reason}: {_USE}")


def _reason(adapter: Any, allow_untested: bool) -> str | None:
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if getattr(adapter, "is_prompt_learning", False):
        return "puts tokens of its own before every row, which every rank would put before its shard"
    if kind in _REFUSED:
        return _REFUSED[kind]
    if kind not in EXACT:
        return None if allow_untested else "was not compared with one process (allow_untested=True lets it through)"
    settings = _LORA if kind == "LORA" else {}
    found = next((name for name in settings if getattr(adapter, name, None)), None)
    return None if found is None else f"with {found} {settings[found]}"
