"""Mesh of the ranks: dp x ring x sp, with sp innermost so that a sequence group is on neighbouring GPUs.

Eight ranks as dp=2 x ring=1 x sp=4:

    sp ->      0   1   2   3      share row A: a sequence group (`sequence`: ring x sp, flattened)
    dp = 1     4   5   6   7      share row B
               |
               `data`: ranks 0 and 4 have different rows

`weights` has all ranks: FSDP2 shards parameters and sums gradients over it. `host_group` has all ranks too, for numbers
that are on the host already, so that no device waits for them. This is the only module that reads launch variables from
the environment.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ithaca.arguments import named_arguments, shown
from ithaca.errors import MeshError

AXES = ("dp", "ring", "sp")
MeshParam = tuple[int, int] | Mapping[str, int] | str


@dataclass(frozen=True, slots=True)
class AxisDegrees:
    """Number of ranks of each axis."""

    dp: int
    ring: int
    sp: int

    @property
    def world(self) -> int:
        return self.dp * self.ring * self.sp


@dataclass(frozen=True, eq=False)
class Mesh:
    """A joined process group cut into axes; made by `init_mesh`."""

    degrees: AxisDegrees
    device: torch.device
    device_mesh: DeviceMesh
    weights: DeviceMesh
    sequence: DeviceMesh
    # None, as in a mesh made by hand: the default group.
    host_group: dist.ProcessGroup | None = None

    @property
    def dp(self) -> int:
        return self.degrees.dp

    @property
    def ring(self) -> int:
        return self.degrees.ring

    @property
    def sp(self) -> int:
        return self.degrees.sp

    @property
    def data(self) -> DeviceMesh:
        return self.device_mesh["dp"]

    @property
    def world(self) -> int:
        return self.degrees.world

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def dp_rank(self) -> int:
        return self.device_mesh.get_local_rank("dp")

    @property
    def sp_rank(self) -> int:
        return self.device_mesh.get_local_rank("sp")

    @property
    def sequence_rank(self) -> int:
        return self.sequence.get_local_rank()

    @property
    def shards(self) -> int:
        """Number of shards that a row is cut into."""
        return self.degrees.ring * self.degrees.sp

    @property
    def local_ranks(self) -> int:
        """Number of ranks on this host, by the launcher's environment variable."""
        return ranks_here(self.world)

    @property
    def sp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("sp")

    @property
    def world_group(self) -> dist.ProcessGroup:
        return self.weights.get_group()

    def __deepcopy__(self, _memo: object) -> Mesh:
        """Return the mesh itself: a copy of a model runs on the same ranks, and process groups cannot be copied."""
        return self

    def __str__(self) -> str:
        return f"dp={self.dp} x ring={self.ring} x sp={self.sp} on {self.device.type}"


@named_arguments
def init_mesh(
    sp: int | None = None,
    *,
    dp: int | None = None,
    ring: int = 1,
    mesh_param: MeshParam | None = None,
    device: str | torch.device | None = None,
) -> Mesh:
    """Initialize torch.distributed if needed, and cut the world into dp x ring x sp.

    `init_mesh(sp=4)` takes the rest of the world as dp. `mesh_param` is `(dp, sp)`, or a dict or JSON text
    with `data_parallel_size` and `sequence_parallel_size`. The device follows the launch: one GPU a
    process where there are any, else the CPU.
    """
    if mesh_param is not None:
        if sp is not None or dp is not None:
            raise MeshError(f"got mesh_param={mesh_param!r} beside sp={sp}, dp={dp}: pass one or the other")
        dp, sp = _read_mesh_param(mesh_param)
    for name, degree in (("sp", sp), ("dp", dp), ("ring", ring)):
        if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise MeshError(f"{name}={shown(degree)}: a degree is a whole number of at least 1")
    _check_device(device)
    world = dist.get_world_size() if dist.is_initialized() else _launched_world()
    degrees = fit_degrees(world, sp=sp or 1, dp=dp, ring=ring)
    target = _join(device)
    device_mesh = init_device_mesh(target.type, (degrees.dp, degrees.ring, degrees.sp), mesh_dim_names=AXES)
    # DeviceMesh._flatten is private (torch 2.11 to 2.13) and the only way to one group of several axes. It is a
    # collective: all ranks make the groups in this order.
    weights = device_mesh._flatten("weights")
    sequence = device_mesh["ring", "sp"]._flatten("sequence")
    return Mesh(degrees, target, device_mesh, weights, sequence, _host_group(weights.get_group()))


