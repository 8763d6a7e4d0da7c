"""Write-back of in-place changes to rows of a sharded weight: `weight.grad[:50].zero_()`, `weight[90:] = mean`.

In plain torch `weight[:50]` is a view, and a write to the view changes the weight. Of a weight whose rows are sharded
DTensor returns a gathered copy, and a write to the copy is lost without an error
(https://github.com/pytorch/pytorch/issues/139735). Here such a copy records its source:

    weight (rows 0-99 over 2 ranks)  --[:60]-->  copy of rows 0-59 on both ranks
    copy.zero_()                                 each rank writes its own rows, 0-49 or 50-59, back into the weight

Operations that return views get handlers, as in partial_values.py, for meshes of sharded weights only. Writes are seen
by the copy's own class, or by handlers in versions of torch that do not ask a subclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ithaca.errors import UnsupportedError
from ithaca.state.weights.partial_values import call_without_handler, draws, is_spread, overloads, register_handler
from ithaca.state.weights.shards import bounds

# Operations that indexing, narrow, chunk, split, view and flatten are made of.
_VIEWS = (
    *("slice", "select", "split", "split_with_sizes", "unbind", "view", "unfold", "diagonal", "expand", "squeeze"),
    *("unsqueeze", "permute", "transpose", "t"),
)
# First version that calls the __torch_dispatch__ of a DTensor's subclass.
_ASKS_SUBCLASSES = Version("2.13")


@dataclass(frozen=True)
class _Origin:
    """Origin of a copy: result number `at` of the operation `view` on `source`."""

    source: DTensor
    view: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    at: int

    def of(self, whole: Tensor) -> Tensor:
        found: Tensor = tree_leaves(self.view(whole, *self.arguments, **self.named))[self.at]
        return found


class CopiedRows(DTensor):
    """Copy of rows of a split weight, which plain torch would give as a view; each in-place write is written back."""

    _origin: _Origin

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        if not written or draws(func):
            plain_args, plain_kwargs = tree_map_only(cls, _plain, (args, kwargs))
            result = func(*plain_args, **plain_kwargs)
            viewed = args[0] if args and isinstance(args[0], cls) and func.overloadpacket.__name__ in _VIEWS else None
            return result if viewed is None else _remember(result, viewed, func, args, kwargs)
        if not all(_is_whole(copy) for copy in written):
            raise UnsupportedError(
                f"{func.overloadpacket.__name__} would write to a part of a split weight that no rank has whole: change "
                "rows (weight[:50]) or columns (weight[:, :50]), or the whole weight"
            )
        # The copies are whole on every rank, so every rank makes the whole write.
        own_args, own_kwargs = tree_map_only(DTensor, _whole, (args, kwargs))
        func(*own_args, **own_kwargs)
        for copy in written:
            _write_back(copy)
        return written[0] if func._schema.returns else None


def write_rows_back() -> None:
    """Make in-place writes to views of split weights, gradients and optimizer state reach the tensor that was viewed."""
    register_handler(overloads(_VIEWS), _viewed)
    if Version(torch.__version__) < _ASKS_SUBCLASSES:
        register_handler(_writing(), _wrote)


@cache
def _writing() -> list[Any]:
    """Return all in-place operations of torch."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("aten::") and each.is_mutable]
    names = {each.name.removeprefix("aten::") for each in schemas if each.name.endswith("_")}
    return [form for form in overloads(sorted(names)) if form._schema.is_mutable]


def _wrote(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(each, CopiedRows) for each in tree_leaves((args, kwargs))):
        return CopiedRows.__torch_dispatch__(operation, (), args, kwargs)
    return call_without_handler(operation, args, kwargs)


def _viewed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = call_without_handler(operation, args, kwargs)
    source = args[0]
    if isinstance(source, CopiedRows):
        return _remember(result, source, operation, args, kwargs)
    if not is_spread(source):
        return result
    copies = [each for each in tree_leaves(result) if isinstance(each, DTensor) and not _same_memory(each, source)]
    return _remember(result, source, operation, args, kwargs) if copies else result


def _remember(result: Any, source: DTensor, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, _ = tree_flatten(result)
    for at, each in enumerate(leaves):
        if isinstance(each, DTensor):
            each.__class__ = CopiedRows
            each._origin = _Origin(source, view, args[1:], kwargs, at)  # type: ignore[attr-defined]
    return result


@torch.no_grad()
def _write_back(copy: CopiedRows) -> None:
    source = copy._origin.source
    if isinstance(source, CopiedRows) and _same_memory(copy, source):
        _write_back(source)
        return
    whole = _whole(source).clone()
    copy._origin.of(whole).copy_(_whole(copy))
    source._local_tensor.copy_(whole[bounds(source)])
    increment_version(source)
    if isinstance(source, CopiedRows):
        _write_back(source)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[CopiedRows]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(given) if isinstance(each, CopiedRows))


def _plain(copy: DTensor) -> DTensor:
    return DTensor(copy._local_tensor, copy._spec, requires_grad=copy.requires_grad)


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _whole(tensor: DTensor) -> Tensor:
    if _is_whole(tensor):
        return tensor._local_tensor
    plain: Any = _plain(tensor).detach()
    whole: Tensor = plain.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)._local_tensor
    return whole


def _same_memory(one: DTensor, other: DTensor) -> bool:
    return one._local_tensor.untyped_storage().data_ptr() == other._local_tensor.untyped_storage().data_ptr()
