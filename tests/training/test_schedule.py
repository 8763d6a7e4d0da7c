"""Rates, RoPE changes and the lengths between stages, against figures worked out by hand and by transformers."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, GptOssConfig, LlamaConfig, Ministral3Config, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ithaca.config.schema import RopeSettings, StageSettings
from ithaca.errors import ConfigError
from ithaca.training.schedule import advise_between, apply_stages, rate_at

TWO = [
    StageSettings(length=8192, steps=10, lr=1.0, warmup=0.2, final=0.1),
    StageSettings(
        length=32_768, steps=6, lr=0.5, warmup=2, schedule="linear", final=0.0, rope=RopeSettings(kind="yarn", factor=4)
    ),
]


def test_rate_of_first_stage_warms_up_from_zero_and_falls_by_cosine() -> None:
    rates = [rate_at(TWO, 0, step) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 4 / 8)) / 2)
    assert all(a > b for a, b in pairwise(rates[2:]))
    assert rate_at(TWO, 0, 10) == pytest.approx(0.1)


def test_rate_of_next_stage_starts_at_last_rate() -> None:
    rates = [rate_at(TWO, 1, step) for step in range(6)]
    assert rates[:2] == [pytest.approx(0.1 + 0.4 / 2), pytest.approx(0.5)]
    assert rates[2:] == [pytest.approx(0.5 * (1 - at / 4)) for at in range(4)]


def test_rate_without_warmup_is_constant() -> None:
    stages = [StageSettings(length=8, steps=3, lr=2.0, warmup=0, schedule="constant")]
    assert [rate_at(stages, 0, step) for step in range(3)] == [2.0] * 3


def test_jump_above_fourfold_proposes_lengths_between() -> None:
    stages = [StageSettings(length=131_072, steps=1), StageSettings(length=524_288, steps=1)]
    (warning,) = advise_between(8192, stages)
    assert "from 8,192 to 131,072" in warning
    assert "32,768" in warning
    assert advise_between(32_768, stages) == []
    assert advise_between(0, stages) == []


@pytest.mark.parametrize("before", [1, 128, 512, 1000, 5000, 8191, 8192, 131_072])
@pytest.mark.parametrize("times", [4.01, 8, 14, 16, 17, 64, 100, 1024])
def test_proposed_lengths_raise_no_warning(before: int, times: float) -> None:
    length = math.ceil(before * times)
    (warning,) = advise_between(before, [StageSettings(length=length, steps=1)])
    between = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", warning.split("stages of")[1])]
    assert advise_between(before, [StageSettings(length=each, steps=1) for each in (*between, length)]) == []
    assert 4 ** len(between) < length / before <= 4 ** (len(between) + 1)


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, **more
    )


def frequencies(config: Any) -> torch.Tensor:
    """Return the rotary frequencies that transformers computes for a config."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        size = config.hidden_size // config.num_attention_heads
        return 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_scaling_slows_lowest_frequency_by_factor(kind: str) -> None:
    stage = StageSettings(length=32_768, steps=1, rope=RopeSettings(kind=kind, factor=4))  # type: ignore[arg-type]
    plain, scaled = llama(), apply_stages(llama(), [stage], random=False)
    assert scaled.max_position_embeddings == 32_768
    assert frequencies(plain)[-1] / frequencies(scaled)[-1] == pytest.approx(4, rel=1e-4)
    if kind != "linear":
        assert frequencies(plain)[0] / frequencies(scaled)[0] == pytest.approx(1, rel=1e-4)


def test_theta_replaces_base_and_leaves_given_config() -> None:
    given = llama()
    changed = apply_stages(
        given, [StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="theta", theta=5e5))], random=False
    )
    assert changed.rope_parameters["rope_theta"] == 5e5
    assert given.rope_parameters["rope_theta"] == 10_000.0
    assert given.max_position_embeddings == 8192


def test_rope_change_holds_for_later_stages() -> None:
    config = apply_stages(llama(), [*TWO, StageSettings(length=32_768, steps=1)], random=False)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == 8192


def test_sliding_windows_keep_their_rope() -> None:
    config = apply_stages(Gemma3TextConfig(max_position_embeddings=8192), TWO, random=False)
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_stage_beyond_positions_is_refused_with_rope_to_add() -> None:
    with pytest.raises(ConfigError, match=r"stage 1 has 65,536 tokens.*8,192.*kind: yarn, factor: 8"):
        apply_stages(llama(), [StageSettings(length=65_536, steps=1)], random=False)
    assert apply_stages(llama(), [StageSettings(length=65_536, steps=1)], random=True).max_position_embeddings == 65_536


