"""Tests of wrong arguments of public functions: one sentence with the argument that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ithaca
from ithaca.arguments import named_arguments, shown
from ithaca.errors import ArgumentError, IthacaError
from ithaca.mesh import Mesh

# Values; what a shard is made of, which no caller makes.
OTHERS = {"KERNELS", "Mesh", "Shard", "SequenceLayout"}


def public() -> list[str]:
    named = [name for name in ithaca.__all__ if callable(getattr(ithaca, name)) and name not in OTHERS]
    return [
        name
        for name in named
        if not (isinstance(found := getattr(ithaca, name), type) and issubclass(found, Exception))
    ]


@pytest.mark.parametrize("name", public())
def test_public_name_with_wrong_argument_lists_its_arguments(name: str) -> None:
    target = getattr(ithaca, name)
    taken = [each for each in inspect.signature(target).parameters if each != "self"]
    with pytest.raises(ArgumentError, match=f"^{name} has no argument 'wobble': it takes {', '.join(taken)}$"):
        target(wobble=3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: API.UlyssesConfig(sp=2), "UlyssesConfig has no argument 'sp': use sp_size=2"),
        (lambda: API.UlyssesConfig(sp_siz=2), "'sp_siz': use sp_size=2"),
        (lambda: API.UlyssesConfig(2, ring=4), "'ring': use ring_size=4"),
        (lambda: API.UlyssesConfig(budget="4GB"), "'budget': use memory_budget='4GB'"),
        (lambda: API.init_mesh(sp_size=2), "init_mesh has no argument 'sp_size': use sp=2"),
        (lambda: ithaca.init_mesh(1, 2), "init_mesh: too many positional arguments: it takes sp, dp, ring"),
        (lambda: API.parallelize(), "parallelize: missing a required argument: 'model': it takes model, mesh"),
        (lambda: API.parallelize(None, None, dtype=[]), "'dtype': did you mean compute_dtype?"),
    ],
)
def test_misspelled_argument_gets_the_right_one(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert said in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, IthacaError)


def test_type_error_inside_a_function_passes_unchanged() -> None:
    @named_arguments
    def adds(left: Any, right: Any = 1) -> Any:
        return left + right

    assert adds(1) == 2
    with pytest.raises(TypeError, match="can only concatenate") as caught:
        adds("a")
    assert not isinstance(caught.value, IthacaError)


# Without types, for calls that no checker of types would let through.
API: Any = ithaca
MODEL = nn.Linear(2, 2)
BATCH = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
HEADS = torch.zeros(1, 4, 2, 2)
LAYOUT = ithaca.SequenceLayout.whole_rows(1, 4, 1)
SWAPPED: list[tuple[Callable[[Mesh], Any], str]] = [
    (lambda _: API.save_pretrained("out", MODEL), "model is 'out': pass the model first"),
    (lambda _: API.save_pretrained(MODEL, 3), "folder is 3: pass a path"),
    (lambda _: API.save_pretrained(MODEL, ""), "folder is '': pass a path"),
    (lambda _: API.save_pretrained(MODEL, "out"), "Linear has no config"),
    (lambda _: API.save_pretrained(MODEL, "out", max_shard_size="big"), "max_shard_size='big': pass an amount"),
    (lambda _: API.save_pretrained(MODEL, "out", max_shard_size=0), "max_shard_size=0: pass a whole number"),
    (lambda mesh: API.recover(mesh), "model is a Mesh: pass the model"),
    (lambda mesh: API.count_tokens(BATCH, mesh), "batches is a dict: pass a list of batches"),
    (lambda mesh: API.count_tokens(3, mesh), "batches is 3: pass a list of batches"),
    (lambda mesh: API.count_tokens(mesh, [BATCH]), "mesh=a list: pass the ithaca.Mesh"),
    (lambda mesh: API.parallelize(mesh, MODEL), "mesh=a Linear: pass the ithaca.Mesh"),
    (lambda mesh: API.parallelize(None, mesh), "the model is None: pass a transformers model"),
    (lambda mesh: API.parallelize(MODEL, mesh, kernel=["flash"]), "no attention kernel is called ['flash']"),
    (lambda mesh: API.shard_batch(mesh, BATCH), "mesh=a dict: pass the ithaca.Mesh"),
    (lambda mesh: API.shard_batch(BATCH, mesh, vocab_size="9"), "vocab_size='9': pass a whole number"),
    (lambda mesh: API.shard_batch({**BATCH, "document_ids": "x"}, mesh), "document_ids is 'x': whole numbers"),
    (lambda mesh: API.reduce_mean(mesh, MODEL, 1, mesh), "the model is a Mesh: pass what ithaca.parallelize"),
    (lambda mesh: API.causal_loss(BATCH, MODEL, mesh), "the model is a dict: pass what ithaca.parallelize"),
    (lambda _: API.init_mesh("2"), "sp='2': a degree is a whole number"),
    (lambda _: API.init_mesh(sp=2.0), "sp=2.0: a degree is a whole number"),
    (lambda _: API.init_mesh(MODEL), "sp=a Linear: a degree is a whole number"),
    (lambda _: API.UlyssesConfig(sp_size="2"), "sp_size='2': pass a whole number"),
    (lambda _: API.UlyssesConfig(dp_size=0), "dp_size=0: pass a whole number"),
    (lambda _: API.UlyssesConfig(kernel="flush"), "no attention kernel is called 'flush'"),
    (lambda _: API.UlyssesConfig(whole_logits="no"), "whole_logits='no': pass True or False"),
    (lambda _: API.UlyssesConfig.from_accelerate({"sp_size": 2}), "config is a dict: pass accelerate's"),
    (lambda _: API.unbind(None), "the model is None: pass what ithaca.parallelize returned"),
    (lambda _: API.unsharded(3).__enter__(), "the model is 3: pass what ithaca.parallelize returned"),
    (lambda mesh: API.build_optimizer(mesh, lr=1e-3), "build_optimizer was given a Mesh: pass the model"),
    (lambda _: API.build_optimizer(MODEL, lr=1e-3, in_backward="no"), "in_backward='no': pass True or False"),
    (lambda _: API.build_optimizer(MODEL, lr=1e-3, seed="x"), "seed is 'x': pass a whole number"),
    (lambda m: API.ulysses_attention(HEADS, HEADS, HEADS, LAYOUT, m), "mesh=a SequenceLayout: pass the ithaca"),
    (lambda m: API.ulysses_attention(None, HEADS, HEADS, m, LAYOUT), "q_BLHD is None: pass a tensor"),
    (lambda m: API.ulysses_attention(HEADS.long(), HEADS, HEADS, m, LAYOUT), "of torch.int64: floating-point"),
    (lambda m: API.ulysses_attention(HEADS, HEADS, HEADS, m, None), "layout is None: pass the SequenceLayout"),
    (lambda m: API.ulysses_attention(HEADS, HEADS, HEADS, m, LAYOUT, scale="a"), "scale='a': pass a number"),
    (lambda m: API.ulysses_attention(HEADS, HEADS, HEADS, m, LAYOUT, window=2.5), "window is 2.5: pass a whole"),
    (lambda _: API.SequenceLayout.whole_rows(1, 8, 0), "shards=0: pass a whole number"),
    (lambda _: API.SequenceLayout.packed([[0]], 1, 0), "documents_BS is a list: a tensor [B, S]"),
]


@pytest.fixture
def mesh_of_one() -> Iterator[Mesh]:
    yield ithaca.init_mesh(device="cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(("call", "said"), SWAPPED, ids=[said for _, said in SWAPPED])
def test_argument_of_wrong_kind_is_one_sentence(call: Callable[[Mesh], Any], said: str, mesh_of_one: Mesh) -> None:
    with pytest.raises(IthacaError) as caught:
        call(mesh_of_one)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_long_value_is_shown_in_a_few_words() -> None:
    assert [shown(value) for value in (None, "x", 3, [1, 2], MODEL, nn.Linear)] == [
        *("None", "'x'", "3", "[1, 2]", "a Linear", "the class Linear")
    ]
    assert len(shown("x" * 1000)) == 60
    assert shown([HEADS]) == "a list"
