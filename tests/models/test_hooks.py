"""Hooks on modules that tiles, compiled graphs and the loss would go past: whenever they come, they are honoured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ithaca.mesh import init_mesh
from ithaca.models.hooks import drop_hooks
from ithaca.parallelize import parallelize
from ithaca.planning.plan import LayerMode, MemoryPlan
from ithaca.proof.parity import compare, gradient_errors, reference
from ithaca.proof.promote import promoted
from ithaca.proof.small import small_batch, small_model
from ithaca.training.step import causal_loss
from tests.ranks import run_ranks
from tests.tolerances import FP64


def bend(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Of each token alone, as it must be where ranks have only some, and not linear: a value left out shows."""
    return output * (1 + output.square().mean(-1, keepdim=True))


def mix(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Of all tokens together: a tile shows."""
    return output * (1 + output.square().mean())


def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * (1 + args[0].square().mean()), *args[1:])


def weigh(_module: nn.Module, into: tuple[Tensor, ...], _out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (into[0] * 1.5,)


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "bend": lambda module: module.register_forward_hook(bend),
    "mix": lambda module: module.register_forward_hook(mix),
    "enter": lambda module: module.register_forward_pre_hook(enter),
    "weigh": lambda module: module.register_full_backward_hook(weigh),
}


def error(kind: str, place: str, what: str, mode: LayerMode | None, before: bool, sp: int = 1) -> float:
    """The worst error of a model with one hook, put on before parallelize or after; mode None: memory="auto"."""
    model = small_model(kind, num_hidden_layers=3)
    REGISTER[what](model.get_submodule(place))

    def prepare(own: Any, mesh: Any, **options: Any) -> Any:
        if before:
            return parallelize(own, mesh, **options)
        drop_hooks([own.get_submodule(place)])
        own = parallelize(own, mesh, **options)
        REGISTER[what](own.get_submodule(place))
        return own

    memory: Any = "auto" if mode is None else MemoryPlan((mode,) * 3, (False,) * 3, 4, 5)
    return compare(model, [[small_batch(2, 24)]], init_mesh(sp=sp), prepare=prepare, memory=memory).worst


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("what", ["mix", "enter", "weigh"])
def test_a_hook_on_the_head(what: str, before: bool) -> None:
    assert run_ranks(1, error, "llama", "lm_head", what, "save", before)[0] < FP64


def _adapted_later() -> float:
    """An adapter put on the head of a model that is parallelized already."""
    mesh = init_mesh(sp=1)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    batch = small_batch(2, 24)
    plain, own = small_model("llama"), parallelize(small_model("llama"), mesh)
    alone, adapted = (get_peft_model(model, config, autocast_adapter_dtype=False) for model in (plain, own))
    adapted.load_state_dict(alone.state_dict())
    with promoted():
        expected = reference(alone.get_base_model(), [[batch]])
        loss = causal_loss(adapted, batch, mesh)
        loss.backward()
    gradients = gradient_errors(adapted.get_base_model(), expected.gradients)
    assert any("lm_head" in name for name in gradients)
    return max(abs(float(loss.detach()) - expected.loss), *gradients.values())


def test_an_adapter_put_on_the_head_later() -> None:
    assert run_ranks(1, _adapted_later)[0] < FP64
