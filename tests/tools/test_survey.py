"""The survey: its table is complete and true to the installed transformers, and it catches what it is there to catch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.mesh import Mesh, init_mesh
from ithaca.models.bound import NAME
from ithaca.verify.small_models.features import LISTED
from ithaca.verify.small_models.types import survey_config
from ithaca.verify.small_models.variants import features_on
from tests.ranks import run_ranks
from tools.survey.judge import FEATURES_ON, TOLERANCE, explain, is_exact, judge
from tools.survey.page import page
from tools.survey.run import Measured, bind_unchecked, bind_with_memory, measure
from tools.survey.static import CAUSES, aliases, kinds, read_source, static_cause
from tools.survey.survey import PAGE
from tools.survey.survey import TABLE as FILE

TABLE: dict[str, Any] = json.loads(FILE.read_text())
ROWS: dict[str, dict[str, Any]] = {
    kind: row["verdict"] for kind, row in TABLE["architectures"].items() if "verdict" in row
}


def test_table_has_every_causal_type() -> None:
    if TABLE["transformers"] != transformers.__version__:
        pytest.skip(f"surveyed with transformers {TABLE['transformers']}, here is {transformers.__version__}")
    assert set(ROWS) == {name for kind in kinds() for name in (kind, *aliases(kind))}


@pytest.mark.parametrize("kind", LISTED)
def test_listed_architecture_is_exact(kind: str) -> None:
    assert ROWS[kind]["verdict"] == "exact"


def test_verdict_has_a_reason() -> None:
    for kind, row in ROWS.items():
        if row["verdict"] == "exact":
            assert row["worst"] <= TOLERANCE, kind
            assert "heads" in row["features"], kind
        else:
            assert row["verdict"] == "refused", kind
            assert len(row["reason"].split()) >= 4, kind
            assert row["cause"] in CAUSES, kind


def test_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == page(TABLE)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("llama", None),
        ("gpt2", None),
        ("bloom", "alibi"),
        ("falcon", "alibi"),
        ("gptj", "own attention"),
        ("mamba", "state"),
        ("qwen3_next", "state"),
        ("deepseek_v32", "chosen keys"),
        ("llama4_text", "chunks"),
        ("bart", "decoder half"),
        ("gemma3", "other inputs"),
    ],
)
def test_source_of_a_type_gives_its_cause(kind: str, cause: str | None) -> None:
    found = static_cause(read_source(kind))
    assert (found and found[0]) == cause


def test_type_refused_by_its_source_never_runs() -> None:
    def never(world: int, kind: str, **overrides: Any) -> Measured:
        raise AssertionError(f"{kind} ran")

    assert judge(read_source("mamba"), never, (2, 4))["verdict"] == "refused"


def test_verdict_with_one_case_off_is_not_exact() -> None:
    good = {f"{case}: {part}": 1e-15 for case in ("plain", "left-padded") for part in ("loss", "logits", "gradients")}
    assert is_exact(Measured(dict(good)))
    assert not is_exact(Measured())
    assert not is_exact(Measured(dict(good), failure="packed: UnsupportedError: no"))
    assert not is_exact(Measured(good | {"left-padded: gradients": 1e-9}))
    assert not is_exact(Measured(good | {"left-padded: gradients": float("inf")}))


def test_reason_has_the_number() -> None:
    errors = {"plain: loss": 1e-15, "plain: logits": 3e-2, "plain: gradients": 2e-1}
    assert explain(read_source("llama"), Measured(errors), 2) == (
        "measured",
        "measured: plain: logits off by 3e-02 at sp=2",
    )
    cause, reason = explain(read_source("qwen2_moe"), Measured(errors), 2)
    assert cause == "window in the mask"
    assert "off by 3e-02" in reason


def test_type_with_its_window_in_the_mask_is_refused() -> None:
    for kind in ("qwen2_moe", "phimoe"):
        assert ROWS[kind]["verdict"] == "refused"
        assert ROWS[kind]["exact_without"] == "window"


def measured_on_ranks(*, drop: str | None) -> Measured:
    """A small mistral through the survey's own measuring; `drop` is left out of what reaches its attention."""

    def prepare(model: Any, mesh: Mesh) -> Any:
        bound = bind_unchecked(model, mesh)
        attention = ALL_ATTENTION_FUNCTIONS[NAME]

        def faulty(*args: Any, **kwargs: Any) -> Any:
            return attention(*args, **{key: value for key, value in kwargs.items() if key != drop})

        ALL_ATTENTION_FUNCTIONS.register(NAME, faulty)
        return bound

    return measure(survey_config("mistral"), init_mesh(sp=2, device="cpu"), prepare=prepare)