def test_too_small_factor_is_refused_with_right_factor() -> None:
    with pytest.raises(ConfigError, match=r"factor 2 over 8,192 positions reaches 16,384.*factor: 8"):
        apply_stages(
            llama(), [StageSettings(length=65_536, steps=1, rope=RopeSettings(kind="yarn", factor=2))], random=False
        )


@pytest.mark.parametrize("length", [9001, 100_000, 1_048_577])
@pytest.mark.parametrize("known", [1000, 3000, 8192])
def test_proposed_factor_is_ratio_of_transformers(length: int, known: int) -> None:
    config = llama()
    config.max_position_embeddings = known
    with pytest.raises(ConfigError) as raised:
        apply_stages(config, [StageSettings(length=length, steps=1)], random=False)
    proposed = re.search(r"factor: ([0-9.]+)}", str(raised.value))
    assert proposed is not None
    stage = StageSettings(length=length, steps=1, rope=RopeSettings(kind="yarn", factor=float(proposed[1])))
    for stages in ([stage], [stage, StageSettings(length=length, steps=1)]):
        changed = apply_stages(config, stages, random=False)
        assert changed.max_position_embeddings / known == changed.rope_parameters["factor"]
        assert changed.rope_parameters["original_max_position_embeddings"] == known


def stretched(**rope: Any) -> LlamaConfig:
    """A model that comes with a scaling; 8,192 positions were 1,024."""
    return LlamaConfig(max_position_embeddings=8192, rope_parameters={"rope_theta": 10_000.0, "factor": 8.0, **rope})


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "config",
    [
        stretched(**LLAMA3, **ORIGINAL),
        stretched(rope_type="yarn", **ORIGINAL),
        stretched(rope_type="linear"),
        Gemma3TextConfig(
            max_position_embeddings=8192,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            },
        ),
    ],
    ids=["llama3", "yarn", "linear", "linear, of some layers"],
)
@pytest.mark.parametrize("kind", ["yarn", "linear", "ntk"])
def test_scaling_replaces_own_scaling_over_original_length(config: Any, kind: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"positions end at 8,192: type stages\.0\.length=8192, or add 'stages\.0\.rope=\{kind: yarn, factor: 16\}'",
    ):
        apply_stages(config, [StageSettings(length=16_384, steps=1)], random=False)
    for factor in (2, 8):
        with pytest.raises(ConfigError, match=r"over 1,024 positions.*use factor: 16$"):
            apply_stages(
                config,
                [StageSettings(length=16_384, steps=1, rope=RopeSettings(kind=kind, factor=factor))],
                random=False,
            )
    scaled = apply_stages(
        config, [StageSettings(length=16_384, steps=1, rope=RopeSettings(kind=kind, factor=16))], random=False
    )
    rope = scaled.rope_parameters.get("full_attention", scaled.rope_parameters)
    if kind == "ntk":
        size = scaled.head_dim
        assert rope == {"rope_type": "default", "rope_theta": pytest.approx(1e4 * 16 ** (size / (size - 2)))}
    else:
        assert rope == {"rope_type": kind, "rope_theta": 1e4, "factor": 16} | (ORIGINAL if kind == "yarn" else {})


BETAS = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}


def test_yarn_parameters_stay_with_another_factor() -> None:
    config = stretched(rope_type="yarn", **ORIGINAL, **BETAS)
    to_16 = StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="yarn", factor=16))
    changed = apply_stages(config, [to_16], random=False)
    assert changed.rope_parameters == {**config.rope_parameters, "factor": 16}
    # The frequencies are those of the model's own config with nothing but the factor changed, not those without betas.
    plain = apply_stages(stretched(rope_type="yarn", **ORIGINAL), [to_16], random=False)
    assert not torch.equal(frequencies(changed), frequencies(plain))
    between = StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="linear", factor=16))
    linear = apply_stages(config, [between], random=False)
    assert linear.rope_parameters == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 16}
    assert apply_stages(config, [between, to_16], random=False).rope_parameters == changed.rope_parameters
    bounds = apply_stages(
        GptOssConfig(),
        [StageSettings(length=262_144, steps=1, rope=RopeSettings(kind="yarn", factor=64))],
        random=False,
    )
    assert bounds.rope_parameters["truncate"] is False


@pytest.mark.parametrize("more", [{}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
def test_attention_factor_stays_unless_it_follows_from_factor(more: dict[str, float]) -> None:
    stage = StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="yarn", factor=16))
    own = stretched(rope_type="yarn", attention_factor=1.0, **ORIGINAL, **more)
    assert apply_stages(own, [stage], random=False).rope_parameters["attention_factor"] == 1.0
    unsaid = stretched(rope_type="yarn", **ORIGINAL, **more)
    given = ROPE_INIT_FUNCTIONS["yarn"](unsaid, torch.device("cpu"))[1]
    said = stretched(rope_type="yarn", attention_factor=given, **ORIGINAL, **more)
    followed = apply_stages(said, [stage], random=False)
    assert followed.rope_parameters == apply_stages(unsaid, [stage], random=False).rope_parameters
    assert ROPE_INIT_FUNCTIONS["yarn"](followed, torch.device("cpu"))[1] > given


