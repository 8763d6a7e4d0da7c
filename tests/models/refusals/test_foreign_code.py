"""Detection of the user's own code inside decorators and wrappers; libraries' code is not foreign."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ithaca.errors import UnsupportedError
from ithaca.mesh import init_mesh
from ithaca.models.discover.mixing import refuse_mixing
from ithaca.models.refusals.foreign_code import foreign_within, is_foreign, refuse_own_attention
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import build, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import expect_refusal


def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral", "deepseek_v3"])
def test_foreign_within_model_of_transformers_is_none(kind: str) -> None:
    assert foreign_within(build(survey_config(kind))) is None


@pytest.mark.parametrize("path", ["", "model.layers.1.mlp", "lm_head"])
@pytest.mark.parametrize("around", [decorated, partial, lambda forward: forward], ids=["wraps", "partial", "bare"])
def test_foreign_within_replaced_forward_is_found(path: str, around: Any) -> None:
    model = small_model("llama")
    module = model.get_submodule(path)
    module.forward = around(MethodType(passed_on, module))
    found = foreign_within(model)
    assert (found or "").startswith(path or "the model")


def test_is_foreign_own_decorator_of_library_function_is_true() -> None:
    forward = small_model("llama").forward
    assert not is_foreign(forward)
    assert is_foreign(decorated(forward))


class Centred(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x - x.mean(1, keepdim=True))  # type: ignore[no-any-return]


class Called(nn.Linear):
    def _call_impl(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x - x.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [Centred, Called])
def test_foreign_within_own_call_is_found(kind: type) -> None:
    model: Any = small_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = kind
    found = foreign_within(model)
    assert (found or "").startswith("model.layers.1.mlp.up_proj")
    with pytest.raises(UnsupportedError, match="reads tokens of the row beside attention"):
        refuse_mixing(model, found)


ROTARY = modeling_llama.apply_rotary_pos_emb
EAGER = modeling_llama.eager_attention_forward


def scaled_by_length(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    q, k = ROTARY(q, k, *args, **kwargs)
    return q * (1 + 0.05 * q.shape[2]), k


class ScaledByLength:
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return scaled_by_length(*args, **kwargs)


HELPERS = {
    "function": scaled_by_length,
    "object": ScaledByLength(),
    "partial": partial(scaled_by_length, unsqueeze_dim=1),
    "wraps": functools.wraps(ROTARY)(scaled_by_length),
}


@pytest.mark.parametrize("kind", HELPERS)
def test_foreign_within_helper_of_modeling_file_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", HELPERS[kind])
    found = foreign_within(model)
    assert (found or "").startswith("apply_rotary_pos_emb, which model.layers.0.self_attn (LlamaAttention) calls")
    with pytest.raises(UnsupportedError, match="counts positions from the start of what it is given"):
        refuse_mixing(model, found)


def test_foreign_within_helper_of_a_helper_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x.roll(1, -1))
    found = foreign_within(model)
    assert (found or "").startswith("rotate_half")
    refuse_mixing(model, found)


def test_foreign_within_own_method_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = build(survey_config("mixtral"))
    block = type(kind.model.layers[0].mlp.experts)
    monkeypatch.setattr(block, "_apply_gate", lambda self, x: x, raising=False)
    assert (foreign_within(kind) or "").startswith("_apply_gate")


def attend(*args: Any, **kwargs: Any) -> Any:
    return EAGER(*args, **kwargs)


class Attend:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return EAGER(*args, **kwargs)


def own_attention(what: str) -> None:
    model: Any = small_model("llama")
    registered: dict[str, Any] = {
        "registered": {"mine": attend},
        "over a name of transformers": {"sdpa": Attend()},
        "partial": {"mine": partial(attend)},
    }.get(what, {})
    model.config._attn_implementation = next(iter(registered), "eager")
    default = EAGER if registered else attend
    # The rank lives on: what is put on transformers is taken off again.
    with (
        patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, registered),
        patch.object(modeling_llama, "eager_attention_forward", default),
    ):
        parallelize(model, init_mesh(sp=1))


@pytest.mark.parametrize("what", ["registered", "over a name of transformers", "partial", "eager of the file"])
def test_parallelize_own_attention_function_is_refused(what: str) -> None:
    expect_refusal(
        1, own_attention, what, error="UnsupportedError", match="an attention function of your own, .*ulysses_attention"
    )


@pytest.mark.parametrize(
    "name",
    ["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager", "kernels/flash", None],
)
def test_refuse_own_attention_functions_of_transformers_pass(name: str | None) -> None:
    model = small_model("llama")
    model.config._attn_implementation_internal = name
    refuse_own_attention(model)


def act(module: nn.Module) -> Callable[[Any], None]:
    return lambda model: setattr(model.model.layers[1].mlp, "act_fn", module)


def after_mlp(module: nn.Module) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, module)

    return change


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


MIXING = {
    "Softmax": act(nn.Softmax(dim=1)),
    "Softmax after the MLP": after_mlp(nn.Softmax(dim=-2)),
    "LogSoftmax": act(nn.LogSoftmax(dim=1)),
    "Softmin": act(nn.Softmin(dim=1)),
    "GLU": act(nn.GLU(dim=1)),
    "PReLU": act(nn.PReLU(8)),
    "pooling": after_mlp(nn.AdaptiveAvgPool2d((8, 32))),
    "pooling to one": after_mlp(nn.AdaptiveAvgPool2d((1, 32))),
    "padding": after_mlp(nn.ConstantPad2d((0, 0, 1, -1), 0.0)),
    "LayerNorm over tokens": after_mlp(nn.LayerNorm((8, 32))),
    "RMSNorm over tokens": after_mlp(nn.RMSNorm((8, 32))),
    "zero padding": after_mlp(nn.ZeroPad2d((0, 0, 1, -1))),
}


@pytest.mark.parametrize("what", MIXING)
def test_refuse_mixing_class_of_torch_over_tokens_is_refused(what: str) -> None:
    model = small_model("llama")
    MIXING[what](model)
    model.double()
    found = foreign_within(model)
    assert found is not None
    with pytest.raises(UnsupportedError, match="is code of your own, and"):
        refuse_mixing(model, found)


TOKENWISE = {
    "Softmax": act(nn.Softmax(dim=-1)),
    "LogSoftmax": act(nn.LogSoftmax(dim=2)),
    "PReLU": act(nn.PReLU()),
    "dropout": act(nn.AlphaDropout(0.0)),
    "pooling over channels": after_mlp(nn.AdaptiveAvgPool1d(32)),
    "Unflatten": after_mlp(nn.Unflatten(-1, (32,))),
}


@pytest.mark.parametrize("what", TOKENWISE)
def test_refuse_mixing_class_of_torch_over_channels_passes(what: str) -> None:
    model = small_model("llama")
    TOKENWISE[what](model)
    model.double()
    refuse_mixing(model, foreign_within(model))


@pytest.mark.parametrize("module", [nn.SiLU(), nn.Tanh(), nn.GELU(), nn.Identity(), nn.Dropout(0.1), nn.Hardswish()])
def test_foreign_within_tokenwise_module_of_torch_is_none(module: nn.Module) -> None:
    model: Any = small_model("llama")
    act(module)(model)
    after_mlp(nn.LayerNorm(32))(model)
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    assert foreign_within(model) is None


def test_refuse_mixing_own_parametrization_passes() -> None:
    model: Any = small_model("llama")
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
    refuse_mixing(model, foreign_within(model))


def window_of_one_layer(window: int | None) -> None:
    model: Any = small_model("gemma2")
    model.model.layers[0].self_attn.sliding_window = window
    parallelize(model, init_mesh(sp=1))


@pytest.mark.parametrize("window", [2, None])
def test_parallelize_window_of_one_layer_alone_is_refused(window: int | None) -> None:
    match = rf"layers\.0\.self_attn\.sliding_window is {window} and its config's is \d+: set both"
    expect_refusal(1, window_of_one_layer, window, error="UnsupportedError", match=match)
