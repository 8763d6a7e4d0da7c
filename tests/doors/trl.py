"""Habits of TRL's users: every trainer of the installed release that takes a causal language model."""

from __future__ import annotations

from functools import partial
from typing import Any

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from tests.doors.habits import Habit, exact, refused
from tests.doors.trl_scripts import chats, judged, lora, options, pairs, plain_model, run, triples, words


def dpo(sp: int | None, *, reference: bool = True, adapter: str = "", **own: Any) -> dict[str, Any]:
    def make(folder: str) -> DPOTrainer:
        model: Any = plain_model()
        if adapter:
            model = lora(model)
        return DPOTrainer(
            model=model,
            ref_model=plain_model(seed=1) if reference else None,
            args=DPOConfig(**options(sp, folder, **own)),
            train_dataset=pairs(),
            eval_dataset=pairs(4),
            processing_class=words(),
        )

    return run(make)


def kto(sp: int | None, *, reference: bool = True, adapter: str = "", **own: Any) -> dict[str, Any]:
    def make(folder: str) -> KTOTrainer:
        model: Any = plain_model()
        if adapter:
            model = lora(model)
        return KTOTrainer(
            model=model,
            ref_model=plain_model(seed=1) if reference else None,
            args=KTOConfig(**options(sp, folder, **own)),
            train_dataset=judged(),
            eval_dataset=judged(4),
            processing_class=words(),
        )

    return run(make)



def orpo(sp: int | None, *, attention: str = "sdpa", **own: Any) -> dict[str, Any]:
    def make(folder: str) -> ORPOTrainer:
        return ORPOTrainer(
            model=plain_model(attention=attention),
            args=ORPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=pairs(),
            eval_dataset=pairs(4),
            processing_class=words(),
        )

    return run(make)


def cpo(sp: int | None, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> CPOTrainer:
        return CPOTrainer(
            model=plain_model(),
            args=CPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=pairs(),
            eval_dataset=pairs(4),
            processing_class=words(),
        )

    return run(make)


def tpo(sp: int | None, **own: Any) -> dict[str, Any]:
    def make(folder: str) -> TPOTrainer:
        return TPOTrainer(
            model=plain_model(),
            args=TPOConfig(**options(sp, folder, max_length=64, **own)),
            train_dataset=triples(),
            eval_dataset=triples(4),
            processing_class=words(),
        )

    return run(make)


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

    return run(make)


HABITS: list[Habit] = [
    exact("DPOTrainer", "a reference model", dpo),
]
