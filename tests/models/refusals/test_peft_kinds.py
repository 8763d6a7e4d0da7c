"""Kinds of PEFT adapters: every kind in the list is exact, and others are refused before anything runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import pytest
import torch

import ithaca
from ithaca.models.refusals.peft_kinds import EXACT
from ithaca.verify.small_models.features import small_model
from tests.doors.habits import exact
from tests.doors.trainer_scripts import peft_model, train
from tests.ranks import expect_refusal
from tests.tolerances import LOSS

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
RANKED: dict[str, Any] = {"r": 4, **TARGETS}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LORA": ("LoraConfig", {**RANKED, "use_dora": True, "modules_to_save": ["lm_head"]}),
    "IA3": ("IA3Config", {**TARGETS, "feedforward_modules": ["down_proj"]}),
    "LOHA": ("LoHaConfig", RANKED),
    "LOKR": ("LoKrConfig", RANKED),
    "OFT": ("OFTConfig", {**TARGETS, "r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {**TARGETS, "boft_block_size": 4}),
    "VERA": ("VeraConfig", {**RANKED, "target_modules": ["q_proj"]}),
    "FOURIERFT": ("FourierFTConfig", {**TARGETS, "n_frequency": 10}),
    "HRA": ("HRAConfig", RANKED),
    "LN_TUNING": ("LNTuningConfig", {**TARGETS, "target_modules": ["input_layernorm", "norm"]}),
    "RANDLORA": ("RandLoraConfig", RANKED),
    "MISS": ("MissConfig", RANKED),
    "SHIRA": ("ShiraConfig", RANKED),
    "C3A": ("C3AConfig", {**TARGETS, "block_size": 4}),
    "ROAD": ("RoadConfig", {**TARGETS, "group_size": 4}),
    "TRAINABLE_TOKENS": (
        "TrainableTokensConfig",
        {**TARGETS, "target_modules": ["embed_tokens"], "token_indices": [3, 4]},
    ),
    "WAVEFT": ("WaveFTConfig", {**TARGETS, "n_frequency": 10}),
    "GRALORA": ("GraloraConfig", {**RANKED, "gralora_k": 2}),
    "DELORA": ("DeloraConfig", RANKED),
    "HIRA": ("HiraConfig", RANKED),
    "BEFT": ("BeftConfig", TARGETS),
    "GLORA": ("GloraConfig", TARGETS),
    "DEFT": ("DeftConfig", RANKED),
    "PEANUT": ("PeanutConfig", RANKED),
    "FROD": ("FrodConfig", TARGETS),
}
# Adapters whose own code casts to fp32; the steps are those of the other habits, in fp32.
SINGLE = ("FOURIERFT", "HIRA", "BEFT", "GLORA", "DEFT", "PEANUT", "FROD")
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}, "puts tokens of its own before every row"),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}, "puts tokens of its own before every row"),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3}, "puts tokens of its own before every row"),
    "AdaLoRA": ("AdaLoraConfig", {**TARGETS, "init_r": 4, "target_r": 2, "total_step": 9}, "past its hooks"),
    "VBLoRA": ("VBLoRAConfig", {**RANKED, "num_vectors": 16, "vector_length": 8}, "weights that several layers share"),
    "PVeRA": ("PveraConfig", {**RANKED, "target_modules": ["q_proj"]}, "draws random numbers"),
    "activated LoRA": ("LoraConfig", {**RANKED, "alora_invocation_tokens": [5]}, "invocation tokens in the whole row"),
}


def _adapted(kind: str) -> Any:
    name, settings = KINDS[kind]
    threads = torch.get_num_threads()
    # FROD begins with a decomposition of the weights, which another number of threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        made = peft_model(getattr(peft, name)(**settings))
    finally:
        torch.set_num_threads(threads)
    return made.float() if kind in SINGLE else made


def _run(sp: int | None, *, kind: str) -> dict[str, Any]:
    rate = 1e-3 if kind == "RANDLORA" else 1e-2
    return train(sp, model=partial(_adapted, kind), max_steps=2, learning_rate=rate)


@pytest.mark.parametrize("kind", [k if k == "IA3" else pytest.param(k, marks=pytest.mark.slow) for k in EXACT])
def test_adapter_of_each_exact_kind_trains_as_on_one_process(kind: str) -> None:
    single = {"within": LOSS} if kind in SINGLE else {}
    exact("PEFT", kind, partial(_run, kind=kind), **single).check()


def _refuse(kind: str) -> None:
    name, settings, _ = REFUSED[kind]
    torch.manual_seed(0)
    made: Any = peft.get_peft_model(small_model("llama"), getattr(peft, name)(**{"task_type": "CAUSAL_LM", **settings}))
    ithaca.parallelize(made, ithaca.init_mesh(sp=2))


@pytest.mark.parametrize("kind", REFUSED)
def test_adapter_of_inexact_kind_is_refused(kind: str) -> None:
    expect_refusal(2, _refuse, kind, error="UnsupportedError", match=REFUSED[kind][2])
