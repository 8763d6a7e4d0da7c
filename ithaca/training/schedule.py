"""Stages of context length: the learning rate at every step, and the positions that a stage's model can tell apart.

A stage's rate rises from where the stage before it ended (the first: from zero) to its own peak, and falls again. Its
RoPE change is written into the model's config, so that the exported model carries it, and holds for later stages too.
A scaling is always over the positions and the theta from before any scaling, the model's own included: another one
replaces it, and the two never multiply.
All functions here are of plain values: every rank and every resumed run gets the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ithaca.config.schema import RopeSettings, StageSettings
from ithaca.errors import ConfigError

# Models follow a stretch of about this factor; beyond it a stage between pays for itself.
LARGEST_JUMP = 4
_THETA, _PART, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
# How a model's yarn is done, beside its factor: another factor of yarn leaves these alone. gpt-oss rounds no bounds.
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
# What belongs to a scaling and goes with it; all else in a set of parameters is the model's own and stays.
_SCALING = ("rope_type", "type", "factor", _ORIGINAL, "max_position_embeddings", "low_freq_factor", "high_freq_factor",
            "short_factor", "long_factor", "short_mscale", "long_mscale", "alpha", *_YARN)  # fmt: skip
# Scales queries beyond the original length (Ministral 3), which must then be there whatever the kind.
_QUERIES = "llama_4_scaling_beta"
Parameters = dict[str, Any]


def rate_at(stages: Sequence[StageSettings], number: int, step: int) -> float:
    """The learning rate of step `step` (from 0) of stage `number` (from 0)."""
    stage = stages[number]
    start = rate_at(stages, number - 1, stages[number - 1].count) if number else 0.0
    warm = _warm_steps(stage)
    if step < warm:
        return start + (stage.lr - start) * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, stage.count - warm))
    return stage.lr * _share(stage, done)


def _warm_steps(stage: StageSettings) -> int:
    steps = stage.warmup if stage.warmup >= 1 else math.ceil(stage.warmup * stage.count)
    return min(int(steps), stage.count)


def _share(stage: StageSettings, done: float) -> float:
    """What is left of the peak when a share `done` of the fall is behind."""
    if stage.schedule == "constant":
        return 1.0
    left = (1 + math.cos(math.pi * done)) / 2 if stage.schedule == "cosine" else 1 - done
    return stage.final + (1 - stage.final) * left


def advise_between(trained: int, stages: Sequence[StageSettings]) -> list[str]:
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
    """The fewest lengths, evenly apart by ratio, that make no step larger than fourfold; multiples of 1,024 where some do."""
    lengths = [before]
    for left in range(math.ceil(math.log(length / before, LARGEST_JUMP) - 1e-9) - 1, 0, -1):
        last = lengths[-1]
        even = round(last * (length / last) ** (1 / (left + 1)) / 1024) * 1024
        lengths.append(min(max(even, math.ceil(length / LARGEST_JUMP**left)), LARGEST_JUMP * last))
    return lengths[1:]


def apply_stages(config: Any, stages: Sequence[StageSettings], *, random: bool) -> Any:
    """A copy of a model's config with the RoPE changes of `stages`, the last of which is about to run.

    `random`: the weights were never trained, so there is no length that they know.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    reach = known = int(getattr(text, "max_position_embeddings", 0) or 0)
    plain = {kind: _unscaled(text, values, known) for kind, values in _rotary(text).items()}
    for number, stage in enumerate(stages, 1):
        if not plain:
            _check_learned(text.model_type, stage, known, number, random=random)
        elif stage.rope is not None:
            plain = {kind: _renewed(values, stage.rope) for kind, values in plain.items()}
            reach = _check_reach(stage.rope, _original(plain), stage.length, number) or max(reach, stage.length)
            _change_rope(text, stage.rope, plain)
        elif reach and stage.length > reach and not random:
            raise ConfigError(
                f"stage {number} has {stage.length:,} tokens, this model's positions end at {reach:,}: add to the stage "
                f"`rope: {{kind: yarn, factor: {_factor(_original(plain), stage.length)}}}` (or theta, linear, ntk, llama3), "
                f"or shorten it to {reach:,} tokens"
            )
        if known:
            known = text.max_position_embeddings = max(min(known, reach), stage.length)
            reach = max(reach, known)
        if stage.rope is not None:
            _check_readable(text, stage.rope, number)
    return config


@dataclass(frozen=True, slots=True)
class Positions:
    """What a model knows of positions: how far they reach, how far before any scaling, and its smallest theta."""

    reach: int
    original: int
    theta: float


def positions_of(text: Any) -> Positions | None:
    """The rotary positions of a text config; None where it has none, or does not say how far they reach."""
    known, rotary = int(getattr(text, "max_position_embeddings", 0) or 0), _rotary(text)
    thetas = [values[_THETA] for values in rotary.values() if values.get(_THETA)]
    if not known or not thetas:
        return None
    return Positions(
        known, _original({kind: _unscaled(text, values, known) for kind, values in rotary.items()}), min(thetas)
    )


