"""Detection of the user's own code inside decorators and wrappers; libraries' code is not foreign."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest

from ithaca.models.refusals.foreign_code import foreign_within, is_foreign
from ithaca.verify.small_models.features import build, small_model
from ithaca.verify.small_models.types import survey_config


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
