"""Wrong arguments of public names: one sentence that says which was meant, of the kind that Python's own error is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import ithaca
from ithaca.arguments import named_arguments
from ithaca.errors import ArgumentError, IthacaError

# Values, and what takes one model; what a shard is made of, which no caller makes.
OTHERS = {"KERNELS", "Mesh", "Shard", "SequenceLayout", "unbind", "unsharded"}


def public() -> list[str]:
    named = [name for name in ithaca.__all__ if callable(getattr(ithaca, name)) and name not in OTHERS]
    return [
        name
        for name in named
        if not (isinstance(found := getattr(ithaca, name), type) and issubclass(found, Exception))
    ]


@pytest.mark.parametrize("name", public())
def test_every_public_name_says_what_it_takes(name: str) -> None:
    target = getattr(ithaca, name)
    taken = [each for each in inspect.signature(target).parameters if each != "self"]
    with pytest.raises(ArgumentError, match=f"^{name} has no argument 'wobble': it takes {', '.join(taken)}$"):
        target(wobble=3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ithaca.UlyssesConfig(sp=2), "UlyssesConfig has no argument 'sp': use sp_size=2"),
        (lambda: ithaca.UlyssesConfig(sp_siz=2), "'sp_siz': use sp_size=2"),
        (lambda: ithaca.UlyssesConfig(2, ring=4), "'ring': use ring_size=4"),
        (lambda: ithaca.UlyssesConfig(budget="4GB"), "'budget': use memory_budget='4GB'"),
        (lambda: ithaca.init_mesh(sp_size=2), "init_mesh has no argument 'sp_size': use sp=2"),
        (lambda: ithaca.init_mesh(1, 2), "init_mesh: too many positional arguments: it takes sp, dp, ring"),
        (lambda: ithaca.parallelize(), "parallelize: missing a required argument: 'model': it takes model, mesh"),
        (lambda: ithaca.parallelize(None, None, dtype=[]), "'dtype': did you mean compute_dtype?"),
    ],
)
def test_the_argument_that_was_meant_is_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert said in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, IthacaError)


def test_a_functions_own_type_error_is_its_own() -> None:
    @named_arguments
    def adds(left: Any, right: Any = 1) -> Any:
        return left + right

    assert adds(1) == 2
    with pytest.raises(TypeError, match="can only concatenate") as caught:
        adds("a")
    assert not isinstance(caught.value, IthacaError)
