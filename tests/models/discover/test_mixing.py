"""Unmeasured architectures: a module that mixes tokens outside attention is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models import support
from ithaca.models.discover.mixing import refuse_mixing
from ithaca.models.refusals.foreign_code import foreign_within
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import build, small_batch, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import expect_refusal, run_ranks

# States, convolutions over tokens, several in a layer beside attention, attention in code of its own.
MIXING = {
    "bamba": "BambaMixer", "falcon_h1": "FalconH1Mixer", "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock", "lfm3": "Lfm3ShortConv", "gptj": "GPTJAttention",
    "inkling_text": "InklingShortConvolution", "minimax": "MiniMaxLightningAttention",
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", MIXING)
def test_refuse_mixing_module_reading_other_tokens_is_named(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind}.* was never measured, and .*{MIXING[kind]}\) reads tokens"):
        refuse_mixing(build(survey_config(kind)))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral", "deepseek_v3", "cohere_compass_text"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_refuse_mixing_plain_decoder_passes(kind: str, dtype: torch.dtype) -> None:
    model = build(survey_config(kind), dtype=dtype)
    before = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    refuse_mixing(model)
    assert model.training
    after = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    assert after == before


class Counted(nn.Module):
    """A rotary embedding that counts positions itself."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.rotary(x, torch.arange(x.shape[1])[None].expand_as(position_ids))


def test_refuse_mixing_counted_positions_are_refused() -> None:
    model: Any = small_model("llama")
    model.model.rotary_emb = Counted(model.model.rotary_emb)
    with pytest.raises(UnsupportedError, match="counts positions from the start of what it is given"):
        refuse_mixing(model)


class Shift(nn.Module):
    """An MLP that also reads a little of the token before."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.share = mlp, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.mlp(x)
        return given + self.share * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def _never_measured(*, shift: bool) -> float:
    mesh = init_mesh(sp=2)
    model: Any = small_model("llama")
    if shift:
        model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    model.config.model_type = "brand_new"
    return float(causal_loss(parallelize(model, mesh, allow_untested=True), small_batch(1, 8), mesh))


def test_parallelize_untested_hybrid_is_refused_on_all_ranks() -> None:
    """Every layer attends, and the weight of the token before is zero at first: only the trial shows the mixing."""
    assert "brand_new" not in support.verdicts()
    expect_refusal(
        2, _never_measured, shift=True, error="UnsupportedError", match=r"layers\.1\.mlp \(Shift\) reads tokens"
    )


def test_parallelize_untested_plain_decoder_runs() -> None:
    first, second = run_ranks(2, _never_measured, shift=False)
    assert first == second


def _widened(sp: int) -> None:
    model: Any = small_model("llama")
    model.model.layers[0].mlp = Shift(model.model.layers[0].mlp)
    parallelize(model, init_mesh(sp=sp))


def test_parallelize_users_mixing_module_is_refused() -> None:
    expect_refusal(
        2, _widened, 2, error="UnsupportedError", match=r"layers.0.mlp \(Shift\) is code of your own.* reads tokens"
    )


class Normed(nn.Module):
    """Batch norm over all tokens: token-wise in evaluation, not in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return normed


class CentredInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.training and torch.is_grad_enabled() else x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("module", [Normed(32), CentredInTraining()], ids=lambda module: type(module).__name__)
def test_refuse_mixing_module_mixing_in_training_is_named(module: nn.Module, training: bool) -> None:
    model: Any = small_model("llama")
    model.model.layers[1].post_attention_layernorm = module.to(model.dtype)
    model.train(training)
    found = foreign_within(model)
    drawn = torch.random.get_rng_state()
    with pytest.raises(UnsupportedError, match=r"layers\.1\.post_attention_layernorm \(\w+\) reads tokens"):
        refuse_mixing(model, found)
    assert all(each.training == training for each in model.modules())
    assert torch.random.get_rng_state().equal(drawn)


def test_foreign_within_convolution_of_torch_is_found() -> None:
    model: Any = small_model("llama")
    assert foreign_within(model) is None
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, nn.Conv1d(8, 8, 1))
    assert foreign_within(model) == "model.layers.0.mlp.down_proj.1 (Conv1d)"


def test_parallelize_mixing_module_on_one_rank_runs() -> None:
    run_ranks(1, _widened, 1)
