"""The meshes that a job can run on: dp x ring x sp over all GPUs, and over a part of them.

All GPUs are not always best for a long row: a number that has no divisor near the heads gives short groups, and GPUs of
one node share its host memory. So GPUs may be left idle, the same number in each node, or whole nodes.

Invariant: a part is left out only if another one that is offered has as much of everything (`_needs`), so that offering
it too would plan no longer a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ithaca.planning.memory_plan import Job
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.request import MeshShape, PlanRequest
from ithaca.planning.terms.activations import TensorBytes, attention_work

# The row that parts of a machine are compared at; their needs are in proportion to its length.
_ROW = 2**20


class SubMesh(NamedTuple):
    """A mesh over all of a machine or a part of it: the request with that machine, and the degrees."""

    request: PlanRequest
    degrees: MeshShape


def all_degrees(request: PlanRequest, *, rings: bool = False) -> list[MeshShape]:
    """Return the degrees that the heads and the batch allow, the least sp first; with `rings`, those of one ring too.

    Unless the user gave sp, a group does not end in the middle of a node that another group shares.
    """
    world, gpus = request.machine.world, request.machine.gpus
    found = []
    for sp in _divisors(world):
        if sp > request.sizes.heads or (sp != request.sp if request.sp is not None else gpus % sp and sp % gpus):
            continue
        dp = world // sp
        if not (request.batch or dp) % dp:
            found.append(MeshShape(dp, 1, sp))
        if rings and dp > 1:
            found.append(MeshShape(1, dp, sp))
    return found


def meshes_of_all(request: PlanRequest) -> list[SubMesh]:
    """Return the meshes over all GPUs, the largest sp first."""
    return [SubMesh(request, degrees) for degrees in reversed(all_degrees(request))]


def meshes_of_parts(request: PlanRequest) -> list[SubMesh]:
    """Return the meshes that leave GPUs idle and can reach further so, the fewest idle first.

    None is returned where the user gave an sp that does not divide all GPUs.
    """
    every = meshes_of_all(request)
    if request.machine.world == 1 or (request.sp is not None and not every):
        return []
    work: dict[int, int] = {}
    found = sorted(
        ((_needs(mesh, work), mesh) for mesh in (*every, *_meshes_with_idle_gpus(request))), key=lambda each: each[0]
    )
    kept: list[tuple[tuple[float, ...], SubMesh]] = []
    for needs, mesh in found:
        # In this order a mesh that needs less of everything comes first.
        if not any(all(a <= b for a, b in zip(less, needs, strict=True)) for less, _ in kept):
            kept.append((needs, mesh))
    left = [mesh for _, mesh in kept if mesh.request is not request]
    return sorted(left, key=lambda mesh: -mesh.request.machine.world)


def _meshes_with_idle_gpus(request: PlanRequest) -> Iterator[SubMesh]:
    """Yield, for every number of GPUs in a node and every sp, the mesh of as many nodes as sp divides."""
    machine, batch = request.machine, request.batch
    for gpus in range(1, machine.gpus + 1):
        for sp in sorted({*_divisors(gpus), *(gpus * nodes for nodes in range(1, machine.nodes + 1))}):
            if sp > request.sizes.heads or (request.sp is not None and sp != request.sp):
                continue
            cuts = [nodes for nodes in range(1, machine.nodes + 1) if gpus * nodes % sp == 0]
            cuts = [nodes for nodes in cuts if batch is None or batch % (gpus * nodes // sp) == 0]
            # More nodes only hold more, but for one rank alone, which gathers no weights.
            for nodes in {*cuts[-1:], *(cuts[:1] if gpus == 1 and sp == 1 else ())}:
                if gpus * nodes < machine.world:
                    part = replace(request, machine=replace(machine, gpus=gpus, nodes=nodes))
                    yield SubMesh(part, MeshShape(gpus * nodes // sp, 1, sp))


def _needs(mesh: SubMesh, work: dict[int, int]) -> tuple[float, ...]:
    """Return a mesh's needs in proportion to a row: one that needs no more of each fits wherever the other does."""
    request, (dp, _, sp) = mesh
    if sp not in work:
        work[sp] = _attention_bytes(request.sizes, sp)
    machine, rows = request.machine, (request.batch or dp) // dp
    heads = -(-request.sizes.heads // sp)
    # Tokens of a rank, its attention's buffers and log-sum-exps; saved tensors of a node's ranks; the state on a node and
    # on a rank. Then: whether weights are gathered, and whether gradients wait for more rows.
    shares = 1 / sp, work[sp], heads, machine.gpus / sp, 1 / machine.nodes, 1 / machine.world
    return *shares, float(machine.world > 1), float(rows > 1)


def _attention_bytes(sizes: ModelSizes, sp: int) -> int:
    tensors = TensorBytes.of(sizes, Job(_ROW, sp=sp), sizes.split(sp).max_head_groups)
    return sum(each.bytes for each in attention_work(tensors, sizes.layers[0], "save"))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
