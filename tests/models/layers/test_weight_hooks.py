"""Hooks on a weight's gradient: called once, with the whole sum, or refused where FSDP2 would lose them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import promoted, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FAULT, FP64

MODES = {"keep": ("keep",) * 2, "save": ("save",) * 2, "rebuild": ("save", "rebuild"), "recompute": ("recompute",) * 2}
LIMIT = 1e-3


def llama(adapters: bool = False) -> Any:
    model: Any = small_model("llama", num_hidden_layers=2)
    if adapters:
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config).base_model.model
    return model


def cut(seen: Counter[str], name: str, gradient: Tensor) -> Tensor:
    """Return a non-linear function, whose values for parts do not add up to the value for their sum."""
    seen[name] += 1
    return gradient.clamp(-LIMIT, LIMIT)


def put_on(model: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(cut, seen, name))
    return seen


def with_hooks(mode: str, adapters: bool, fuse: bool) -> tuple[set[int], float, float]:
    """Return the calls of each hook, the largest error, and the largest error of a model without hooks."""
    mesh, plain, untouched, model = init_mesh(sp=1), *(llama(adapters) for _ in range(3))
    put_on(plain)
    parallelize(model, mesh, memory=MemoryPlan(MODES[mode], (False, False), 8, 8), fuse=fuse)  # type: ignore[arg-type]
    seen = put_on(model)
    with promoted():
        wanted = reference(plain, [[small_batch()]]).gradients
        without = reference(untouched, [[small_batch()]]).gradients
        causal_loss(model, small_batch(), mesh).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() == seen.keys()
    off, missed = (max(relative_error(got[name], wanted[name]) for name in wanted) for got in (found, without))
    return set(seen.values()), off, missed


@pytest.mark.parametrize(
    ("mode", "adapters", "fuse"),
    [
        ("rebuild", False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [*product(MODES, (False, True), (False,)), ("save", True, True)]
            if case != ("rebuild", False, False)
        ),
    ],
)
def test_weight_hook_every_mode_sees_sum_once(mode: str, adapters: bool, fuse: bool) -> None:
    [(calls, off, missed)] = run_ranks(1, with_hooks, mode, adapters, fuse)
    assert calls == {1}
    assert off < FP64
    assert missed > FAULT


def sharded(when: str, kind: str) -> int:
    """Return the number of calls of a hook on a sharded weight."""
    mesh, model, seen = init_mesh(sp=2), llama(), []
    named = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    if when == "after":
        parallelize(model, mesh)
        named = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    getattr(named, kind)(seen.append)
    if when == "before":
        parallelize(model, mesh)
    causal_loss(model, small_batch(), mesh).backward()
    return len(seen)


@pytest.mark.parametrize(
    ("when", "kind", "match"),
    [
        ("before", "register_hook", r"which its shard would not have: call register_post_accumulate_grad_hook after"),
        ("before", "register_post_accumulate_grad_hook", r"which its shard would not have: call .* after parallelize"),
        ("after", "register_hook", r"which FSDP2 never calls: use register_post_accumulate_grad_hook instead"),
    ],
)
def test_weight_hook_lost_by_fsdp2_is_refused(when: str, kind: str, match: str) -> None:
    match = r"model\.layers\.1\.mlp\.up_proj\.weight has a hook, " + match
    expect_refusal(2, sharded, when, kind, error="UnsupportedError", match=match)


def test_weight_hook_advised_by_error_is_called() -> None:
    assert run_ranks(2, sharded, "after", "register_post_accumulate_grad_hook") == [1, 1]


def test_weight_hook_in_torch_fsdp2_is_lost() -> None:
    """The refusal can go once FSDP2 calls such hooks."""
    assert run_ranks(2, lost) == [0, 0]


def lost() -> int:
    from torch.distributed.fsdp import fully_shard

    model, seen = torch.nn.Linear(4, 4), []
    model.weight.register_hook(seen.append)
    fully_shard(model, mesh=init_mesh(sp=2).weights)
    model.weight.register_hook(seen.append)
    model(torch.ones(2, 4)).sum().backward()
    return len(seen)
