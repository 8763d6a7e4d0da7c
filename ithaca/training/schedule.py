"""The learning rate at every step of every stage, and the RoPE changes of the stages in the model's config.

    stage 1   0 -> lr of stage 1 -> lr x final      each stage warms up from the last rate of the stage before,
    stage 2     -> lr of stage 2 -> lr x final      and its schedule falls to the share `final` of the stage's rate

A RoPE change is written into the model's config, so that the exported model has it, and holds for later stages too. A
scaling is always relative to the positions and the theta before any scaling, the model's own scaling included: a new
scaling replaces the old one, and the two never multiply.
All functions here are of plain values, so every rank and every resumed run gets the same results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ithaca.config.schema import RopeSettings, StageSettings
from ithaca.errors import ConfigError

# Models learn positions stretched by about this factor; beyond it an additional stage between pays for itself.
LARGEST_JUMP = 4
_THETA, _PART, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
# Parameters of yarn besides its factor, which another factor leaves alone. `truncate`: gpt-oss rounds no bounds.
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
# Parameters that belong to a scaling and go with it; all others are the model's own and stay.
_SCALING = ("rope_type", "type", "factor", _ORIGINAL, "max_position_embeddings", "low_freq_factor", "high_freq_factor",
            "short_factor", "long_factor", "short_mscale", "long_mscale", "alpha", *_YARN)  # fmt: skip
# Scales queries beyond the original length (Ministral 3), which must then be there whatever the kind.
_QUERIES = "llama_4_scaling_beta"
Parameters = dict[str, Any]


def rate_at(stages: Sequence[StageSettings], number: int, step: int) -> float:
    """Return the learning rate of step `step` (from 0) of stage `number` (from 0)."""
    stage = stages[number]
    start = rate_at(stages, number - 1, stages[number - 1].count) if number else 0.0
    # A warmup below 1 is a share of the stage's steps.
    warmup = min(int(stage.warmup if stage.warmup >= 1 else math.ceil(stage.warmup * stage.count)), stage.count)
    if step < warmup:
        return start + (stage.lr - start) * (step + 1) / warmup
    if stage.schedule == "constant":
        return stage.lr
    done = min(1.0, (step - warmup) / max(1, stage.count - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if stage.schedule == "cosine" else 1 - done
    return stage.lr * (stage.final + (1 - stage.final) * left)


def advise_between(trained: int, stages: Sequence[StageSettings]) -> list[str]:
    """Return a warning for every jump above fourfold, with lengths between; `trained`: the model's own length, or 0."""
    warnings = []
    for number, (before, stage) in enumerate(zip([trained, *(s.length for s in stages)], stages, strict=False), 1):
        if before and stage.length > LARGEST_JUMP * before:
            between = ", ".join(f"{length:,}" for length in _lengths_between(before, stage.length))
            warnings.append(
                f"stage {number} goes from {before:,} to {stage.length:,} tokens, more than {LARGEST_JUMP}x: stages of "
                f"{between} between them keep the loss from jumping"
            )
    return warnings


def _lengths_between(before: int, length: int) -> list[int]:
    """Return the fewest lengths without a jump above fourfold, in a geometric series; multiples of 1,024 if possible."""
    lengths = [before]
    for left in range(math.ceil(math.log(length / before, LARGEST_JUMP) - 1e-9) - 1, 0, -1):
        last = lengths[-1]
        even = round(last * (length / last) ** (1 / (left + 1)) / 1024) * 1024
        lengths.append(min(max(even, math.ceil(length / LARGEST_JUMP**left)), LARGEST_JUMP * last))
    return lengths[1:]


