"""What parity tests run on every rank: one model, some micro-batches, one mesh, the errors back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ithaca.mesh import init_mesh
from ithaca.verify.parity import Parity, compare
from ithaca.verify.small_models.features import WITH_EXPERTS, small_model
from tests import faults
from tests.batches import micro_batches
from tests.ranks import run_ranks


def parity_on_rank(
    kind: str,
    degrees: tuple[int, int],
    rows: int,
    kinds: list[str],
    model: dict[str, Any],
    fault: str | None = None,
    experts: bool | None = None,
    **options: Any,
) -> Parity:
    """Runs on a rank; `fault` names a planted one."""
    dp, sp = degrees
    mesh = init_mesh(dp=dp, sp=sp)
    built = small_model(kind, **model)
    batches = micro_batches(dp, rows, kinds, experts=kind in WITH_EXPERTS if experts is None else experts)
    with faults.FAULTS[fault]() if fault else nullcontext():
        return compare(built, batches, mesh, **options)


def worst(
    kind: str, degrees: tuple[int, int], rows: int, kinds: list[str], fault: str | None = None, **settings: Any
) -> float:
    """The largest error any rank saw in loss, logits or any gradient."""
    options = {key: settings.pop(key) for key in ("weights", "evaluate", "experts") if key in settings}
    results = run_ranks(
        degrees[0] * degrees[1], parity_on_rank, kind, degrees, rows, kinds, settings, fault=fault, **options
    )
    return max(result.worst for result in results)
