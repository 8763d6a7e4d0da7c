"""State that layers pass on beside hidden states: exact in every memory mode, or refused by name."""

from __future__ import annotations

import re
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from ithaca.errors import UnsupportedError
from ithaca.handle import is_bound
from ithaca.mesh import init_mesh
from ithaca.models.planner.plan_in_force import planner_of
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.verify.parity import compare
from ithaca.verify.small_models.features import small_batch, small_config
from tests.ranks import run_ranks
from tests.tolerances import FP64

LAYERS = 4
K: LayerMode = "keep"
S: LayerMode = "save"
R: LayerMode = "recompute"
B: LayerMode = "rebuild"
PLANS: tuple[tuple[LayerMode, ...], ...] = (
    (K, K, K, K), (S, S, S, S), (R, R, R, R), (S, B, B, B), (K, S, R, B), (S, K, S, K), (K, S, K, R), (R, B, K, S),
)  # fmt: skip


class Passes(LlamaDecoderLayer):
    """Layer that leaves a tensor for later layers and reads the tensors of earlier layers."""

    way = ""

    def forward(self, hidden_states: Tensor, state: Any = None, **kwargs: Any) -> Any:
        index = self.self_attn.layer_idx
        before = self.given(state) if index > 1 else None
        # Not linear, and of each token alone: a value that is left out, or old, shows.
        hidden = super().forward(hidden_states, **kwargs)
        if before is not None:
            hidden = hidden + torch.tanh(before) * hidden.square()
        elif index < 2:
            self.leave(state, hidden)
        return hidden

    def leave(self, state: Any, hidden: Tensor) -> None:
        match self.way:
            case "dict" | "mapping":
                state[self.self_attn.layer_idx] = (hidden.sin(), {"plain": "text"}["plain"])
            case "nested":
                state["inner"]["first"] = hidden.sin()
            case "list":
                state.append(hidden.sin())
            case "object":
                state.first = hidden.sin()
            case "list inside":
                state["all"] = [hidden.sin()]
            case "in place":
                state.add_(hidden.sin())
            case "stream":
                state[0].mul_(1.5)
            case "module":
                self.left = hidden.sin()
            case "buffer":
                self.total.add_(hidden.sum())

    def given(self, state: Any) -> Tensor | None:
        match self.way:
            case "dict" | "mapping":
                return state[0][0] + state[1][0]
            case "nested":
                return state["inner"]["first"]
            case "list":
                return state[0] * state[-1]
            case "object" | "in place" | "stream":
                return state.first if self.way == "object" else None
            case "module":
                return self.first.left
        return None


class PassingModel(LlamaModel):
    """Llama's loop over its layers, with a shared object that every layer gets."""

    way = ""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        mask = None
        if self.config._attn_implementation == "eager":
            length = hidden.shape[1]
            mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
        around = self.rotary_emb(hidden, position_ids=position_ids)
        states: dict[str, Any] = {
            "dict": {}, "mapping": UserDict(), "nested": {"inner": {}}, "list": [], "object": SimpleNamespace(),
            "list inside": {}, "in place": torch.zeros_like(hidden), "stream": (torch.ones_like(hidden),),
        }  # fmt: skip
        kwargs.pop("use_cache", None)
        for layer in self.layers:
            given = {"state": states.get(self.way), "position_embeddings": around, "position_ids": position_ids}
            hidden = layer(hidden, attention_mask=mask, **given, **kwargs)
        return SimpleNamespace(
            last_hidden_state=self.norm(hidden), past_key_values=None, hidden_states=None, attentions=None
        )


def passing(way: str) -> LlamaForCausalLM:
    """Return a small llama whose layers pass state on in this way."""
    torch.manual_seed(0)
    config = small_config("llama", num_hidden_layers=LAYERS)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).double()
    model._no_split_modules = ["Passes"]
    model.model.__class__, model.model.way = PassingModel, way
    for layer in model.model.layers:
        layer.__class__, layer.way = Passes, way
        layer.__dict__["first"] = model.model.layers[0]
        if way == "buffer":
            layer.register_buffer("total", torch.zeros((), dtype=torch.float64))
    return model


def errors(way: str, sp: int, weights: str = "none") -> list[float]:
    mesh = init_mesh(sp=sp)
    plans = [MemoryPlan(modes, (False,) * LAYERS, 5, 7) for modes in PLANS]
    return [compare(passing(way), [[small_batch(2, 24)]], mesh, memory=plan, weights=weights).worst for plan in plans]


@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["", "dict", "mapping", "nested", "list"])
def test_replay_shared_container_every_mode_is_exact(way: str) -> None:
    assert max(run_ranks(1, errors, way, 1)[0]) < FP64


@pytest.mark.slow
def test_replay_shared_mapping_over_fsdp2_ranks_is_exact() -> None:
    assert max(max(each) for each in run_ranks(2, errors, "mapping", 2, "shard")) < FP64


def copied(way: str, memory: str | None) -> tuple[str, bool]:
    model = passing(way)
    with pytest.raises(UnsupportedError) as caught:
        parallelize(model, init_mesh(sp=2), memory=memory, allow_untested=True)  # type: ignore[arg-type]
    return str(caught.value), is_bound(model)


@pytest.mark.parametrize("memory", ["auto", None])
@pytest.mark.parametrize("way", ["dict", "list"])
def test_parallelize_container_copied_by_fsdp2_is_refused(way: str, memory: str | None) -> None:
    for said, bound in run_ranks(2, copied, way, memory):
        assert re.match(rf"layer 0 changes a {way} that it is given, and FSDP2 gives every layer a copy", said)
        assert not bound


REFUSED = {
    "object": r"layer 0 changes a SimpleNamespace that it is given \(argument state\)",
    "list inside": r"layer 0: a layer puts a list into a dict that it is given \(argument state\)",
    "in place": r"layer 0 writes into a tensor that it is given \(argument state\)",
    "stream": r"layer 0 writes into a tensor that it is given \(argument state\)",
    "module": r"layer 0 leaves tensors on a module \(layer 0: \.left\)",
    "buffer": r"layer 0 leaves tensors on a module \(layer 0: \.total\)",
}


def refused(way: str) -> tuple[str, bool]:
    model, mesh = passing(way), init_mesh(sp=1)
    with pytest.raises(UnsupportedError) as caught:
        parallelize(model, mesh, memory={"layers": (K, S, K, K), "offload": False})
    return str(caught.value), is_bound(model)


@pytest.mark.parametrize("way", REFUSED)
def test_parallelize_unreplayable_layers_are_refused(way: str) -> None:
    said, bound = run_ranks(1, refused, way)[0]
    assert re.match(REFUSED[way], said), said
    assert said.endswith("use memory=None, or 'keep' for every layer")
    assert not bound, "the model is as it was"


def kept(way: str) -> tuple[float, set[str]]:
    """Return the error of a step under memory="auto" with layers that cannot run again, and the modes of the plan."""
    plans: list[Any] = []

    def prepare(model: Any, mesh: Any, **options: Any) -> Any:
        plans.append(parallelize(model, mesh, **options))
        return plans[-1]

    worst = compare(passing(way), [[small_batch(2, 24)]], init_mesh(sp=1), prepare=prepare).worst
    plan = planner_of(plans[0]).plan  # type: ignore[union-attr]
    assert plan is not None
    return worst, set(plan.layers)


@pytest.mark.parametrize("way", ["object", "module", "in place"])
def test_memory_auto_unreplayable_layers_are_kept(way: str) -> None:
    worst, modes = run_ranks(1, kept, way)[0]
    assert modes == {"keep"}
    assert worst < FP64
