"""Arguments of a layer, flattened to leaves so that a recomputation can build them again.

Layers may share state beside hidden states: a dict or list that travels through the model, in which one layer stores
keys and values for later layers. Each run of a layer gets a copy of every such container. Tensors in the container are
inputs of the layer and tensors that the layer adds are outputs; both are differentiated.

    forward   container {"full": (k, v)}  ->  copy, filled with the inputs k, v  ->  the layer adds "new": x
              x becomes an output, and is stored in the model's own container
    replay    a new copy, filled with the same inputs

Other side effects are refused by name: a changed object of another kind, an object that holds tensors with a graph, and
a tensor that is changed in place.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ithaca.errors import UnsupportedError

INSTEAD = "such a layer cannot be run again in backward: use memory=None, or 'keep' for every layer"
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type)
_FIXED = (*_ATOMS, nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_MAPPINGS = (dict, OrderedDict, defaultdict)
# A tensor or another object, and its version counter (0 for objects).
ObjectVersion = tuple[Any, int]


@dataclass(frozen=True, slots=True)
class _ContainerRef:
    """Placeholder leaf for a container, by the container's number."""

    number: int


@dataclass(frozen=True, slots=True)
class _OutputRef:
    """Placeholder for a tensor that the layer added to a container, by its number among the layer's outputs."""

    number: int


@dataclass(eq=False, slots=True)
class _Container:
    """One dict or list: an empty copy, and the positions of its contents among the leaves. `keys`: None for a list."""

    empty: Any
    keys: tuple[Any, ...] | None
    tree: TreeSpec
    leaves: range