def _host_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the host: the world's own if it takes them, else one over gloo."""
    return world if "cpu:" in dist.get_backend_config(world) else dist.new_group(backend="gloo")


def check_mesh(mesh: object) -> None:
    """Refuse an object that is not an `ithaca.Mesh`, such as torch's DeviceMesh."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh={shown(mesh)}: pass the ithaca.Mesh that ithaca.init_mesh(sp=...) gives")


def fit_degrees(world: int, *, sp: int, dp: int | None = None, ring: int = 1) -> AxisDegrees:
    """Return the degrees whose product is `world`; raise MeshError that names degrees that work."""
    inner = sp * ring
    processes = f"{world} process{'es' if world > 1 else ''}"
    if dp is None:
        if world % inner:
            named = f"sp={sp}" + (f" x ring={ring}" if ring > 1 else "")
            start = f"{_start(inner)} or " if world < inner else ""
            raise MeshError(f"{named} does not divide a world of {processes}: {start}{_nearest(world, sp, ring)}")
        dp = world // inner
    if dp * inner != world:
        named = f"dp={dp} x sp={sp}" if ring == 1 else f"dp={dp} x ring={ring} x sp={sp}"
        fix = f"{_start(dp * inner)} or {_nearest(world, sp, ring)}"
        if world % inner == 0:
            fix = f"dp={world // inner} makes {world}"
        raise MeshError(f"{named} is {dp * inner}, but the world has {processes}: {fix}")
    return AxisDegrees(dp, ring, sp)


def _start(processes: int) -> str:
    return f"start {processes} processes (torchrun --nproc-per-node {processes} ...)"


def _nearest(world: int, sp: int, ring: int) -> str:
    works = [d for d in range(1, world + 1) if world % (d * ring) == 0]
    if not works:
        return f"use ring=1 with sp={largest_divisor(world, sp)}"
    best = min(works, key=lambda d: (abs(d - sp), d))
    return f"use sp={best} (dp={world // (best * ring)})"


def largest_divisor(world: int, limit: int) -> int:
    """Return the largest divisor of `world` that is at most `limit`."""
    return max(d for d in range(1, world + 1) if world % d == 0 and d <= max(limit, 1))


def _read_mesh_param(param: MeshParam) -> tuple[int | None, int]:
    if isinstance(param, str):
        try:
            param = json.loads(param)
        except json.JSONDecodeError as error:
            raise MeshError(
                f'mesh_param={param!r} is not JSON ({error.msg}): write {{"data_parallel_size": 2, '
                '"sequence_parallel_size": 4}'
            ) from None
    if isinstance(param, Mapping):
        known = {"data_parallel_size", "sequence_parallel_size"}
        unknown = sorted(map(str, set(param) - known))
        if unknown or "sequence_parallel_size" not in param:
            problem = f"the unknown key {unknown[0]!r}" if unknown else "no sequence_parallel_size"
            raise MeshError(f"mesh_param has {problem}: it takes data_parallel_size and sequence_parallel_size")
        return param.get("data_parallel_size"), param["sequence_parallel_size"]
    if isinstance(param, list | tuple) and len(param) == 2:
        return param[0], param[1]
    raise MeshError(f"mesh_param={shown(param)}: pass (dp, sp), or a dict or JSON with sequence_parallel_size")


def ranks_here(otherwise: int = 1) -> int:
    """Return the number of ranks that the launcher started on this host; `otherwise` without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(otherwise)))


def _launched_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_device(device: str | torch.device | None) -> None:
    try:
        known = device is None or torch.device(device).type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise MeshError(f"device={shown(device)}: use 'cuda', 'cpu', or None for what the launch has")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise MeshError(f"device={str(device)!r}: this process sees no GPU; use 'cpu' or None")


def _join(device: str | torch.device | None) -> torch.device:
    """Return this process's device, after joining the world: NCCL on CUDA, gloo on the CPU."""
    kind = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is None and dist.is_initialized() and dist.get_backend() == "gloo":
        kind = torch.device("cpu")
    if kind.type == "cuda" and kind.index is None:
        kind = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if kind.type == "cuda":
        torch.cuda.set_device(kind)
    if not dist.is_initialized():
        backend = "nccl" if kind.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, device_id=kind if kind.type == "cuda" else None)
        else:
            # A plain `python script.py`: a world of one. HashStore is private (torch 2.11 to 2.13); the public stores
            # need a port or a file.
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    return kind


def _leave() -> None:
    """Destroy the process group at exit; gloo's threads otherwise abort a finished process now and then.

    Not after an exception: the other ranks may be in a collective that this rank has left, and destroying would wait.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