def apply_stages(config: Any, stages: Sequence[StageSettings], *, random: bool) -> Any:
    """Return a copy of a model's config with the RoPE changes of `stages`, the last of which is about to run.

    `random`: True if the weights were never trained, so that no length is too long for them.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    reach = known = int(getattr(text, "max_position_embeddings", 0) or 0)
    plain = {kind: _unscaled(text, values, known) for kind, values in _rotary(text).items()}
    for number, stage in enumerate(stages, 1):
        if not plain:
            _check_learned(text.model_type, stage, known, number, random=random)
        elif stage.rope is not None:
            plain = {kind: _with_settings(values, stage.rope) for kind, values in plain.items()}
            reach = _scaled_reach(stage.rope, _original(plain), stage.length, number) or max(reach, stage.length)
            _change_rope(text, stage.rope, plain)
        elif reach and stage.length > reach and not random:
            factor = _least_factor(_original(plain), stage.length)
            raise ConfigError(
                f"stage {number} has {stage.length:,} tokens, this model's positions end at {reach:,}: type "
                f"stages.{number - 1}.length={reach}, or add "
                f"'stages.{number - 1}.rope={{kind: yarn, factor: {factor}}}' (or theta, linear, ntk, llama3)"
            )
        if known:
            known = text.max_position_embeddings = max(min(known, reach), stage.length)
            reach = max(reach, known)
        if stage.rope is not None:
            _check_readable(text, stage.rope, number)
    return config


@dataclass(frozen=True, slots=True)
class Positions:
    """Number of positions that a model was trained on, number before any scaling, and the smallest RoPE theta."""

    reach: int
    original: int
    theta: float


def positions_of(text: Any) -> Positions | None:
    """Return the rotary positions of a text config; None without RoPE, or without a number of positions."""
    known, rotary = int(getattr(text, "max_position_embeddings", 0) or 0), _rotary(text)
    thetas = [values[_THETA] for values in rotary.values() if values.get(_THETA)]
    if not known or not thetas:
        return None
    return Positions(
        known, _original({kind: _unscaled(text, values, known) for kind, values in rotary.items()}), min(thetas)
    )


def _rotary(text: Any) -> dict[str, Parameters]:
    """Return the RoPE parameters of full attention by kind of layer ("" for all layers); empty without RoPE."""
    given = getattr(text, "rope_parameters", None) or {}
    if _THETA in given or not any(isinstance(value, dict) for value in given.values()):
        return {"": given} if given else {}
    # A sliding window reaches no further than before, so only full attention is stretched.
    return {kind: values for kind, values in given.items() if "full" in kind and values}


def _unscaled(text: Any, values: Parameters, known: int) -> Parameters:
    """Return RoPE parameters without their scaling, and with the number of positions before the scaling."""
    # transformers keeps no original length of a linear scaling: the present length includes the factor.
    stretch = values["factor"] if values.get("rope_type") == "linear" else 1
    original = values.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or int(known / stretch)
    own = {key: value for key, value in values.items() if key not in _SCALING and value is not None}
    return own | _yarn(values) | {_ORIGINAL: original}


def _yarn(values: Parameters) -> Parameters:
    """Return the parameters of yarn besides its factor, without an attention factor that follows from the factor."""
    if values.get("rope_type") != "yarn":
        return {}
    kept = {key: values[key] for key in _YARN if values.get(key) is not None}
    given, factor = kept.get("attention_factor"), values.get("factor")
    if given is not None and factor and math.isclose(given, _attention_factor(factor, kept), rel_tol=1e-6):
        del kept["attention_factor"]
    return kept


def _attention_factor(factor: float, kept: Parameters) -> float:
    """Return the attention factor that transformers computes for a config without one."""
    log, up, down = math.log(max(factor, 1.0)), kept.get("mscale"), kept.get("mscale_all_dim")
    return (0.1 * up * log + 1) / (0.1 * down * log + 1) if up and down else 0.1 * log + 1


def _with_settings(plain: Parameters, rope: RopeSettings) -> Parameters:
    """Return the parameters with the theta and the original length that a stage sets."""
    return plain | ({_THETA: rope.theta} if rope.theta else {}) | ({_ORIGINAL: rope.original} if rope.original else {})


def _original(plain: dict[str, Parameters]) -> int:
    return min(int(values[_ORIGINAL]) for values in plain.values())


def _least_factor(original: int, length: int) -> float:
    """Return the smallest factor that reaches `length`; transformers warns of any other factor."""
    ratio = length / max(1, original)
    return int(ratio) if ratio.is_integer() else ratio


def _check_learned(kind: str, stage: StageSettings, known: int, number: int, *, random: bool) -> None:
    """Refuse a stage beyond a table of learned positions, and RoPE for a model without rotary positions."""
    if known and stage.length > known and not random:
        raise ConfigError(
            f"stage {number} has {stage.length:,} tokens, but {kind} has learned positions up to {known:,}, which no rope "
            f"stretches: use a length of at most {known}"
        )
    if stage.rope is not None:
        raise ConfigError(f"stage {number} has rope, but {kind} has no rotary positions: leave it out")


def _scaled_reach(rope: RopeSettings, original: int, length: int, number: int) -> int | None:
    """Return the number of positions that a scaling gives, None for kinds without one; refuse too small a factor."""
    # llama3's factor slows the lowest frequencies only, and no number of positions follows from it.
    if rope.factor is None or rope.kind in ("theta", "llama3") or not original:
        return None
    if rope.factor < length / original:
        raise ConfigError(
            f"stage {number} has {length:,} tokens, but factor {rope.factor:g} over {original:,} positions reaches "
            f"{original * rope.factor:,.0f}: use factor: {_least_factor(original, length)}"
        )
    return round(original * rope.factor)


def _change_rope(text: Any, rope: RopeSettings, plain: dict[str, Parameters]) -> None:
    given = _rotary(text)
    changed = {kind: _scaled(text, given[kind], plain[kind], rope) for kind in given}
    text.rope_parameters = changed.get("", {**text.rope_parameters, **changed})


def _check_readable(text: Any, rope: RopeSettings, number: int) -> None:
    """Refuse a kind of RoPE with which the exported config could not be read again (Phi-3 refuses some kinds)."""
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
    """Return the scaled parameters as transformers names them.

    A scaling replaces an earlier one. A partial rotation stays, and the model's own parameters of yarn stay with yarn.
    """
    if rope.kind == "theta":
        return {**given, _THETA: rope.theta}
    assert rope.factor is not None
    kept = {key: value for key, value in plain.items() if key not in _SCALING}
    if _QUERIES in kept:
        kept[_ORIGINAL] = plain[_ORIGINAL]
    if rope.kind == "ntk":
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        size = int(head * kept.get(_PART, 1.0))
        return {**kept, "rope_type": "default", _THETA: kept[_THETA] * rope.factor ** (size / (size - 2))}
    scaled = {**kept, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("yarn", "llama3"):
        scaled[_ORIGINAL] = plain[_ORIGINAL]
    if rope.kind == "yarn":
        scaled |= {key: plain[key] for key in _YARN if key in plain}
    if rope.kind == "llama3":
        scaled |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return scaled
