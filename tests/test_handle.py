"""Completeness of a model's handle: unbind leaves every module, config and registry as it was, and
sharded weights with what the handle lists for them. The handle is freed with its model, and copied with it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.errors import UnsupportedError
from ithaca.handle import KEY, Handle, handle_of, is_bound
from ithaca.integrations.preparation import Preparation
from ithaca.integrations.settings import Settings
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.binding_state import Binding, binding_of
from ithaca.models.layers import fuse
from ithaca.models.planner.memory_planner import MemoryPlanner
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.state.optimizer.build import build_optimizer
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

KINDS = ("llama", "qwen3_moe", "gemma2", "lora")
MODES: tuple[LayerMode | None, ...] = (None, "keep", "save", "recompute", "rebuild")


def built(kind: str) -> Any:
    if kind != "lora":
        return small_model(kind)
    return get_peft_model(small_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def planned(mode: LayerMode | None) -> MemoryPlan | None:
    return None if mode is None else MemoryPlan(("save" if mode == "rebuild" else mode, mode), (False, False), 4, 4)


@dataclass
class Snapshot:
    """A model's modules, with their classes, attributes and hooks, and its configs, as they are now."""

    modules: dict[str, tuple[type, dict[str, Any]]]
    configs: dict[str, Any]
    registry: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        modules = {name: (type(module), attributes(module)) for name, module in model.named_modules()}
        configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
        values = {name: copy.deepcopy(vars(config)) for name, config in configs.items()}
        return cls(modules, values, dict(ALL_ATTENTION_FUNCTIONS))

    def differences(self, other: Snapshot) -> list[str]:
        """Name what is not the same object in both."""
        found = [f"{n}: class {k[0]}" for n, k in self.modules.items() if other.modules[n][0] is not k[0]]
        for name, (_, own) in self.modules.items():
            theirs = other.modules[name][1]
            found += [f"{name}.{key}" for key in own.keys() ^ theirs.keys()]
            found += [f"{name}.{key}" for key in own.keys() & theirs.keys() if not same(own[key], theirs[key])]
        found += [f"{name}.config" for name in self.configs if self.configs[name] != other.configs[name]]
        return found + [f"registry {key}" for key in self.registry.keys() ^ other.registry.keys()]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the instance's attributes; stores of hooks, weights and modules by their contents."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, bool | int | float | str) and one == other)


def step(model: Any, mesh: Any) -> None:
    causal_loss(model, small_batch(1, 16), mesh).backward()


def left_over(kind: str, mode: LayerMode | None, sp: int, fuse_it: bool) -> list[str]:
    model, mesh = built(kind), init_mesh(sp=sp)
    before = Snapshot.of(model)
    with patch.object(fuse.torch, "compile", lambda function: function):
        parallelize(model, mesh, weights="none" if sp > 1 else "shard", memory=planned(mode), fuse=fuse_it)
        inner = binding_of(model).model.model.layers[0].self_attn
        hook = inner.register_forward_hook(lambda module, args, output: None)
        step(model, mesh)
    model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    unbind(model)
    hook.remove()
    assert handle_of(model) is None
    return before.differences(Snapshot.of(model))


def prepared_then_unbound(kind: str) -> list[str]:
    model = built(kind)
    before = Snapshot.of(model)
    settings = Settings(
        sp_size=1, ring_size=1, dp_size=1, memory="auto", memory_budget=None, host_budget=None, kernel="auto",
        weights="shard", whole_logits=False, length=None, allow_untested=False,
    )  # fmt: skip
    Preparation(init_mesh(sp=1), settings).model(model)
    assert model(**small_batch(1, 16)).loss is not None
    unbind(model)
    return before.differences(Snapshot.of(model))


# Experts' inputs are not rebuilt, and without a plan nothing is compiled.
CASES = [
    (kind, mode, sp, fuse_it)
    for kind in KINDS
    for mode in MODES
    for sp in (1, 2)
    for fuse_it in (False, True)
    if (kind, mode) != ("qwen3_moe", "rebuild") and not (mode is None and fuse_it)
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "mode", "sp", "fuse_it"), CASES)
def test_unbind_unsharded_weights_leaves_nothing(kind: str, mode: LayerMode | None, sp: int, fuse_it: bool) -> None:
    assert run_ranks(sp, left_over, kind, mode, sp, fuse_it) == [[]] * sp


def left_by_an_unlisted_change() -> list[str]:
    def unlisted(self: Handle, module: nn.Module, name: str, value: Any, **_: Any) -> None:
        module.__dict__[name] = value

    with patch.object(Handle, "replace", unlisted):
        model = built("llama")
        before = Snapshot.of(model)
        unbind(parallelize(model, init_mesh(sp=1)))
        return before.differences(Snapshot.of(model))


def test_unlisted_change_is_detected() -> None:
    [found] = run_ranks(1, left_by_an_unlisted_change)
    assert {"model.layers.0.forward", ".generate", "model.config", ".forward"} <= set(found)