def test_survey_dropped_window_is_measured() -> None:
    for measured in run_ranks(2, measured_on_ranks, drop=None):
        assert is_exact(measured), measured
        assert "window" in measured.features
    for measured in run_ranks(2, measured_on_ranks, drop="sliding_window"):
        assert not is_exact(measured)
        assert measured.failure is None
        assert measured.errors["plain: logits"] > 1e-3


def test_type_refused_while_it_runs_has_a_cause() -> None:
    def refused(world: int, kind: str, **overrides: Any) -> Measured:
        return Measured(failure="plain: UnsupportedError: DogeAttention built an attention mask [1, 8, 12, 12]")

    row = judge(read_source("doge"), refused, (2,))
    assert row["verdict"] == "refused"
    assert row["cause"] == "bias"


def test_type_that_fails_with_its_features_on_is_refused() -> None:
    good = {f"{case}: {part}": 1e-15 for case in ("plain", "packed") for part in ("loss", "logits", "gradients")}

    def off_with(where: str) -> Any:
        def run(world: int, kind: str, *, memory: bool = False, **overrides: Any) -> Measured:
            wrong = bool(overrides) and memory is (where == "memory")
            return Measured(good | ({"plain: logits": 1e-3} if wrong else {}), ["window"])

        return run

    seen = read_source("granite_swa")
    assert features_on("granite_swa")["residual_multiplier"] == 0.5
    row = judge(seen, off_with("parity"), (2,))
    assert row["verdict"] == "refused"
    assert row["reason"] == f"{FEATURES_ON}: measured: plain: logits off by 1e-03 at sp=2"
    row = judge(seen, off_with("memory"), (2,))
    assert row["verdict"] == "exact"
    assert row["memory"] == f"{FEATURES_ON}: plain: logits off by 1e-03"


def test_exact_type_is_built_with_its_features_on() -> None:
    exact = [kind for kind in kinds() if ROWS[kind]["verdict"] == "exact"]
    off = [kind for kind in exact if not features_on(kind)]
    assert off == ["dbrx"], "every other config offers something"
    for kind in exact:
        survey_config(kind, **features_on(kind))


def test_features_have_shared_keys_and_unequal_heads() -> None:
    for kind in ("gemma4_text", "gemma4_unified_text"):
        on = survey_config(kind, **features_on(kind))
        assert "reuse" in on.kv_sharing_modes
        assert "store" in on.kv_sharing_modes
        sizes = {(each.head_dim, each.num_key_value_heads) for each in on.per_layer_config}
        assert len(sizes) == 2
        assert on.attention_k_eq_v
        assert on.use_double_wide_mlp


def with_features_on(kind: str, memory: bool) -> tuple[str | None, float]:
    prepare = bind_with_memory if memory else bind_unchecked
    config = survey_config(kind, **features_on(kind))
    measured = measure(config, init_mesh(sp=2, device="cpu"), prepare=prepare)
    return measured.failure, measured.worst


def mechanisms(kind: str) -> set[str]:
    """Return what sets a type apart: heads, windows, sinks, experts, and the settings that switch a feature on."""
    row = ROWS[kind]
    return {*row["features"].split(", "), *features_on(kind)} | ({"experts"} if row["experts"] else set())


def one_of_each() -> list[str]:
    """Return few exact types that have every mechanism between them; the survey measures all types."""
    exact = [kind for kind in kinds() if ROWS[kind]["verdict"] == "exact"]
    missing = set().union(*map(mechanisms, exact))
    chosen = []
    while missing:
        chosen.append(max(exact, key=lambda kind: len(mechanisms(kind) & missing)))
        missing -= mechanisms(chosen[-1])
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of_each())
def test_type_of_each_mechanism_is_exact_with_its_features_on(kind: str) -> None:
    memory = ROWS[kind]["memory"] == "exact"
    for failure, worst in run_ranks(2, with_features_on, kind, memory):
        assert failure is None
        assert worst <= TOLERANCE
