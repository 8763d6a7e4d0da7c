"""Placements of weights change nothing but memory: copies of sharded weights, weights on the host.

HSDP is compared with one process in fp64, gradients and three steps; which rank holds which shard is looked at. On
the CPU the device is the host, so keeping weights there must be the very same run; FSDP2's own way to the host is
run too, unpinned, by pretending that the CPU is another device.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.utils import clip_grad_norm_

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import binding_of
from ithaca.models.files.write_weights import save_pretrained
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.weights import placement as placement
from ithaca.state.weights.placement import _sum_gradients
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.batches import micro_batches
from tests.parity.cases import parity_on_rank
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FAULT, FP64

KINDS = ["plain", "packed", "left_padded"]
CLIP = 0.1
SETTINGS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("kind", "degrees", "replicas"),
    [
        ("llama", (1, 2), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", (2, 2), 2), ("llama", (1, 4), 2), ("llama", (1, 4), 4), ("mixtral", (1, 4), 2))
        ),
    ],
    ids=str,
)
def test_replicas_gradients_equal_one_process(kind: str, degrees: tuple[int, int], replicas: int) -> None:
    world = degrees[0] * degrees[1]
    results = run_ranks(world, parity_on_rank, kind, degrees, 2, KINDS[:2], {}, experts=False, replicas=replicas)
    assert max(result.worst for result in results) < FP64


def _not_summed(module: FSDPModule, uneven: bool) -> None:
    _sum_gradients(module, uneven)
    module.set_requires_all_reduce(False)


def _parity_not_summed() -> float:
    with patch.object(placement, "_sum_gradients", _not_summed):
        return parity_on_rank("llama", (1, 4), 1, ["plain"], {}, replicas=2).worst


def test_replicas_not_summed_are_detected() -> None:
    assert min(run_ranks(4, _parity_not_summed)) > FAULT


def _shards(replicas: int) -> tuple[float, list[int]]:
    """A number that tells this rank's shard of the embeddings, and its size."""
    mesh = init_mesh(sp=4)
    model = parallelize(small_model("llama"), mesh, replicas=replicas)
    weight = model.model.embed_tokens.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    return float(local.double().sum()), list(local.shape)


@pytest.mark.slow
def test_replicas_are_on_neighbouring_ranks() -> None:
    """61 rows: 31 and 30 with two copies over four ranks, 16, 16, 16 and 13 with one, all with four."""
    sums, shapes = zip(*run_ranks(4, _shards, 2), strict=True)
    assert [shape[0] for shape in shapes] == [31, 30, 31, 30]
    assert sums[0] == sums[2] != sums[1] == sums[3]
    assert [shape[0] for _, shape in run_ranks(4, _shards, 1)] == [16, 16, 16, 13]
    assert [shape[0] for _, shape in run_ranks(4, _shards, 4)] == [61] * 4


def _three_steps(degrees: tuple[int, int], replicas: int, lr: float) -> float:
    """The worst difference of any weight from one process's, both ways with AdamW and clipped."""
    # DTensor remembers results by equal meshes, those of process groups that an earlier test has left among them.
    _clear_sharding_prop_cache()
    mesh = init_mesh(dp=degrees[0], sp=degrees[1])
    alone = small_model("llama")
    with compute_in_fp64():
        parallel = parallelize(copy.deepcopy(alone), mesh, replicas=replicas)
        ours = build_optimizer(parallel, **SETTINGS)
        decayed = [p for p in alone.parameters() if p.ndim > 1]
        groups = [{"params": decayed}, {"params": [p for p in alone.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        theirs = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(3):
            batches = micro_batches(degrees[0], 1, KINDS[step:] + KINDS[:step])
            reference(alone, batches)
            own = batches[mesh.dp_rank]
            count = count_tokens(own, mesh)
            for batch in own:
                causal_loss(parallel, batch, mesh, count=count).backward()
            for model, optimizer in ((parallel, ours), (alone, theirs)):
                assert float(_whole(clip_grad_norm_(model.parameters(), CLIP))) > CLIP
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(parallel.parameters(), alone.parameters(), strict=True)
    return max(relative_error(_whole(p), q) for p, q in pairs)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("degrees", "replicas"), [((1, 1), 1), ((1, 2), 1), pytest.param((2, 2), 2, marks=pytest.mark.slow)], ids=str
)
def test_three_steps_equal_one_process(degrees: tuple[int, int], replicas: int) -> None:
    assert max(run_ranks(degrees[0] * degrees[1], _three_steps, degrees, replicas, 3e-3)) < FP64


def test_three_steps_other_learning_rate_is_detected() -> None:
    assert min(run_ranks(2, _three_steps, (1, 2), 1, 3.01e-3)) > FAULT


def _refused(**options: Any) -> None:
    parallelize(small_model("llama"), init_mesh(sp=dist.get_world_size()), **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"replicas": 3}, "MeshError", "replicas=3 over 4 ranks: a divisor of the world is needed: 1, 2, 4"),
        ({"replicas": 0}, "MeshError", "replicas=0 over 4 ranks"),
        ({"replicas": True}, "MeshError", "replicas=True over 4 ranks"),
        ({"replicas": 2, "weights": "replicate"}, "UnsupportedError", "weights='replicate': .* need weights='shard'"),
        ({"replicas": 2, "weights": "none"}, "UnsupportedError", "weights='none': .* need weights='shard'"),
        ({"weights": "some"}, "UnsupportedError", "weights='some': choose one of shard, replicate, none"),
        ({"on_host": "disk"}, "UnsupportedError", "on_host='disk': choose one of nothing, everything"),
        ({"on_host": "optimizer"}, "UnsupportedError", "optimizer state alone cannot .* use 'everything', or"),
        ({"on_host": "everything", "weights": "none"}, "UnsupportedError", "weights are yours to place; use 'shard'"),
    ],
    ids=str,
)
def test_wrong_placement_is_refused_on_all_ranks(options: dict[str, Any], error: str, match: str) -> None:
    expect_refusal(4, _refused, error=error, match=match, **options)


