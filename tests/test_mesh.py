"""The mesh: degrees that fit or are refused with the ones that do, groups with the right members, any launch.

What would go wrong without it: a sequence spread over distant ranks, a degree changed in silence, a world that
hangs because a process expects peers nobody started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.errors import MeshError
from ithaca.mesh import AxisDegrees, fit_degrees, init_mesh, largest_divisor
from tests.ranks import expect_refusal, run_ranks

ROOT = Path(__file__).resolve().parent.parent
BOTH = {"data_parallel_size": 2, "sequence_parallel_size": 2}


@pytest.mark.parametrize(
    ("world", "asked", "given"),
    [
        (1, {"sp": 1}, (1, 1, 1)),
        (8, {"sp": 4}, (2, 1, 4)),
        (8, {"sp": 1}, (8, 1, 1)),
        (8, {"sp": 8}, (1, 1, 8)),
        (6, {"sp": 3, "dp": 2}, (2, 1, 3)),
        (8, {"sp": 2, "ring": 2}, (2, 2, 2)),
        (12, {"sp": 3, "ring": 2, "dp": 2}, (2, 2, 3)),
    ],
)
def test_degrees_fitting_world_are_returned(world: int, asked: dict[str, int], given: tuple[int, int, int]) -> None:
    degrees = fit_degrees(world, **asked)
    assert astuple(degrees) == given
    assert degrees.world == world


@pytest.mark.parametrize(
    ("world", "asked", "message"),
    [
        (8, {"sp": 3}, r"sp=3 does not divide a world of 8 processes: use sp=2 \(dp=4\)"),
        (8, {"sp": 5}, r"use sp=4 \(dp=2\)"),
        (1, {"sp": 2}, r"a world of 1 process: start 2 processes \(torchrun --nproc-per-node 2 \.\.\.\) or use sp=1"),
        (4, {"sp": 16}, r"torchrun --nproc-per-node 16 \.\.\.\) or use sp=4 \(dp=1\)"),
        (4, {"sp": 4, "ring": 2}, r"sp=4 x ring=2 does not divide .* start 8 processes .* or use sp=2 \(dp=1\)"),
        (3, {"sp": 3, "ring": 2}, r"use ring=1 with sp=3"),
        (8, {"sp": 4, "dp": 4}, r"dp=4 x sp=4 is 16, but the world has 8 processes: dp=2 makes 8"),
        (8, {"sp": 3, "dp": 2}, r"dp=2 x sp=3 is 6, .*: start 6 processes .* or use sp=2 \(dp=4\)"),
        (
            4,
            {"sp": 8, "dp": 2},
            r"dp=2 x sp=8 is 16, .*: start 16 processes .*--nproc-per-node 16 .* or use sp=4 \(dp=1\)",
        ),
        (8, {"sp": 2, "ring": 2, "dp": 4}, r"dp=4 x ring=2 x sp=2 is 16, .*: dp=2 makes 8"),
    ],
)
def test_degrees_not_fitting_name_nearest(world: int, asked: dict[str, int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        fit_degrees(world, **asked)


@pytest.mark.parametrize("world", range(1, 13))
def test_degrees_named_by_error_work(world: int) -> None:
    for sp in range(1, 14):
        for ring in (1, 2, 3):
            try:
                fit_degrees(world, sp=sp, ring=ring)
            except MeshError as error:
                named = str(error).rpartition("use ")[2]
                choice = dict(part.strip("()").split("=") for part in named.split() if "=" in part)
                fit_degrees(world, sp=int(choice["sp"]), ring=int(choice.get("ring", ring)))


def test_largest_divisor_is_at_most_limit() -> None:
    assert [largest_divisor(12, limit) for limit in (0, 1, 4, 5, 6, 11, 12, 99)] == [1, 1, 4, 4, 6, 6, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sp": 0}, r"sp=0: a degree is a whole number of at least 1"),
        ({"sp": -2}, r"sp=-2: a degree"),
        ({"sp": True}, r"sp=True: a degree"),
        ({"sp": 2.5}, r"sp=2\.5: a degree"),
        ({"sp": "2"}, r"sp='2': a degree"),
        ({"sp": 1, "dp": 0}, r"dp=0: a degree"),
        ({"sp": 1, "ring": 0}, r"ring=0: a degree"),
        ({"mesh_param": (1, 0)}, r"sp=0: a degree"),
        ({"mesh_param": {"sequence_parallel_size": 2.5}}, r"sp=2\.5: a degree"),
        (
            {"mesh_param": {"sp_size": 2}},
            r"unknown key 'sp_size': it takes data_parallel_size and sequence_parallel_size",
        ),
        ({"mesh_param": {"data_parallel_size": 2}}, r"no sequence_parallel_size: it takes"),
        (
            {"mesh_param": "{sp: 2}"},
            r"is not JSON .*: write \{\"data_parallel_size\": 2, \"sequence_parallel_size\": 4\}",
        ),
        ({"mesh_param": (1, 2, 3)}, r"pass \(dp, sp\), or a dict or JSON"),
        ({"mesh_param": 4}, r"mesh_param=4: pass \(dp, sp\)"),
        ({"mesh_param": "4"}, r"mesh_param=4: pass \(dp, sp\)"),
        ({"mesh_param": (1, 1), "sp": 1}, r"got mesh_param=\(1, 1\) beside sp=1, dp=None: pass one or the other"),
        ({"mesh_param": (1, 1), "dp": 1}, r"beside sp=None, dp=1: pass one"),
        ({"device": "tpu"}, r"device='tpu': use 'cuda', 'cpu', or None for what the launch has"),
        ({"device": "meta"}, r"device='meta': use 'cuda', 'cpu', or None"),
        ({"device": 1.5}, r"device=1\.5: use 'cuda', 'cpu', or None"),
    ],
)
def test_mesh_wrong_settings_are_refused_before_joining(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        init_mesh(**arguments)
    assert not dist.is_initialized()


def test_mesh_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeshError, match=r"device='cuda': this process sees no GPU; use 'cpu' or None"):
        init_mesh(device="cuda")


def members(**arguments: Any) -> dict[str, Any]:
    mesh = init_mesh(**arguments)
    sum_over_sp = torch.tensor([float(mesh.rank)])
    dist.all_reduce(sum_over_sp, group=mesh.sp_group)
    return {
        "degrees": astuple(mesh.degrees),
        "views": [mesh.data.mesh.tolist(), mesh.sequence.mesh.tolist(), mesh.weights.mesh.tolist()],
        "ranks": (mesh.dp_rank, mesh.sp_rank, mesh.sequence_rank),
        "shards": mesh.shards,
        "sum_over_sp": sum_over_sp.item(),
        "world": dist.get_world_size(mesh.world_group),
        "text": str(mesh),
    }


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "arguments",
    [
        {"sp": 2},
        {"sp": 2, "dp": 2},
        {"mesh_param": (2, 2)},
        {"mesh_param": [2, 2]},
        {"mesh_param": BOTH},
        {"mesh_param": json.dumps(BOTH)},
        {"mesh_param": {"sequence_parallel_size": 2}},
        {"mesh_param": "[2, 2]"},
    ],
    ids=str,
)
def test_mesh_neighbouring_ranks_share_a_sequence(arguments: dict[str, Any]) -> None:
    """Refuse on ranks that have joined already, as under a user's own launcher."""
    for rank, seen in enumerate(run_ranks(4, members, **arguments)):
        first = rank // 2 * 2
        assert seen["degrees"] == (2, 1, 2)
        assert seen["views"] == [[rank % 2, rank % 2 + 2], [first, first + 1], [0, 1, 2, 3]]
        assert seen["ranks"] == (rank // 2, rank % 2, rank % 2)
        assert seen["shards"] == 2
        assert seen["sum_over_sp"] == 2 * first + 1
        assert seen["world"] == 4
        assert seen["text"] == "dp=2 x ring=1 x sp=2 on cpu"


def test_mesh_sp_world_and_sp_1_give_groups() -> None:
    assert [seen["views"][1] for seen in run_ranks(4, members, sp=4)] == [[0, 1, 2, 3]] * 4
    assert [seen["views"][1] for seen in run_ranks(4, members, sp=1)] == [[0], [1], [2], [3]]
    assert [seen["degrees"] for seen in run_ranks(4, members)] == [(4, 1, 1)] * 4


def test_mesh_ring_is_outside_sp() -> None:
    for rank, seen in enumerate(run_ranks(4, members, sp=2, ring=2)):
        assert seen["degrees"] == (1, 2, 2)
        assert seen["views"][1] == [0, 1, 2, 3]
        assert seen["ranks"] == (0, rank % 2, rank)
        assert seen["shards"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sp": 3}, r"sp=3 does not divide a world of 4 processes: use sp=2 \(dp=2\)"),
        ({"mesh_param": (4, 2)}, r"dp=4 x sp=2 is 8, but the world has 4 processes: dp=2 makes 4"),
    ],
    ids=str,
)
def test_mesh_wrong_degree_is_refused_on_every_rank(arguments: dict[str, Any], message: str) -> None:
    expect_refusal(4, init_mesh, error="MeshError", match=message, **arguments)


def plain_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `python script.py` without launch variables."""
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in launch} | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_mesh_plain_process_is_world_of_one() -> None:
    done = plain_python(
        "import ithaca\n"
        "try:\n    ithaca.init_mesh(sp=2)\n"
        "except ithaca.MeshError as error:\n    print(error)\n"
        "mesh = ithaca.init_mesh(sp=1)\n"
        "print(mesh, mesh.rank, mesh.world, mesh.shards)\n"
    )
    assert done.returncode == 0, done.stderr
    refusal, mesh = done.stdout.splitlines()
    assert "torchrun --nproc-per-node 2" in refusal
    assert mesh == "dp=1 x ring=1 x sp=1 on cpu 0 1 1"


def test_degrees_are_hashable_values() -> None:
    assert AxisDegrees(2, 1, 2) == fit_degrees(4, sp=2)
    assert len({AxisDegrees(2, 1, 2), fit_degrees(4, sp=2)}) == 1
