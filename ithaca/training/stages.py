"""Stages of context length: the learning rate at every step, and the positions that a stage's model can tell apart.

A stage's rate rises from where the stage before it ended (the first: from zero) to its own peak, and falls again. Its
RoPE change is written into the model's config, so that the exported model carries it, and holds for later stages too.
All functions here are of plain values: every rank and every resumed run gets the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from ithaca.config import Rope, Stage
from ithaca.errors import ConfigError

# Models follow a stretch of about this factor; beyond it a stage between pays for itself.
LARGEST_JUMP = 4


def rate_at(stages: Sequence[Stage], number: int, step: int) -> float:
    """The learning rate of step `step` (from 0) of stage `number` (from 0)."""
    stage = stages[number]
    start = rate_at(stages, number - 1, stages[number - 1].count) if number else 0.0
    warm = _warm_steps(stage)
    if step < warm:
        return start + (stage.lr - start) * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, stage.count - warm))
    return stage.lr * _share(stage, done)


def _warm_steps(stage: Stage) -> int:
    steps = stage.warmup if stage.warmup >= 1 else math.ceil(stage.warmup * stage.count)
    return min(int(steps), stage.count)


def _share(stage: Stage, done: float) -> float:
    """What is left of the peak when a share `done` of the fall is behind."""
    if stage.schedule == "constant":
        return 1.0
    left = (1 + math.cos(math.pi * done)) / 2 if stage.schedule == "cosine" else 1 - done
    return stage.final + (1 - stage.final) * left


def advise_between(trained: int, stages: Sequence[Stage]) -> list[str]:
    """A warning for every jump above fourfold, with the lengths between; `trained` is what the model starts from."""
    warnings = []
    for number, (before, stage) in enumerate(zip([trained, *(s.length for s in stages)], stages, strict=False), 1):
        if before and stage.length > LARGEST_JUMP * before:
            between = _between(before, stage.length)
            warnings.append(
                f"stage {number} goes from {before:,} to {stage.length:,} tokens, more than {LARGEST_JUMP}x: stages of "
                f"{', '.join(f'{length:,}' for length in between)} between them keep the loss from jumping"
            )
    return warnings


def _between(before: int, length: int) -> list[int]:
    """The fewest lengths, evenly apart by ratio, that make no step larger than fourfold; multiples of 1,024."""
    jumps = math.ceil(math.log(length / before, LARGEST_JUMP) - 1e-9)
    ratio = (length / before) ** (1 / jumps)
    return [max(1, round(before * ratio**at / 1024)) * 1024 for at in range(1, jumps)]


def apply_stages(config: Any, stages: Sequence[Stage], *, random: bool) -> Any:
    """A copy of a model's config with the RoPE changes of `stages`, the last of which is about to run.

    `random`: the weights were never trained, so there is no length that they know.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    trained = int(getattr(text, "max_position_embeddings", 0) or 0)
    for number, stage in enumerate(stages, 1):
        if stage.rope is not None:
            _check_reach(stage.rope, trained, stage.length, number)
            _change_rope(text, stage.rope, trained, number)
        known = int(getattr(text, "max_position_embeddings", 0) or 0)
        if stage.length > known and stage.rope is None and not random:
            factor = _factor(trained, stage.length)
            raise ConfigError(
                f"stage {number} has {stage.length:,} tokens, this model's positions end at {known:,}: add to the stage "
                f"`rope: {{kind: yarn, factor: {factor}}}` (or theta, linear, ntk, llama3)"
            )
        if known:
            text.max_position_embeddings = max(known, stage.length)
    return config


def _factor(trained: int, length: int) -> int:
    return 2 ** math.ceil(math.log2(length / max(1, trained)))


def _check_reach(rope: Rope, trained: int, length: int, number: int) -> None:
    # llama3's factor slows the lowest frequencies only and says nothing of how far positions reach.
    if rope.factor is None or rope.kind == "llama3" or not trained:
        return
    original = rope.original or trained
    if original * rope.factor < length:
        raise ConfigError(
            f"stage {number} has {length:,} tokens, but factor {rope.factor:g} over {original:,} positions reaches "
            f"{original * rope.factor:,.0f}: use factor: {_factor(original, length)}"
        )


def _change_rope(text: Any, rope: Rope, trained: int, number: int) -> None:
    given = getattr(text, "rope_parameters", None)
    if not given:
        raise ConfigError(f"stage {number} has rope, but {text.model_type} has no rotary positions: leave it out")
    if "rope_theta" not in given and any(isinstance(value, dict) for value in given.values()):
        # One set for each kind of layer: windows reach no further than before, so only full attention is stretched.
        changed = {
            kind: _scaled(text, values, rope, trained) if "full" in kind else values for kind, values in given.items()
        }
    else:
        changed = _scaled(text, given, rope, trained)
    text.rope_parameters = changed


def _scaled(text: Any, given: dict[str, Any], rope: Rope, trained: int) -> dict[str, Any]:
    """Parameters as transformers names them; an earlier scaling is replaced, a partial rotation stays."""
    kept = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if given.get(key) is not None}
    theta = rope.theta or kept["rope_theta"]
    if rope.kind == "theta":
        return {**given, "rope_theta": theta}
    assert rope.factor is not None
    original = rope.original or given.get("original_max_position_embeddings") or trained
    if rope.kind == "ntk":
        size = _rotated(text, kept)
        return {**kept, "rope_type": "default", "rope_theta": theta * rope.factor ** (size / (size - 2))}
    scaled = {**kept, "rope_theta": theta, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("yarn", "llama3"):
        scaled["original_max_position_embeddings"] = original
    if rope.kind == "llama3":
        scaled |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return scaled


def _rotated(text: Any, kept: dict[str, Any]) -> int:
    """How many numbers of a head are rotated."""
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size * kept.get("partial_rotary_factor", 1.0))
