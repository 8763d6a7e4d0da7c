"""Where a job can run: every cut of all the GPUs into dp x ring x sp, and cuts of a part of them.

All GPUs are not always best for a long row: a number that has no divisor near the heads is cut into short groups, and
GPUs of one node share its host memory. So GPUs may be left idle, the same number in each node, or whole nodes.

Invariant: a part that is left out has no more of anything than another that is offered (`_needs`), so that offering it
too would plan no longer a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ithaca.planning.memory_plan import Job
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.request import Degrees, Wanted
from ithaca.planning.terms.activations import TensorBytes, attention_work

# The row that parts of a machine are compared at; their needs are in proportion to its length.
_ROW = 2**20


class Place(NamedTuple):
    """A cut, and what was asked for with the machine it is a cut of: all of the machine, or a part."""

    wanted: Wanted
    degrees: Degrees


def all_degrees(wanted: Wanted, *, rings: bool = False) -> list[Degrees]:
    """Cuts that the heads and the batch allow, the least sp first; with `rings`, of one group also those around one.

    Unless it was asked for, a group does not end in the middle of a node that another one shares.
    """
    world, gpus = wanted.machine.world, wanted.machine.gpus
    found = []
    for sp in _divisors(world):
        if sp > wanted.sizes.heads or (sp != wanted.sp if wanted.sp is not None else gpus % sp and sp % gpus):
            continue
        dp = world // sp
        if not (wanted.batch or dp) % dp:
            found.append(Degrees(dp, 1, sp))
        if rings and dp > 1:
            found.append(Degrees(1, dp, sp))
    return found


def whole(wanted: Wanted) -> list[Place]:
    """Cuts of all GPUs, the largest sp first."""
    return [Place(wanted, degrees) for degrees in reversed(all_degrees(wanted))]


def parts(wanted: Wanted) -> list[Place]:
    """Cuts that leave GPUs idle and can reach further for it, the fewest idle first; none where `sp` was given and does
    not divide them all."""
    every = whole(wanted)
    if wanted.machine.world == 1 or (wanted.sp is not None and not every):
        return []
    work: dict[int, int] = {}
    found = sorted(((_needs(place, work), place) for place in (*every, *_fewer(wanted))), key=lambda each: each[0])
    kept: list[tuple[tuple[float, ...], Place]] = []
    for needs, place in found:
        # In this order whatever needs less of everything comes first.
        if not any(all(a <= b for a, b in zip(less, needs, strict=True)) for less, _ in kept):
            kept.append((needs, place))
    left = [place for _, place in kept if place.wanted is not wanted]
    return sorted(left, key=lambda place: -place.wanted.machine.world)


def _fewer(wanted: Wanted) -> Iterator[Place]:
    """For every number of GPUs a node and every sp, as many nodes as it divides: more of them only hold more."""
    machine, batch = wanted.machine, wanted.batch
    for gpus in range(1, machine.gpus + 1):
        for sp in sorted({*_divisors(gpus), *(gpus * nodes for nodes in range(1, machine.nodes + 1))}):
            if sp > wanted.sizes.heads or (wanted.sp is not None and sp != wanted.sp):
                continue
            cuts = [nodes for nodes in range(1, machine.nodes + 1) if gpus * nodes % sp == 0]
            cuts = [nodes for nodes in cuts if batch is None or batch % (gpus * nodes // sp) == 0]
            # One rank alone gathers no weights.
            for nodes in {*cuts[-1:], *(cuts[:1] if gpus == 1 and sp == 1 else ())}:
                if gpus * nodes < machine.world:
                    part = replace(wanted, machine=replace(machine, gpus=gpus, nodes=nodes))
                    yield Place(part, Degrees(gpus * nodes // sp, 1, sp))


def _needs(place: Place, work: dict[int, int]) -> tuple[float, ...]:
    """Of device and host, in proportion to a row: less of each of these fits whatever more of them does.

    Tokens of a rank, its attention's buffers and log-sum-exps; nodes that share one copy of what is on the host, their
    share of the state, and a rank's; whether weights are gathered, and whether gradients wait for more rows.
    """
    wanted, (dp, _, sp) = place
    if sp not in work:
        work[sp] = _attention_bytes(wanted.sizes, sp)
    machine, rows = wanted.machine, (wanted.batch or dp) // dp
    heads = -(-wanted.sizes.heads // sp)
    shares = 1 / sp, work[sp], heads, machine.gpus / sp, 1 / machine.nodes, 1 / machine.world
    return *shares, float(machine.world > 1), float(rows > 1)


def _attention_bytes(sizes: ModelSizes, sp: int) -> int:
    tensors = TensorBytes.of(sizes, Job(_ROW, sp=sp), sizes.split(sp).most_groups)
    return sum(piece.bytes for piece in attention_work(tensors, sizes.layers[0], "save"))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
