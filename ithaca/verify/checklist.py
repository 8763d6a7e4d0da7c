"""`verify`: all checks on one model and one sample, on every rank of a mesh; the checklist out.

`devices.py` asks the same of what only GPUs have.
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
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.ranks import on_rank_0
from ithaca.verify.batches import Sample
from ithaca.verify.checks import CHECKS, Bench, Check, Line, run_again
from ithaca.verify.pair import Build, Pair

# Few tokens at once, so that a shard of the sample is several tiles and a short last one.
_MLP_TILE, _LOSS_TILE = 5, 7


def verify(
    build: Build,
    sample: Sample,
    mesh: Mesh,
    *,
    promote: bool = True,
    checks: Iterable[Check] = CHECKS,
    tell: Callable[[Line], None] = lambda line: None,
    scratch: Path | None = None,
    **options: Any,
) -> list[Line]:
    """The checklist, the same on all ranks. `build` gives the whole model; `options` go to `parallelize`.

    `promote`: for models in fp64, that they really compute in it. `tell` hears of every line as it comes.
    `scratch`: a folder of the caller's for what is saved, gone with it even where the ranks are killed.
    """
    lines: list[Line] = []

    def run(pair: Pair, chosen: Iterable[Check], folder: Path) -> None:
        for check in chosen:
            for line in check(Bench(pair, sample, folder)):
                # NaN is no figure that ranks could agree on: it counts as infinitely wrong.
                line = replace(line, figure=inf) if isnan(line.figure) else line
                lines.append(line)
                tell(line)

    with _shared_folder(mesh, scratch) as folder:
        pair = Pair(build, lambda model, its: parallelize(model, its, **options), mesh, promote=promote)
        refused = memory_refusal(pair.base)
        run(pair, checks, folder)
        # Or two pairs would be held at once.
        del pair
        if refused is None:
            run(Pair(build, _with_layers_run_again(options), mesh, promote=promote), (run_again,), folder)
    return lines


def _with_layers_run_again(options: dict[str, Any]) -> Callable[[PreTrainedModel, Mesh], Any]:
    """`parallelize` with work in tiles and every layer run again in backward, one in two its attention too."""

    def prepare(model: PreTrainedModel, mesh: Mesh) -> Any:
        count = len(decoder_layers(base_model(model)))
        modes: tuple[LayerMode, ...] = tuple("recompute" if index % 2 else "save" for index in range(count))
        plan = MemoryPlan(modes, (False,) * count, mlp_tile=_MLP_TILE, loss_tile=_LOSS_TILE)
        return parallelize(model, mesh, **{**options, "memory": plan})

    return prepare


@contextmanager
def _shared_folder(mesh: Mesh, within: Path | None) -> Iterator[Path]:
    """An empty folder of this machine, the same for all ranks, gone afterwards."""
    made = on_rank_0(lambda: tempfile.mkdtemp(prefix="ithaca-verify-", dir=within), mesh.world_group)
    try:
        yield Path(made)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