@dataclass(frozen=True, slots=True)
class ContainerChange:
    """Contents of a container after a run of the layer; a leaf from before is given by its position."""

    number: int
    keys: tuple[Any, ...] | None
    tree: TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RunArguments:
    """Arguments of one run, with copies of the containers."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: list[Any]
    containers: list[Any]


@dataclass(eq=False, slots=True)
class Arguments:
    """Arguments as leaves: tensors, containers by number, and other objects unchanged."""

    flat: list[Any]
    tree: TreeSpec
    names: tuple[str, ...]
    containers: list[_Container] = field(default_factory=list)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
        """Return the arguments, and the caller's own containers in the order of their numbers.

        `Arguments` keeps no reference to the caller's containers: their new tensors' graph leads back to it, a cycle.
        """
        flat, tree = tree_flatten((args, tuple(kwargs.values())), is_leaf=_is_leaf)
        own = cls(flat, tree, tuple(kwargs))
        originals: list[Any] = []
        own._flatten_containers(originals, range(len(flat)))
        return own, originals

    def _flatten_containers(self, originals: list[Any], positions: range) -> None:
        """Replace containers by their numbers, and append their contents to the leaves."""
        for position in positions:
            if _is_container(value := self.flat[position]):
                numbers = [number for number, each in enumerate(originals) if each is value]
                self.flat[position] = _ContainerRef(numbers[0] if numbers else len(originals))
                if not numbers:
                    originals.append(value)
                    self._append_contents(originals, value)

    def _append_contents(self, originals: list[Any], value: Any) -> None:
        keys, contents = _contents(value)
        leaves, tree = tree_flatten(contents, is_leaf=_is_leaf)
        inside = range(len(self.flat), len(self.flat) + len(leaves))
        self.flat += leaves
        empty = copy.copy(value)
        empty.clear()
        self.containers.append(_Container(empty, keys, tree, inside))
        self._flatten_containers(originals, inside)

    @property
    def differentiable(self) -> list[int]:
        """Positions of the hidden states (the first floating-point tensor) and of other tensors that require grad."""
        floating = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor) and x.is_floating_point()]
        return [floating[0], *(i for i in floating[1:] if self.flat[i].requires_grad)]

    def run_with(self, positions: list[int], tensors: list[Tensor]) -> RunArguments:
        """Return arguments for one run, with these tensors at these positions."""
        flat = list(self.flat)
        for position, tensor in zip(positions, tensors, strict=True):
            flat[position] = tensor
        made: dict[int, Any] = {}
        args, values = tree_unflatten([self._value(x, flat, made) for x in flat[: self.tree.num_leaves]], self.tree)
        containers = [self._value(_ContainerRef(number), flat, made) for number in range(len(self.containers))]
        return RunArguments(args, dict(zip(self.names, values, strict=True)), flat, containers)

    # Not a closure: a closure that calls itself is a reference cycle, and would keep tensors until garbage collection.
    def _value(self, leaf: Any, flat: list[Any], made: dict[int, Any]) -> Any:
        """Return the leaf itself, or for a container's placeholder its filled copy, built once."""
        if not isinstance(leaf, _ContainerRef):
            return leaf
        if leaf.number not in made:
            each = self.containers[leaf.number]
            # Registered before it is filled: a container may contain itself.
            own = made[leaf.number] = copy.copy(each.empty)
            _fill(own, each.keys, tree_unflatten([self._value(flat[i], flat, made) for i in each.leaves], each.tree))
        return made[leaf.number]

    def changes(
        self, flat: list[Any], containers: list[Any], outputs: list[Any]
    ) -> tuple[list[ContainerChange], list[Tensor]]:
        """Return the containers that a run changed, and the added tensors that are not among its outputs."""
        found: list[ContainerChange] = []
        tensors: list[Tensor] = []
        for number, (each, now) in enumerate(zip(self.containers, containers, strict=True)):
            keys, contents = _contents(now)
            leaves, tree = tree_flatten(contents, is_leaf=_is_leaf)
            before = [_leaf(flat[i], containers) for i in each.leaves]
            same = len(leaves) == len(before) and all(a is b for a, b in zip(leaves, before, strict=True))
            if same and keys == each.keys and tree == each.tree:
                continue
            positions = {id(_leaf(leaf, containers)): at for at, leaf in enumerate(flat) if not _is_atom(leaf)}
            change = [self._reference(leaf, positions, outputs, tensors, number) for leaf in leaves]
            found.append(ContainerChange(number, keys, tree, tuple(change)))
        return found, tensors

    def _reference(
        self, leaf: Any, positions: dict[int, int], outputs: list[Any], tensors: list[Tensor], number: int
    ) -> Any:
        """Return a placeholder for a leaf of a changed container, so that no tensor is kept alive."""
        if _is_atom(leaf):
            return (leaf,)
        if id(leaf) in positions:
            return positions[id(leaf)]
        if not isinstance(leaf, Tensor):
            raise UnsupportedError(
                f"a layer puts a {type(leaf).__name__} into a {type(self.containers[number].empty).__name__} that it is "
                f"given ({self.name_of(self._position_of(number))}): {INSTEAD}"
            )
        known = [*outputs, *tensors]
        index = next((i for i, each in enumerate(known) if each is leaf), len(known))
        if index == len(known):
            tensors.append(leaf)
        return _OutputRef(index)

    def _position_of(self, number: int) -> int:
        return next(
            at for at, leaf in enumerate(self.flat) if isinstance(leaf, _ContainerRef) and leaf.number == number
        )

    def name_of(self, position: int) -> str:
        """Return the name of the argument that contains the leaf at this position."""
        while position >= self.tree.num_leaves:
            inside = next(number for number, each in enumerate(self.containers) if position in each.leaves)
            position = self._position_of(inside)
        args, values = tree_unflatten(list(range(self.tree.num_leaves)), self.tree)
        index = next(index for index, each in enumerate((*args, *values)) if position in tree_flatten(each)[0])
        return f"argument {index + 1}" if index < len(args) else f"argument {self.names[index - len(args)]}"

    def refuse_hidden_graphs(self) -> None:
        """Refuse an object that is neither tensor nor container and holds tensors that require grad: they would get none."""
        for position, leaf in enumerate(self.flat):
            if _is_opaque(leaf) and any(isinstance(x, Tensor) and x.requires_grad for x, _ in reachable(leaf)):
                raise UnsupportedError(
                    f"a layer's {self.name_of(position)}, a {type(leaf).__name__}, holds tensors that want a gradient: {INSTEAD}"
                )

    def object_versions(self, flat: list[Any]) -> list[list[ObjectVersion]]:
        """Return for each leaf the objects that could be changed in place: a tensor, or all that an object holds."""
        return [
            [(x, version(x))] if isinstance(x, Tensor) else list(reachable(x)) if _is_opaque(x) else [] for x in flat
        ]

    def changed_in_place(self, flat: list[Any], before: list[list[ObjectVersion]]) -> str | None:
        """Return a phrase about a leaf that a run changed in place; None if there is none."""
        for position, (leaf, was) in enumerate(zip(flat, before, strict=True)):
            if isinstance(leaf, Tensor) and version(leaf) != was[0][1]:
                return f"writes into a tensor that it is given ({self.name_of(position)})"
            if _is_opaque(leaf) and not same_versions(list(reachable(leaf)), was):
                return f"changes a {type(leaf).__name__} that it is given ({self.name_of(position)})"
        return None


