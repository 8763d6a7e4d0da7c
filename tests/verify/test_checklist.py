"""Checks of `ithaca verify`: right on every listed architecture; each planted fault turns its own lines off."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from ithaca.mesh import init_mesh
from ithaca.verify.batches import from_rows, made_up
from ithaca.verify.checklist import verify
from ithaca.verify.checks import CHECKS, Line
from ithaca.verify.gpus import verify_devices
from ithaca.verify.small_models.features import VOCABULARY, small_model
from ithaca.verify.tolerances import FP64
from tests import faults
from tests.pairs import dealt
from tests.ranks import RankError, run_ranks
from tests.tolerances import FP64 as TOLERANCE

LENGTH = 47
# None, a window, caps and norms after, sinks, experts and their loss, latent attention, biases and a plain MLP, one norm
# for attention and MLP, factors of long positions.
MECHANISMS = ("llama", "mistral", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "starcoder2", "cohere2", "phi3")
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    "max_position_embeddings": 64,
}
ALWAYS = [
    "loss", "logits", "gradients", "documents", "isolation", "document bounds", "left padding", "right padding",
    "padded shards", "positions", "masked shards", "accumulation", "evaluation", "attention is sharded",
    "activation memory", "save", "resume", "layers run again",
]  # fmt: skip
# fault -> architecture, ranks, settings, the lines of which every one must go off
SEEN_BY: dict[str, tuple[str, int, dict[str, Any], set[str]]] = {
    "positions_not_offset": ("llama", 2, {}, {"loss", "gradients", "positions"}),
    "document_leak": ("llama", 2, {}, {"documents", "isolation"}),
    "padding_attended": ("llama", 2, {}, {"left padding"}),
    "labels_shifted_after_cutting": ("llama", 2, {}, {"loss", "gradients"}),
    "mean_of_means": ("llama", 2, {}, {"loss", "gradients", "masked shards", "accumulation", "evaluation"}),
    "gradients_times_world": ("llama", 2, {}, {"gradients", "accumulation"}),
    "dropped_head": ("llama", 2, {}, {"loss", "logits", "gradients", "evaluation"}),
    "kv_gradients_of_one_copy": ("llama", 4, {}, {"gradients"}),
    "window_dropped": ("mistral", 2, {}, {"loss", "logits", "gradients"}),
    "softcap_dropped": ("gemma2", 2, {}, {"loss", "logits", "gradients"}),
    "not_causal": ("llama", 2, {}, {"loss", "logits", "gradients", "isolation"}),
    "sinks_not_sliced": ("gpt_oss", 2, {}, {"loss", "logits", "gradients"}),
    "sinks_without_gradient": ("gpt_oss", 2, {}, {"gradients"}),
    "rope_sees_the_shard": ("llama", 2, DYNAMIC, {"positions"}),
    "auxiliary_loss_of_the_shard": ("mixtral", 2, {}, {"router loss"}),
    "nan_on_masked_shards": ("llama", 2, {}, {"masked shards"}),
    "joined_on_shard_bounds": ("llama", 2, {}, {"document bounds"}),
    "bounds_of_the_first_row": ("llama", 2, {}, {"document bounds"}),
    "single_tokens_joined": ("llama", 2, {}, {"documents", "document bounds"}),
    "documents_end_after_two_shards": ("llama", 3, {}, {"loss", "logits", "document bounds"}),
    "padded_shards_attended": ("llama", 2, {}, {"padded shards"}),
    "targets_over_shard_bounds": ("llama", 2, {}, {"document bounds"}),
}
# Checks of several lines, or of a line by another name.
CHECK_OF = {
    "loss": "first_step", "logits": "first_step", "gradients": "first_step", "isolation": "documents",
    "left padding": "padding", "padded shards": "padding",
}  # fmt: skip
QUICK_FAULTS = ("document_leak",)


def on_rank(kind: str, settings: dict[str, Any], fault: str | None, names: list[str] | None) -> list[Line]:
    """Runs on a rank; `fault` names a planted one, `names` the checks to run if not all."""
    checks = [check for check in CHECKS if names is None or check.__name__ in names]
    ranks = torch.distributed.get_world_size()
    with faults.FAULTS[fault]() if fault else nullcontext():
        return verify(
            partial(small_model, kind, **settings), made_up(VOCABULARY, LENGTH), init_mesh(sp=ranks), checks=checks
        )


def lines_of(
    kind: str, ranks: int = 2, fault: str | None = None, names: list[str] | None = None, **settings: Any
) -> dict[str, Line]:
    answers = run_ranks(ranks, on_rank, kind, settings, fault, names)
    assert all(answer == answers[0] for answer in answers[1:]), "all ranks have the same checklist"
    return {line.name: line for line in answers[0]}


def expect_right(kind: str, ranks: int, **settings: Any) -> dict[str, Line]:
    lines = lines_of(kind, ranks, **settings)
    assert set(ALWAYS) <= set(lines)
    assert not {name: (line.figure, line.limit) for name, line in lines.items() if not line.ok}
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", MECHANISMS)
def test_verify_listed_architecture_all_lines_right(kind: str) -> None:
    lines = expect_right(kind, 2)
    assert ("router loss" in lines) == (kind in ("qwen3_moe", "mixtral", "gpt_oss"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), dealt(["qwen3_moe", "gemma2", "deepseek_v3", "gpt_oss", "phi3"], [3, 4]))
def test_verify_three_and_four_ranks_all_lines_right(kind: str, ranks: int) -> None:
    expect_right(kind, ranks)


@pytest.mark.slow
def test_verify_dynamic_rope_all_lines_right() -> None:
    line = expect_right("llama", 2, **DYNAMIC)["positions"]
    assert "dynamic, which looks at the length" in line.detail


@pytest.mark.slow
def test_verify_config_with_router_logits_all_lines_right() -> None:
    expect_right("mixtral", 2, output_router_logits=True)


def on_rank_with_few_tokens(vocabulary: int) -> list[Line]:
    build = partial(small_model, "llama", vocab_size=vocabulary, eos_token_id=0, bos_token_id=0)
    return verify(build, made_up(vocabulary, LENGTH), init_mesh(sp=2))


@pytest.mark.slow
def test_verify_vocabulary_of_two_all_lines_right() -> None:
    lines = run_ranks(2, on_rank_with_few_tokens, 2)[0]
    assert not [line for line in lines if not line.ok]


class Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, None]:
        return dout * ctx.factor, None


def on_rank_with_head(number: float, gradient: float) -> list[Line]:
    """A llama whose head is multiplied by `number`, and its logits' gradient by `gradient`."""

    def build() -> Any:
        model = small_model("llama")
        with torch.no_grad():
            model.lm_head.weight.mul_(number)
        if gradient != 1:
            model.lm_head.register_forward_hook(lambda module, args, logits: Louder.apply(logits, gradient))
        return model

    checks = [check for check in CHECKS if check.__name__ in ("first_step", "documents")]
    return verify(build, made_up(VOCABULARY, LENGTH), init_mesh(sp=2), checks=checks)


