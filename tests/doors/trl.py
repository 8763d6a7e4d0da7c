"""Habits of TRL's users: every trainer of the installed release that takes a causal language model."""

from __future__ import annotations

from functools import partial
from typing import Any

from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from tests.doors.habits import Habit, absent, exact, refused
from tests.doors.trl_scripts import chats, from_file, judged, lora, options, pairs, plain_model, run, triples, words
from tests.integrations.sft import KINDS, dataset
from tests.tolerances import LOSS


def dpo(
    sp: int | None, *, reference: bool = True, adapter: bool = False, filed: bool = False, **own: Any
) -> dict[str, Any]:
    def make(folder: str) -> DPOTrainer:
        model: Any = lora(plain_model()) if adapter else plain_model()
        return DPOTrainer(
            model=model,
            ref_model=plain_model(seed=1) if reference else None,
            args=DPOConfig(**options(sp, folder, **own)),
            train_dataset=from_file(pairs(), folder, "train", sp) if filed else pairs(),
            eval_dataset=from_file(pairs(4), folder, "eval", sp) if filed else pairs(4),
            processing_class=words(),
        )

    return run(sp, make)


def kto(sp: int | None, *, reference: bool = True, adapter: bool = False, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> KTOTrainer:
        model: Any = lora(plain_model()) if adapter else plain_model()
        return KTOTrainer(
            model=model,
            ref_model=plain_model(seed=1) if reference else None,
            args=KTOConfig(**options(sp, folder, **own)),
            train_dataset=judged(),
            eval_dataset=judged(4),
            processing_class=words(),
        )

    return run(sp, make)


def orpo(sp: int | None, *, attention: str = "sdpa", **own: Any) -> dict[str, Any]:
    def make(folder: str) -> ORPOTrainer:
        return ORPOTrainer(
            model=plain_model(attention=attention),
            args=ORPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=pairs(),
            eval_dataset=pairs(4),
            processing_class=words(),
        )

    return run(sp, make)


def cpo(sp: int | None, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> CPOTrainer:
        return CPOTrainer(
            model=plain_model(),
            args=CPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=pairs(),
            eval_dataset=pairs(4),
            processing_class=words(),
        )

    return run(sp, make)


def tpo(sp: int | None, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> TPOTrainer:
        return TPOTrainer(
            model=plain_model(),
            args=TPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=triples(),
            eval_dataset=triples(4),
            processing_class=words(),
        )

    return run(sp, make)


def gkd(sp: int | None, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> GKDTrainer:
        return GKDTrainer(
            model=plain_model(),
            teacher_model=plain_model(seed=1),
            args=GKDConfig(**options(sp, folder, max_length=64, max_new_tokens=4, **own)),
            train_dataset=chats(),
            eval_dataset=chats(4),
            processing_class=words(),
        )

    return run(sp, make)


def sft(sp: int | None, *, kind: str = "plain", **own: Any) -> dict[str, Any]:
    def make(folder: str) -> SFTTrainer:
        return SFTTrainer(
            model=plain_model(),
            args=SFTConfig(**options(sp, folder, **KINDS[kind] | own)),
            train_dataset=dataset(kind, 12),
            eval_dataset=dataset(kind, 4),
            processing_class=words(),
        )

    return run(sp, make)


def dpo_of_groups(sp: int | None) -> dict[str, Any]:
    """Two groups of two ranks have half of the rows each."""
    rows = 4 if sp is None else 2
    return dpo(sp and 2, per_device_train_batch_size=rows, per_device_eval_batch_size=rows)


def no_reward(completions: list[str], **rest: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def policy(sp: int | None, *, kind: Any, arguments: Any, **own: Any) -> dict[str, Any]:
    """GRPO and RLOO: generate, judge, learn."""

    def make(folder: str) -> Any:
        return kind(
            model=plain_model(),
            reward_funcs=no_reward,
            args=arguments(**options(sp, folder, num_generations=2, max_completion_length=4, **own)),
            train_dataset=pairs().select_columns(["prompt"]),
            processing_class=words(),
        )

    return run(sp, make, evaluate=False)


def _exact(door: str, name: str, script: Any, note: str = "", slow: bool = True, **own: Any) -> Habit:
    return exact(door, name, partial(script, **own) if own else script, note=note, slow=slow)


_LATER = r"is not supported yet: under UlyssesConfig use one of TRL's SFTTrainer"
_NOT_YET = "not supported yet; refused when the trainer is made"
_GENERATES = "generates text with its own engines and loops; refused by name like GRPOTrainer"
_LOSSES = ("hinge", "ipo", "robust", "bco_pair", "apo_zero", "apo_down", "sigmoid_norm")
HABITS: list[Habit] = [
    *(_exact("SFTTrainer", name, sft, kind=kind) for kind, name in {
        "packed": "`packing=True`", "padding_free": "`padding_free=True`", "assistant_only": "`assistant_only_loss=True`",
        "completion_only": "prompts and completions, the loss of completions",
    }.items()),
    *(_exact("SFTTrainer", f'`loss_type="{name}"`', sft, loss_type=name) for name in ("dft", "chunked_nll")),
    _exact("DPOTrainer", "a reference model", dpo, slow=False),
    exact("DPOTrainer", "two groups of ranks", dpo_of_groups, ranks=4, within=LOSS, slow=True),
    *(_exact("DPOTrainer", f'`loss_type="{name}"`', dpo, loss_type=[name]) for name in _LOSSES),
    _exact(
        "DPOTrainer", "several losses with weights", dpo, loss_type=["sigmoid", "bco_pair", "sft"],
        loss_weights=[0.8, 0.2, 1.0],
    ),
    _exact("DPOTrainer", "a reference model that follows", dpo, sync_ref_model=True, ref_model_sync_steps=1),
    _exact("DPOTrainer", "LoRA, the reference is the model without it", dpo, reference=False, adapter=True),
    _exact("DPOTrainer", "`precompute_ref_log_probs`, data from files", dpo, precompute_ref_log_probs=True, filed=True),
    refused(
        "DPOTrainer", "`precompute_ref_log_probs` with an adapter",
        partial(dpo, reference=False, adapter=True, precompute_ref_log_probs=True),
        says="with an adapter runs the model before it is split", note="leave `precompute_ref_log_probs` False", slow=True,
    ),
    refused(
        "DPOTrainer", "`precompute_ref_log_probs`, data in memory", partial(dpo, precompute_ref_log_probs=True),
        says="with a dataset in memory", note="load the data from files", slow=True,
    ),
    _exact("KTOTrainer", "a reference model", kto),
    _exact("KTOTrainer", "a reference model that follows", kto, sync_ref_model=True, ref_model_sync_steps=1),
    _exact("KTOTrainer", '`loss_type="apo_zero_unpaired"`', kto, loss_type="apo_zero_unpaired"),
    _exact("KTOTrainer", "LoRA, the reference is the model without it", kto, reference=False, adapter=True),
    _exact("ORPOTrainer", "train and evaluate", orpo, note="the means of ORPO include padding, as in one process"),
    _exact("ORPOTrainer", "the same with eager attention", orpo, attention="eager"),
    _exact("CPOTrainer", "train and evaluate", cpo),
    _exact("CPOTrainer", "SimPO", cpo, loss_type="simpo", cpo_alpha=0.0),
    _exact("TPOTrainer", "train and evaluate", tpo),
    _exact("GKDTrainer", "a teacher, on given answers", gkd, lmbda=0.0),
    _exact("GKDTrainer", "a teacher, on generated answers", gkd,
            note="exact with one sequence group; refused with several", lmbda=1.0),
    refused(
        "GRPOTrainer", "train, with `beta` or without", partial(policy, kind=GRPOTrainer, arguments=GRPOConfig),
        says=_LATER, note=_NOT_YET, slow=True,
    ),
    refused(
        "RLOOTrainer", "train", partial(policy, kind=RLOOTrainer, arguments=RLOOConfig, beta=0.0),
        says=_LATER, note=_NOT_YET, slow=True,
    ),
    absent("RewardTrainer", "train", "its model is a classifier; refused by name like GRPOTrainer"),
    *(
        absent(name, "train", _GENERATES)
        for name in (
            "A2POTrainer", "AsyncDistillationTrainer", "AsyncGRPOTrainer", "DistillationTrainer", "GMPOTrainer", "GOLDTrainer",
            "IWOPDTrainer", "OnlineDPOTrainer", "SDFTTrainer", "SDPOTrainer", "ServerDistillationTrainer",
        )
    ),
]  # fmt: skip