PLAN = MemoryPlan(("save", "save"), (True, True), 8, 8)


def _after_two_steps(pretend: bool, options: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """Return all weights, and True if FSDP2 sharded them. `pretend`: the host counts as another device."""
    mesh = init_mesh(sp=dist.get_world_size())
    with ExitStack() as stack:
        if pretend:
            _pretend(stack)
        model = parallelize(small_model("llama", dtype=torch.float32), mesh, memory=PLAN, **options)
    optimizer = build_optimizer(model, **SETTINGS)
    for seed in range(2):
        causal_loss(model, small_batch(1, 24, seed=seed), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(p).detach() for p in model.parameters()], isinstance(model, FSDPModule)


def _pretend(stack: ExitStack) -> None:
    stack.enter_context(patch.object(placement, "leaves_device", lambda mesh, on_host: on_host == "everything"))
    stack.enter_context(patch.object(placement, "_to_host", lambda: CPUOffloadPolicy(pin_memory=False)))


@pytest.mark.few(2)
@pytest.mark.parametrize("pretend", [False, True])
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_weights_on_host_equal_bitwise(world: int, replicas: int, pretend: bool) -> None:
    options = {"replicas": replicas}
    here = run_ranks(world, _after_two_steps, False, options)
    there = run_ranks(world, _after_two_steps, pretend, {**options, "on_host": "everything"})
    assert there[0][1] == (world > 1 or pretend)
    for (expected, _), (got, _) in zip(here, there, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def _job(pretend: bool) -> tuple[str, int, list[bool]]:
    """Return the job that memory='auto' plans for."""
    mesh = init_mesh(sp=dist.get_world_size())
    with ExitStack() as stack:
        if pretend:
            _pretend(stack)
        replicas = 2 if mesh.world > 1 else 1
        model = parallelize(small_model("llama"), mesh, on_host="everything", replicas=replicas)
    installed = binding_of(model).memory
    assert installed is not None
    assert installed.planner is not None
    job = installed.planner.job
    return job.weights, job.shards, [job.weights_on_host, job.gradients_on_host, job.optimizer_on_host]


def test_weights_on_host_are_in_the_job() -> None:
    assert run_ranks(1, _job, True) == [("shard", 1, [True] * 3)]
    assert run_ranks(1, _job, False) == [("none", 1, [False] * 3)]
    assert run_ranks(4, _job, True) == [("shard", 2, [True] * 3)] * 4


def _saved(folder: str) -> None:
    _clear_sharding_prop_cache()
    with ExitStack() as stack:
        _pretend(stack)
        model = parallelize(small_model("llama"), init_mesh(sp=4), on_host="everything", replicas=2)
    save_pretrained(model, folder)


def test_weights_on_host_are_saved_whole(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    run_ranks(4, _saved, str(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    expected = small_model("llama").state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in written.items())
    assert len(written) >= len(expected) - 1