@pytest.mark.parametrize(
    ("number", "gradient", "said"),
    [
        (float("nan"), 1.0, "a loss of nan"),
        (1.0, float("inf"), r"a loss of \S+ and gradients of up to (nan|inf)"),
    ],
)
def test_verify_reference_not_finite_raises_on_all_ranks(number: float, gradient: float, said: str) -> None:
    with pytest.raises(RankError, match=f"one process of plain transformers has {said}") as caught:
        run_ranks(2, on_rank_with_head, number, gradient)
    assert len(caught.value.exceptions) == 2, "all ranks say so"


def test_isolation_logits_that_never_move_is_off() -> None:
    (line,) = [line for line in run_ranks(2, on_rank_with_head, 0.0, 1.0)[0] if not line.ok]
    assert (line.name, line.detail.partition(":")[0]) == ("isolation", "nothing is shown")


def test_faults_table_names_every_fault() -> None:
    assert SEEN_BY.keys() == faults.FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [f if f in QUICK_FAULTS else pytest.param(f, marks=pytest.mark.slow) for f in SEEN_BY]
)
def test_verify_planted_fault_its_lines_are_off(fault: str) -> None:
    kind, ranks, settings, wanted = SEEN_BY[fault]
    names = sorted({CHECK_OF.get(line, line.replace(" ", "_")) for line in wanted})
    lines = lines_of(kind, ranks, fault, names, **settings)
    off = {name for name, line in lines.items() if not line.ok}
    assert wanted <= off, f"{fault} was seen by {sorted(off)} only"


_LONG = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
# Every place where transformers may find the length at which frequencies change.
SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic beyond a shorter original": (
        "llama",
        {
            "rope_parameters": {**DYNAMIC["rope_parameters"], "original_max_position_embeddings": 16},
            "max_position_embeddings": 200,
        },
    ),
    "longrope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 96, **_LONG},
            "max_position_embeddings": 384,
        },
    ),
    "one kind of layer alone": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "max_position_embeddings": 128,
        },
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SWITCHES)
def test_positions_rope_of_the_shard_is_off_at_every_switching_length(name: str) -> None:
    kind, settings = SWITCHES[name]
    (right,) = _positions(kind, None, settings)
    assert right.ok, right
    (wrong,) = _positions(kind, "rope_sees_the_shard", settings)
    assert not wrong.ok, wrong.detail


def _positions(kind: str, fault: str | None, settings: dict[str, Any]) -> list[Line]:
    lines = lines_of(kind, fault=fault, names=["positions"], **settings)
    return [line for name, line in lines.items() if name == "positions"]


def test_limits_fp64_are_those_of_the_tests() -> None:
    assert FP64.loss == FP64.logits == TOLERANCE
    assert FP64.isolation == 0


def test_from_rows_drops_padding_and_keeps_documents() -> None:
    row = {
        "input_ids": torch.tensor([[5, 6, 70, 8, 9, 0, 0]]),
        "labels": torch.tensor([[-100, 6, 70, 8, 9, -100, -100]]),
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, -1, -1]]),
    }
    (batch,) = from_rows([row], 61, 31, "a feed").plain
    assert batch["input_ids"].tolist() == [[5, 6, 9, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 9, -100, 9]]


def on_rank_as_on_gpus(kind: str) -> list[Line]:
    """The list for GPUs, on CPU ranks: the same calls, other kernels and links."""
    small = partial(small_model, kind, dtype=torch.float32)
    return verify_devices(small, made_up(VOCABULARY, LENGTH), init_mesh(sp=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_verify_devices_on_cpu_ranks_all_lines_right(kind: str) -> None:
    lines = {line.name: line for line in run_ranks(2, on_rank_as_on_gpus, kind)[0]}
    assert {"collectives", "bf16 loss", "bf16 gradients", *ALWAYS} <= set(lines)
    assert not {name: (line.figure, line.limit) for name, line in lines.items() if not line.ok}