@pytest.mark.parametrize("kind", ["yarn", "linear", "ntk", "llama3"])
def test_parameters_outside_scaling_stay(kind: Any) -> None:
    stage = StageSettings(length=524_288, steps=1, rope=RopeSettings(kind=kind, factor=32))
    rope = apply_stages(Ministral3Config(), [stage], random=False).rope_parameters
    # Ministral scales its queries by how far beyond the original length they stand.
    assert rope["llama_4_scaling_beta"] == 0.1
    assert rope["original_max_position_embeddings"] == 16_384
    assert ("mscale" in rope) == (kind == "yarn")


def test_given_original_length_replaces_own_and_stays() -> None:
    config = stretched(**LLAMA3, **ORIGINAL)
    stages = [
        StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="yarn", factor=4, original=4096)),
        StageSettings(length=32_768, steps=1, rope=RopeSettings(kind="yarn", factor=8)),
    ]
    assert apply_stages(config, stages, random=False).rope_parameters["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_kind_that_config_cannot_read_is_refused(kind: Any) -> None:
    phi = Phi3Config(max_position_embeddings=4096, original_max_position_embeddings=4096, pad_token_id=0)
    for taken in (RopeSettings(kind="ntk", factor=4), RopeSettings(kind="theta", theta=5e5)):
        apply_stages(phi, [StageSettings(length=16_384, steps=1, rope=taken)], random=False)
    with pytest.raises(ConfigError, match=f"rope of kind '{kind}', which phi3 does not take.*use kind: ntk, or theta$"):
        apply_stages(phi, [StageSettings(length=16_384, steps=1, rope=RopeSettings(kind=kind, factor=4))], random=False)


def test_positions_end_with_last_scaling() -> None:
    config, short = stretched(**LLAMA3, **ORIGINAL), RopeSettings(kind="yarn", factor=2)
    first = StageSettings(length=2048, steps=1, rope=short)
    assert apply_stages(config, [first], random=False).max_position_embeddings == 2048
    with pytest.raises(ConfigError, match=r"stage 2 has 8,192 tokens.*end at 2,048.*factor: 8\}"):
        apply_stages(config, [first, StageSettings(length=8192, steps=1)], random=False)
    longer = [
        StageSettings(length=8192, steps=1, rope=RopeSettings(kind="yarn", factor=4)),
        StageSettings(length=32_768, steps=1),
    ]
    assert apply_stages(llama(), longer, random=False).max_position_embeddings == 32_768


@pytest.mark.parametrize("kind", ["ntk", "linear", "yarn"])
def test_second_scaling_uses_theta_before_first(kind: Any) -> None:
    first, second = RopeSettings(kind="ntk", factor=2), RopeSettings(kind=kind, factor=4)
    stages = [StageSettings(length=16_384, steps=1, rope=first), StageSettings(length=32_768, steps=1, rope=second)]
    both, alone = (apply_stages(llama(head_dim=8), each, random=False) for each in (stages, stages[1:]))
    assert both.rope_parameters == alone.rope_parameters
    if kind == "ntk":
        assert both.rope_parameters["rope_theta"] == pytest.approx(63_496, abs=1)
    # A theta that a stage sets is no scaling: it stays.
    stages[0] = StageSettings(length=16_384, steps=1, rope=RopeSettings(kind="ntk", factor=2, theta=5e5))
    theta = apply_stages(llama(head_dim=8), stages, random=False).rope_parameters["rope_theta"]
    assert theta == pytest.approx(5e5 * (4 ** (8 / 6) if kind == "ntk" else 1))


def test_model_without_rope_is_refused() -> None:
    change = RopeSettings(kind="theta", theta=1e6)
    with pytest.raises(ConfigError, match="gpt2 has no rotary positions: leave it out"):
        apply_stages(GPT2Config(), [StageSettings(length=512, steps=1, rope=change)], random=False)
    for rope in (None, change):
        with pytest.raises(ConfigError, match=r"gpt2 has learned positions up to 1,024.*length of at most 1024$"):
            apply_stages(GPT2Config(), [StageSettings(length=2048, steps=1, rope=rope)], random=False)
    assert apply_stages(GPT2Config(), [StageSettings(length=2048, steps=1)], random=True).n_positions == 2048
