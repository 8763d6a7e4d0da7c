"""`verify`: run all checks on one model and one sample, on every rank of a mesh, and return the checklist.

    pair with parallelize(model, mesh)                         -> every check of CHECKS
    pair with tiles and layers recomputed in backward          -> recomputed_layers

`gpus.py` adds the checks that need GPUs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ithaca.mesh import Mesh
from ithaca.models.support import base_model, decoder_layers, memory_refusal
from ithaca.parallelize import parallelize
from ithaca.planning.plan import LayerMode, MemoryPlan
from ithaca.ranks import on_rank_0
from ithaca.verify.batches import Sample
from ithaca.verify.checks import CHECKS, Case, Check, Line, recomputed_layers
from ithaca.verify.parity import Build, Pair

# Few tokens at once, so that a shard of the sample has several tiles and a short last one.
_MLP_TILE, _LOSS_TILE = 5, 7


def verify(
    build: Build,
    sample: Sample,
    mesh: Mesh,
    *,
    promote: bool = True,
    checks: Iterable[Check] = CHECKS,
    on_line: Callable[[Line], None] = lambda line: None,
    scratch: Path | None = None,
    **options: Any,
) -> list[Line]:
    """Return the checklist, the same on all ranks. `build` returns the whole model; `options` go to `parallelize`.

    `promote`: compute fp64 models in fp64 throughout. `on_line` is called with every line when it is known.
    `scratch`: the caller's folder for what is saved, which the caller removes even if the ranks are killed.
    """
    lines: list[Line] = []

    def run(pair: Pair, chosen: Iterable[Check], folder: Path) -> None:
        for check in chosen:
            for line in check(Case(pair, sample, folder)):
                # NaN is equal to nothing, and ranks compare their lines: it counts as infinitely wrong.
                line = replace(line, figure=inf) if isnan(line.figure) else line
                lines.append(line)
                on_line(line)

    with _shared_folder(mesh, scratch) as folder:
        pair = Pair(build, lambda model, its: parallelize(model, its, **options), mesh, promote=promote)
        refused = memory_refusal(pair.base)
        run(pair, checks, folder)
        # Two pairs at once would need twice the memory.
        del pair
        if refused is None:
            run(Pair(build, _prepare_recomputed(options), mesh, promote=promote), (recomputed_layers,), folder)
    return lines


def _prepare_recomputed(options: dict[str, Any]) -> Callable[[PreTrainedModel, Mesh], Any]:
    """Return a `parallelize` with tiles and every layer recomputed in backward, every second one with its attention."""

    def prepare(model: PreTrainedModel, mesh: Mesh) -> Any:
        count = len(decoder_layers(base_model(model)))
        modes: tuple[LayerMode, ...] = tuple("recompute" if index % 2 else "save" for index in range(count))
        plan = MemoryPlan(modes, (False,) * count, mlp_tile=_MLP_TILE, loss_tile=_LOSS_TILE)
        return parallelize(model, mesh, **{**options, "memory": plan})

    return prepare


@contextmanager
def _shared_folder(mesh: Mesh, within: Path | None) -> Iterator[Path]:
    """Make an empty folder of this machine for all ranks; remove it at the end."""
    made = on_rank_0(lambda: tempfile.mkdtemp(prefix="ithaca-verify-", dir=within), mesh.world_group)
    try:
        yield Path(made)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