def apply_changes(changes: list[ContainerChange], originals: list[Any], flat: list[Any], outputs: list[Any]) -> None:
    """Copy the changes that a run made to its own containers into the caller's containers."""
    for change in changes:
        leaves = [_resolved(leaf, originals, flat, outputs) for leaf in change.leaves]
        _fill(originals[change.number], change.keys, tree_unflatten(leaves, change.tree))


def _resolved(leaf: Any, originals: list[Any], flat: list[Any], outputs: list[Any]) -> Any:
    if isinstance(leaf, _OutputRef):
        return outputs[leaf.number]
    if isinstance(leaf, int):
        return _leaf(flat[leaf], originals)
    return leaf[0]


def _leaf(leaf: Any, containers: list[Any]) -> Any:
    return containers[leaf.number] if isinstance(leaf, _ContainerRef) else leaf


def _is_leaf(value: Any) -> bool:
    """True unless the value is a tuple; a `torch.Size` is a leaf too."""
    return not isinstance(value, tuple) or isinstance(value, torch.Size)


def _is_container(value: Any) -> bool:
    return type(value) in _MAPPINGS or type(value) is list or isinstance(value, UserDict)


def _is_atom(value: Any) -> bool:
    return isinstance(value, _ATOMS)


def _is_opaque(value: Any) -> bool:
    # Objects of this library (layouts) are frozen and hold no tensors with a graph.
    plain = isinstance(value, (*_FIXED, Tensor, _ContainerRef))
    return not plain and not type(value).__module__.startswith("ithaca.")


def _contents(container: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    if isinstance(container, list):
        return None, tuple(container)
    return tuple(container.keys()), tuple(container.values())


def _fill(container: Any, keys: tuple[Any, ...] | None, values: tuple[Any, ...]) -> None:
    container.clear()
    if keys is None:
        container.extend(values)
    else:
        container.update(zip(keys, values, strict=True))


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to the tensor or to its base."""
    # Tensor._version is private and as old as autograd; tensors made in inference mode have none.
    return 0 if tensor.is_inference() else tensor._version


def reachable(value: Any) -> Iterator[ObjectVersion]:
    """Yield an object and all that its attributes and entries lead to; modules and functions are not entered."""
    visited: set[int] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if id(each) in visited and not _is_atom(each):
            continue
        visited.add(id(each))
        yield each, version(each) if isinstance(each, Tensor) else 0
        if not isinstance(each, (*_FIXED, Tensor)):
            stack += _children(each)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    inside = list(value) if isinstance(value, list | tuple | set | frozenset) else []
    slots = (name for kind in type(value).__mro__ for name in _slots(kind))
    return [*inside, *getattr(value, "__dict__", {}).values(), *(getattr(value, n) for n in slots if hasattr(value, n))]


def _slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if n not in ("__dict__", "__weakref__"))


def same_versions(now: list[ObjectVersion], before: list[ObjectVersion]) -> bool:
    """True if an object holds the same objects as before and no tensor among them was written to."""
    return len(now) == len(before) and all(
        (a is b or (_is_atom(a) and a == b)) and i == j for (a, i), (b, j) in zip(now, before, strict=True)
    )