def _rotary(text: Any) -> dict[str, Parameters]:
    """What full attention rotates by, for each kind of its layers ("": one set for all); empty without rotation."""
    given = getattr(text, "rope_parameters", None) or {}
    if _THETA in given or not any(isinstance(value, dict) for value in given.values()):
        return {"": given} if given else {}
    # Windows reach no further than before, so only full attention is stretched.
    return {kind: values for kind, values in given.items() if "full" in kind and values}


def _unscaled(text: Any, values: Parameters, known: int) -> Parameters:
    """A set of parameters from before the scaling it has, and how many positions there were then."""
    # transformers keeps no original of a linear scaling: what the model has now is what it was stretched to.
    stretch = values["factor"] if values.get("rope_type") == "linear" else 1
    original = values.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or int(known / stretch)
    own = {key: value for key, value in values.items() if key not in _SCALING and value is not None}
    return own | _yarn(values) | {_ORIGINAL: original}


def _yarn(values: Parameters) -> Parameters:
    """How a set of parameters does yarn. An attention factor that only says what its factor gives is left to the next."""
    if values.get("rope_type") != "yarn":
        return {}
    kept = {key: values[key] for key in _YARN if values.get(key) is not None}
    given, factor = kept.get("attention_factor"), values.get("factor")
    if given is not None and factor and math.isclose(given, _attention_factor(factor, kept), rel_tol=1e-6):
        del kept["attention_factor"]
    return kept


def _attention_factor(factor: float, kept: Parameters) -> float:
    """What transformers takes where a config has none."""
    log, up, down = math.log(max(factor, 1.0)), kept.get("mscale"), kept.get("mscale_all_dim")
    return (0.1 * up * log + 1) / (0.1 * down * log + 1) if up and down else 0.1 * log + 1


def _renewed(plain: Parameters, rope: RopeSettings) -> Parameters:
    """The same with what a stage sets itself, from here on."""
    return plain | ({_THETA: rope.theta} if rope.theta else {}) | ({_ORIGINAL: rope.original} if rope.original else {})


def _original(plain: dict[str, Parameters]) -> int:
    return min(int(values[_ORIGINAL]) for values in plain.values())


def _factor(original: int, length: int) -> float:
    """The least that reaches `length`: also the one that transformers, which compares them, has no warning for."""
    ratio = length / max(1, original)
    return int(ratio) if ratio.is_integer() else ratio


def _check_learned(kind: str, stage: StageSettings, known: int, number: int, *, random: bool) -> None:
    """Positions that are no rotation are a table, and end where it does."""
    if known and stage.length > known and not random:
        raise ConfigError(
            f"stage {number} has {stage.length:,} tokens, but {kind} has learned positions up to {known:,}, which no rope "
            f"stretches: use a length of at most {known}"
        )
    if stage.rope is not None:
        raise ConfigError(f"stage {number} has rope, but {kind} has no rotary positions: leave it out")


def _check_reach(rope: RopeSettings, original: int, length: int, number: int) -> int | None:
    """How many positions a scaling gives; None where its kind does not say."""
    # llama3's factor slows the lowest frequencies only and says nothing of how far positions reach.
    if rope.factor is None or rope.kind in ("theta", "llama3") or not original:
        return None
    if rope.factor < length / original:
        raise ConfigError(
            f"stage {number} has {length:,} tokens, but factor {rope.factor:g} over {original:,} positions reaches "
            f"{original * rope.factor:,.0f}: use factor: {_factor(original, length)}"
        )
    return round(original * rope.factor)


def _change_rope(text: Any, rope: RopeSettings, plain: dict[str, Parameters]) -> None:
    given = _rotary(text)
    changed = {kind: _scaled(text, given[kind], plain[kind], rope) for kind in given}
    text.rope_parameters = changed.get("", {**text.rope_parameters, **changed})


def _check_readable(text: Any, rope: RopeSettings, number: int) -> None:
    """Some configs (Phi-3's) refuse a kind only when they are read, which would be after the stage."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        type(text).from_dict(text.to_dict())
    except (KeyError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise ConfigError(
            f"stage {number} has rope of kind {rope.kind!r}, which {text.model_type} does not take ({reason}): use "
            "kind: ntk, or theta"
        ) from None


def _scaled(text: Any, given: Parameters, plain: Parameters, rope: RopeSettings) -> Parameters:
    """Parameters as transformers names them; an earlier scaling is replaced, a partial rotation stays, and so does how
    the model's own yarn is done where this is yarn."""
    if rope.kind == "theta":
        return {**given, _THETA: rope.theta}
    assert rope.factor is not None
    kept = {key: value for key, value in plain.items() if key not in _SCALING}
    if _QUERIES in kept:
        kept[_ORIGINAL] = plain[_ORIGINAL]
    if rope.kind == "ntk":
        size = _rotated(text, kept)
        return {**kept, "rope_type": "default", _THETA: kept[_THETA] * rope.factor ** (size / (size - 2))}
    scaled = {**kept, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("yarn", "llama3"):
        scaled[_ORIGINAL] = plain[_ORIGINAL]
    if rope.kind == "yarn":
        scaled |= {key: plain[key] for key in _YARN if key in plain}
    if rope.kind == "llama3":
        scaled |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return scaled


def _rotated(text: Any, kept: Parameters) -> int:
    """How many numbers of a head are rotated."""
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size * kept.get(_PART, 1.0))
