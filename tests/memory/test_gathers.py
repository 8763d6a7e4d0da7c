"""Under FSDP2: how often a layer's weights are gathered in a step, and how many layers are gathered at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.plan import LayerMode, MemoryPlan
from ithaca.planning.terms.memory_terms import GATHERED, GATHERED_REBUILDING
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

LAYERS = 8


def _watch(layer: nn.Module, index: int, gathers: Counter[int], gathered: set[int], most: list[int]) -> None:
    """Note every time this layer's weights come to be whole and cease to be."""
    state: Any = layer
    [group] = state._get_fsdp_state()._fsdp_param_groups
    whole, sharded = group._to_unsharded, group._to_sharded

    def unshard() -> None:
        if index not in gathered:
            gathers[index] += 1
            gathered.add(index)
            most[0] = max(most[0], len(gathered))
        whole()

    def reshard() -> None:
        gathered.discard(index)
        sharded()

    group._to_unsharded, group._to_sharded = unshard, reshard


def _step(modes: tuple[LayerMode, ...]) -> tuple[dict[int, int], int, int]:
    mesh = init_mesh(sp=2)
    plan = MemoryPlan(modes, (False,) * LAYERS, mlp_tile=5, loss_tile=4)
    model = parallelize(small_model("llama", num_hidden_layers=LAYERS), mesh, memory=plan)
    batch = small_batch(1, 24)
    causal_loss(model, batch, mesh).backward()
    gathers: Counter[int] = Counter()
    gathered: set[int] = set()
    most = [0]
    for index, layer in enumerate(model.model.layers):
        _watch(layer, index, gathers, gathered, most)
    causal_loss(model, batch, mesh).backward()
    return dict(gathers), most[0], len(gathered)


@pytest.mark.parametrize("mode", ["keep", "save", "recompute"])
def test_weights_of_recomputed_layer_are_gathered_twice(mode: LayerMode) -> None:
    for gathers, most, left in run_ranks(2, _step, (mode,) * LAYERS):
        assert gathers == dict.fromkeys(range(LAYERS), 2), "once forward, once backward"
        assert most <= GATHERED
        assert left == 0


def test_weights_of_rebuilt_layer_are_gathered_once_more() -> None:
    """The last layer of a chain is the one whose backward needs the others run again; it is not itself."""
    chain: tuple[LayerMode, ...] = ("save", "rebuild", "rebuild", "rebuild")
    for gathers, most, left in run_ranks(2, _step, chain * (LAYERS // 4)):
        assert gathers == {index: 2 if index % 4 == 3 else 3 for index in range(LAYERS)}
        assert most <= GATHERED_REBUILDING
        assert left == 0