@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_unbind_after_prepare_leaves_nothing(kind: str) -> None:
    assert run_ranks(1, prepared_then_unbound, kind) == [[]]


def of_sharded(kind: str) -> tuple[list[str], set[str], bool]:
    """Return the differences from FSDP2 alone after unbind, the handle's list of them, and True if steps are left."""
    model, mesh = built(kind), init_mesh(sp=2)
    base = model.get_base_model() if kind == "lora" else model
    parallelize(model, mesh, memory=planned("save"))
    step(model, mesh)
    unbind(model)
    handle = handle_of(model)
    assert handle is not None
    ours = [
        f"{type(module).__name__}.{key}"
        for module in model.modules()
        for key, value in vars(module).items()
        if type(value).__module__.startswith("ithaca.")
    ]
    listed = {f"{type(each.module).__name__}.{each.name}" for each in handle.while_sharded if hasattr(each, "name")}
    return sorted(ours), listed | {f"{type(base).__name__}.{KEY}"}, is_bound(model)


@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_unbind_sharded_weights_keeps_their_guards(kind: str) -> None:
    for ours, listed, bound in run_ranks(2, of_sharded, kind):
        assert set(ours) == listed
        assert not bound
        assert any(each.endswith(".save_pretrained") for each in ours)


def after_a_refusal() -> list[str]:
    model = built("llama")
    before = Snapshot.of(model)
    with (
        patch("ithaca.models.layers.install._install_head", side_effect=UnsupportedError("in the middle")),
        pytest.raises(UnsupportedError, match="in the middle"),
    ):
        parallelize(model, init_mesh(sp=1))
    return before.differences(Snapshot.of(model))


def test_refusal_in_parallelize_leaves_nothing() -> None:
    assert run_ranks(1, after_a_refusal) == [[]]


def freed() -> tuple[bool, bool]:
    model, mesh = built("llama"), init_mesh(sp=1)
    parallelize(model, mesh)
    optimizer = build_optimizer(model, lr=1e-3)
    step(model, mesh)
    optimizer.step()
    gone, steps = weakref.ref(model), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    without_optimizer = steps() is None
    del model
    gc.collect()
    return without_optimizer, gone() is None


def test_handle_keeps_no_model_or_optimizer_alive() -> None:
    assert run_ranks(1, freed) == [(True, True)]


def copied() -> tuple[bool, list[str]]:
    """If a copy's parts are its own, and what unbinding the copy leaves on it; the original goes on."""
    model, mesh = built("llama"), init_mesh(sp=1)
    before = Snapshot.of(copy.deepcopy(model))
    parallelize(model, mesh)
    optimizer = build_optimizer(model, lr=1e-3)
    step(model, mesh)
    other = copy.deepcopy(model)
    step(other, mesh)
    mine, theirs = handle_of(model), handle_of(other)
    assert mine is not None
    assert theirs is not None
    apart = mine is not theirs and all(mine.part(kind) is not theirs.part(kind) for kind in (Binding, MemoryPlanner))
    assert mine.living_optimizers() == [optimizer]
    assert theirs.living_optimizers() == []
    assert theirs.root is other
    assert binding_of(other).model is other
    unbind(other)
    step(model, mesh)
    names = [name for name in before.differences(Snapshot.of(other)) if name.endswith((KEY, "forward", "generate"))]
    return apart, names


def test_deepcopy_of_model_has_own_handle() -> None:
    assert run_ranks(1, copied) == [(True, [])]


class Leaf(nn.Linear):
    """A module whose attributes are replaced here."""


def test_undo_removes_last_step_first() -> None:
    module, undone = Leaf(2, 2), []
    handle = Handle.on(module, None)  # type: ignore[arg-type]
    module.__dict__["forward"] = own = lambda x: x
    for number in range(2):
        handle.replace(module, "forward", number)
        handle.add(type("Step", (), {"remove": lambda self, n=number: undone.append((n, module.forward))})())
    with handle.temporarily():
        handle.replace(module, "extra", 1)
    assert "extra" not in vars(module)
    assert module.forward == 1
    handle.undo()
    assert undone == [(1, 1), (0, 0)]
    assert vars(module)["forward"] is own
    assert KEY not in vars(module)
    assert isinstance(module._forward_hooks, OrderedDict)
    assert "forward" not in vars(Leaf)


def test_memory_error_is_explained_once() -> None:
    handle, told = Handle.on(Leaf(2, 2), None), []  # type: ignore[arg-type]

    class Explained(torch.OutOfMemoryError):
        """Error with an account."""

    def explain(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        told.append(error)
        return error if isinstance(error, Explained) else Explained("with an account")

    handle.explain = explain
    with pytest.raises(Explained) as caught, handle.accounting(), handle.accounting():
        raise torch.OutOfMemoryError("out of memory")
    assert len(told) == 2
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    handle.explain = None
    with pytest.raises(torch.OutOfMemoryError, match=r"^plain$"), handle.accounting():
        raise torch.OutOfMemoryError("plain")
