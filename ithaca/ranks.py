"""What the first rank does for all, such as writing a file: every rank gets the result, or the error of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ithaca.errors import IthacaError, UnwrittenError
from ithaca.mesh import Mesh


def together(mesh: Mesh, *actions: Callable[[], Any]) -> list[Any]:
    """What the first rank does for all: every rank gets the results, or the error of it."""
    error: IthacaError | None = None
    results: list[Any] = []
    if mesh.rank == 0:
        try:
            # A lock, or another thing that stays with the first rank, does not travel.
            results = [_travelling(action()) for action in actions]
        except IthacaError as caught:
            error = caught
        except OSError as caught:
            error = UnwrittenError(
                f"{caught.filename or 'the disk'}: {caught.strerror}: make room, or see to its permissions"
            )
    told: list[Any] = [error, results]
    dist.broadcast_object_list(told, src=0, group=mesh.world_group)
    if told[0] is not None:
        raise told[0]
    results = told[1]
    return results


def _travelling(result: Any) -> Any:
    return result if isinstance(result, str | list) else None
