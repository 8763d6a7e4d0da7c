"""Checkpoints: bit for bit at the same degrees, and the same values at any others.

Weights, moments and step counts, sharded, copied or plain, 8-bit ones too; what does not belong to the model at hand is
refused with what differs. `test_whole.py` has what happens when files break, disks are full and processes are killed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ithaca.errors import CheckpointError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.state.checkpoint import dcp
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.state.checkpoint.low_bit_moments import moment
from ithaca.state.checkpoint.state_tensors import check_fingerprint, fingerprint, start, state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.weights.shards import bounds
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks


def build(sp: int, *, dp: int = 1, seed: int = 0, **settings: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    mesh = init_mesh(sp=sp, dp=dp)
    model = parallelize(small_model("llama", dtype=torch.float32, seed=seed), mesh, memory=None, **settings)
    return mesh, model, build_optimizer(model, lr=3e-3, weight_decay=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, mesh: Any, steps: range) -> None:
    for step in steps:
        causal_loss(model, small_batch(seed=step), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: t.full_tensor().clone() if isinstance(t, DTensor) else t.clone() for key, t in tensors.items()}


def differs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [key for key in ours if ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key])]


def write(folder: str, sp: int, dp: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    mesh, model, optimizer = build(sp, dp=dp, **settings)
    tensors = state_tensors(model, optimizer)
    train(model, optimizer, mesh, range(2))
    keeper = Checkpoints(Path(folder), 2, mesh, background=True)
    keeper.save(2, tensors, {"seen": [1, 2.5]})
    keeper.wait()
    return whole(tensors)


def read(folder: str, sp: int, dp: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    mesh, model, optimizer = build(sp, dp=dp, seed=1, **settings)
    tensors = state_tensors(model, optimizer)
    keeper = Checkpoints(Path(folder), 2, mesh, background=True)
    path = keeper.latest()
    assert path is not None
    assert keeper.read_facts(path) == {"seen": [1, 2.5], "step": 2}
    keeper.load(path, tensors)
    return whole(state_tensors(model, optimizer))


DEGREES = {"one": (1, 1, {}), "sp2": (2, 1, {}), "dp2sp2": (2, 2, {})}
COPIES = {"sp4": (4, 1, {}), "copies": (4, 1, {"replicas": 2}), "whole": (2, 1, {"weights": "replicate"})}


@pytest.mark.parametrize("wrote", [d if d == "sp2" else pytest.param(d, marks=pytest.mark.slow) for d in DEGREES])
def test_checkpoint_of_other_degrees_is_read(wrote: str, tmp_path: Path) -> None:
    """One, two and four ranks, in all directions: every weight, moment and count."""
    sp, dp, settings = DEGREES[wrote]
    saved = run_ranks(sp * dp, write, str(tmp_path), sp, dp, settings)[0]
    assert sum(key.startswith("optimizer.") for key in saved) == 3 * sum(key.startswith("model.") for key in saved)
    for sp, dp, settings in DEGREES.values():
        for found in run_ranks(sp * dp, read, str(tmp_path), sp, dp, settings):
            assert differs(found, saved) == []


@pytest.mark.slow
@pytest.mark.parametrize("wrote", list(COPIES))
def test_checkpoint_copies_are_written_once(wrote: str, tmp_path: Path) -> None:
    sp, dp, settings = COPIES[wrote]
    saved = run_ranks(sp * dp, write, str(tmp_path), sp, dp, settings)[0]
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert size < 1.2 * sum(tensor.nbytes for tensor in saved.values())
    for sp, dp, settings in [*COPIES.values(), *DEGREES.values()]:
        for found in run_ranks(sp * dp, read, str(tmp_path), sp, dp, settings):
            assert differs(found, saved) == []


def resume(folder: str, spoil: bool) -> list[str]:
    """Four steps at once against two, a checkpoint, another model, and two more."""
    mesh, model, optimizer = build(2)
    train(model, optimizer, mesh, range(4))
    undisturbed = whole(state_tensors(model, optimizer))
    mesh, model, optimizer = build(2)
    keeper = Checkpoints(Path(folder), 2, mesh, background=True)
    train(model, optimizer, mesh, range(2))
    keeper.save(2, state_tensors(model, optimizer), {})
    # The copy was taken when save returned: going on must not reach the file.
    train(model, optimizer, mesh, range(2, 3))
    mesh, model, optimizer = build(2, seed=1)
    path = keeper.latest()
    assert path is not None
    tensors = state_tensors(model, optimizer)
    keeper.load(path, {key: tensor for key, tensor in tensors.items() if not (spoil and key.endswith("step"))})
    train(model, optimizer, mesh, range(2, 4))
    return differs(whole(state_tensors(model, optimizer)), undisturbed)


def test_resumed_run_equals_undisturbed_bitwise(tmp_path: Path) -> None:
    assert run_ranks(2, resume, str(tmp_path), False) == [[], []]


def spoiled_resume(folder: str) -> list[str]:
    """Step counts are left at zero."""
    with patch.object(dcp, "_check", lambda *_: None):
        return resume(folder, True)


def test_resumed_run_without_step_count_is_detected(tmp_path: Path) -> None:
    assert all(run_ranks(2, spoiled_resume, str(tmp_path)))


def save_inside_a_step(folder: str) -> tuple[int, list[str]]:
    """Save from within forward, while FSDP2 has a layer gathered, from tensors taken at rest."""
    mesh, model, optimizer = build(2)
    tensors = state_tensors(model, optimizer)
    train(model, optimizer, mesh, range(1))
    rest = whole(tensors)
    keeper = Checkpoints(Path(folder), 2, mesh, background=False)
    gathered = []

    def hook(layer: Any, *_: Any) -> None:
        gathered.append(sum(not isinstance(p, DTensor) for p in layer.parameters()))
        keeper.save(1, tensors, {})

    handle = model.model.layers[1].mlp.register_forward_hook(hook)
    causal_loss(model, small_batch(), mesh)
    handle.remove()
    path = keeper.latest()
    assert path is not None
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    keeper.load(path, tensors)
    return gathered[0], differs(whole(tensors), rest)


def test_save_inside_a_step_is_whole(tmp_path: Path) -> None:
    for gathered, wrong in run_ranks(2, save_inside_a_step, str(tmp_path)):
        assert gathered > 0
        assert wrong == []


def keep_of(folder: str | Path, *, background: bool = False, keep: int = 2) -> Checkpoints:
    return Checkpoints(Path(folder), keep, init_mesh(), background=background)


def numbers(step: int) -> dict[str, Tensor]:
    return {"a": torch.full((64, 3), float(step)), "b": torch.arange(5) + step}


def other_models(folder: str) -> list[str]:
    """Return the refusals of tensors that differ from the saved ones."""
    keeper = keep_of(folder)
    keeper.save(1, numbers(1), {})
    path = keeper.folder / "step-00000001"
    said = []
    for tensors in (
        {**numbers(0), "c": torch.zeros(2)},
        {"a": numbers(0)["a"]},
        {**numbers(0), "a": torch.zeros(64, 2)},
        {**numbers(0), "a": torch.zeros(64, 3, dtype=torch.bfloat16)},
    ):
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        try:
            keeper.load(path, tensors)
        except CheckpointError as error:
            said.append(str(error))
        assert differs(tensors, before) == []
    return said


def test_load_other_model_is_refused_by_difference(tmp_path: Path) -> None:
    said = run_ranks(1, other_models, str(tmp_path))[0]
    for expected, message in zip(
        ("does not hold c", "unlike this run, b", r"a as \[64, 3\] float32 for \[64, 2\]", "for .* bfloat16"),
        said,
        strict=True,
    ):
        assert re.search(expected, message)


def test_fingerprint_differs_between_models() -> None:
    model = small_model("llama")
    check_fingerprint(fingerprint(small_model("llama", seed=5, dtype=torch.bfloat16)), model)
    for other, match in (
        (small_model("qwen3"), "a Qwen3ForCausalLM of"),
        (small_model("llama", hidden_size=64), "other sizes"),
    ):
        with pytest.raises(CheckpointError, match=match):
            check_fingerprint(fingerprint(other), model)


@pytest.mark.parametrize("in_backward", [False, True])
def test_start_optimizer_changes_no_weight(in_backward: bool) -> None:
    model = small_model("llama", dtype=torch.float32)
    optimizer = build_optimizer(model, lr=3e-3, weight_decay=0.1, in_backward=in_backward)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    start(optimizer)
    assert all(torch.equal(before[key], p) and p.grad is None for key, p in model.named_parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3] * 2
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    assert len(optimizer.state) == len(before)


CODED = {"rows": (32, 512), "flat": (128, 160), "uneven": (33, 512), "small": (16, 16)}


def coded(shape: tuple[int, int], mesh: Any, fill: bool) -> dict[str, Tensor]:
    """A moment in 8 bits, as torchao keeps it on this rank; its numbers tell where in the whole they belong."""
    from torchao.optim import AdamW8bit

    whole = torch.zeros(shape)
    parameter = distribute_tensor(whole, mesh.weights, [Shard(0)]) if mesh.world > 1 else whole
    optimizer = AdamW8bit([torch.nn.Parameter(parameter)])
    value = optimizer._new_buffer(parameter, True)
    if fill:
        first = bounds(parameter)[0].start * shape[1]
        own: Any = value.to_local() if isinstance(value, DTensor) else value
        if hasattr(own, "codes"):
            own.codes.copy_((torch.arange(own.numel()) + first).view(own.shape) % 251)
            own.scale.copy_(torch.arange(own.scale.numel()) + first // 256)
        else:
            own.copy_((torch.arange(own.numel()) + first).view(own.shape))
    return moment("m", value, parameter, optimizer.block_size)  # type: ignore[arg-type]


def write_coded(folder: str) -> None:
    mesh = init_mesh()
    for name, shape in CODED.items():
        Checkpoints(Path(folder) / name, 1, mesh, background=False).save(1, coded(shape, mesh, True), {})


def read_coded(folder: str, names: list[str]) -> list[str]:
    """Names of moments that are not what this rank would have had itself."""
    mesh = init_mesh()
    wrong = []
    for name in names:
        tensors, expected = (coded(CODED[name], mesh, fill) for fill in (False, True))
        Checkpoints(Path(folder) / name, 1, mesh, background=False).load(Path(folder) / name / "step-00000001", tensors)
        wrong += [f"{name} {key}" for key in differs(whole(tensors), whole(expected))]
    return wrong


@pytest.mark.slow
def test_eight_bit_moments_of_equal_blocks_are_read(tmp_path: Path) -> None:
    for wrote in (1, 4):
        run_ranks(wrote, write_coded, str(tmp_path))
        for world in (1, 2, 4):
            # The last shard of the uneven one is too small to be coded on four ranks, and large enough on fewer.
            names = [name for name in CODED if name != "uneven" or (wrote == 4) == (world == 4)]
            assert run_ranks(world, read_coded, str(tmp_path), names) == [[]] * world
    for world in (1, 2):
        expect_refusal(
            world,
            read_coded,
            str(tmp_path),
            ["uneven"],
            error="CheckpointError",
            match=r"8-bit moments such as m\.codes were cut into other blocks",
        )


def resume_eight_bits(folder: str) -> list[str]:
    mesh = init_mesh(sp=2)
    # Wide enough for shards that torchao codes, and narrow ones that it does not.
    model: Any = small_model("llama", dtype=torch.float32, hidden_size=256, intermediate_size=96)
    model = parallelize(model, mesh, memory=None)
    optimizer = build_optimizer(model, "adamw8bit", lr=3e-3)
    keeper = Checkpoints(Path(folder), 1, mesh, background=True)
    tensors = state_tensors(model, optimizer)
    assert {key.rpartition(".")[2] for key in tensors} >= {"codes", "scale", "exp_avg", "step"}
    train(model, optimizer, mesh, range(2))
    keeper.save(2, tensors, {})
    train(model, optimizer, mesh, range(2, 4))
    expected = whole(tensors)
    path = keeper.latest()
    assert path is not None
    keeper.load(path, tensors)
    train(model, optimizer, mesh, range(2, 4))
    return differs(whole(tensors), expected)


@pytest.mark.slow
def test_resumed_run_with_eight_bit_moments_equals_bitwise(tmp_path: Path) -> None:
    assert run_ranks(2, resume_eight_bits, str(tmp_path)) == [[], []]
