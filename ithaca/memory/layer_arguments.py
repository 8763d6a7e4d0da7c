"""A layer's arguments, taken apart so that the layer can be run again from them.

Layers may share state beside their hidden states: a dict or list that travels through the model, into which one layer
puts keys and values that later layers read. A run of the layer gets a copy of each such container. What it finds in
there is an input of the layer, what it puts in there an output: both are differentiated as any other.

    forward   container {"full": (k, v)}  ->  copy, filled with the inputs k, v  ->  what the layer put in is an output,
              and goes into the container that the model passes on
    replay    a new copy, filled with the same inputs

What cannot be brought back like this is refused by name: an object of another kind that a layer changes or that holds
tensors with a graph, and a tensor that is changed in place.
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
# A tensor or another object, and how often it was written to.
Seen = tuple[Any, int]


@dataclass(frozen=True, slots=True)
class _At:
    """Where a container stands among the leaves: its number."""

    number: int


@dataclass(frozen=True, slots=True)
class _New:
    """Where a tensor that the layer put into a container stands among the layer's outputs: its number."""

    number: int


@dataclass(eq=False, slots=True)
class _Container:
    """One dict or list: an empty one, and the places of what is in it. `keys`: None of a list."""

    empty: Any
    keys: tuple[Any, ...] | None
    tree: TreeSpec
    leaves: range


@dataclass(frozen=True, slots=True)
class Change:
    """What a container holds after a run of the layer; a leaf that was there before is its place among the leaves."""

    number: int
    keys: tuple[Any, ...] | None
    tree: TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Arguments of one run, with containers of its own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: list[Any]
    containers: list[Any]


@dataclass(eq=False, slots=True)
class Arguments:
    """Arguments as leaves: tensors, containers by number, and anything else as it is."""

    flat: list[Any]
    tree: TreeSpec
    names: tuple[str, ...]
    containers: list[_Container] = field(default_factory=list)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
        """The arguments, and the caller's own containers in the order of their numbers.

        The containers are not kept here: what a layer puts into them has a graph that leads back to here.
        """
        flat, tree = tree_flatten((args, tuple(kwargs.values())), is_leaf=_is_leaf)
        own = cls(flat, tree, tuple(kwargs))
        originals: list[Any] = []
        own._open(originals, range(len(flat)))
        return own, originals

    def _open(self, originals: list[Any], places: range) -> None:
        """Put numbers in place of containers, and what they hold behind the leaves."""
        for place in places:
            if _is_container(value := self.flat[place]):
                numbers = [number for number, each in enumerate(originals) if each is value]
                self.flat[place] = _At(numbers[0] if numbers else len(originals))
                if not numbers:
                    originals.append(value)
                    self._take_apart(originals, value)

    def _take_apart(self, originals: list[Any], value: Any) -> None:
        keys, contents = _contents(value)
        leaves, tree = tree_flatten(contents, is_leaf=_is_leaf)
        inside = range(len(self.flat), len(self.flat) + len(leaves))
        self.flat += leaves
        empty = copy.copy(value)
        empty.clear()
        self.containers.append(_Container(empty, keys, tree, inside))
        self._open(originals, inside)

    @property
    def differentiable(self) -> list[int]:
        """Where the hidden states stand (the first floating tensor), and whatever else wants a gradient."""
        floating = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor) and x.is_floating_point()]
        return [floating[0], *(i for i in floating[1:] if self.flat[i].requires_grad)]

    def run_with(self, places: list[int], tensors: list[Tensor]) -> Run:
        """Arguments for one run, with these tensors in these places."""
        flat = list(self.flat)
        for place, tensor in zip(places, tensors, strict=True):
            flat[place] = tensor
        made: dict[int, Any] = {}
        args, values = tree_unflatten([self._value(x, flat, made) for x in flat[: self.tree.num_leaves]], self.tree)
        containers = [self._value(_At(number), flat, made) for number in range(len(self.containers))]
        return Run(args, dict(zip(self.names, values, strict=True)), flat, containers)

    # A method and no closure: one that calls itself is a cycle, which would keep tensors until garbage is collected.
    def _value(self, leaf: Any, flat: list[Any], made: dict[int, Any]) -> Any:
        """The leaf itself, or for the number of a container a filled copy, `made` once."""
        if not isinstance(leaf, _At):
            return leaf
        if leaf.number not in made:
            each = self.containers[leaf.number]
            # There before it is filled: a container may hold itself.
            own = made[leaf.number] = copy.copy(each.empty)
            _fill(own, each.keys, tree_unflatten([self._value(flat[i], flat, made) for i in each.leaves], each.tree))
        return made[leaf.number]

    def changes(self, flat: list[Any], containers: list[Any], outputs: list[Any]) -> tuple[list[Change], list[Tensor]]:
        """What a run left in its containers that was not there, and the tensors among that which are no output yet."""
        found: list[Change] = []
        tensors: list[Tensor] = []
        for number, (each, now) in enumerate(zip(self.containers, containers, strict=True)):
            keys, contents = _contents(now)
            leaves, tree = tree_flatten(contents, is_leaf=_is_leaf)
            before = [_leaf(flat[i], containers) for i in each.leaves]
            same = len(leaves) == len(before) and all(a is b for a, b in zip(leaves, before, strict=True))
            if same and keys == each.keys and tree == each.tree:
                continue
            places = {id(_leaf(leaf, containers)): place for place, leaf in enumerate(flat) if not _is_atom(leaf)}
            change = [self._reference(leaf, places, outputs, tensors, number) for leaf in leaves]
            found.append(Change(number, keys, tree, tuple(change)))
        return found, tensors

    def _reference(
        self, leaf: Any, places: dict[int, int], outputs: list[Any], tensors: list[Tensor], number: int
    ) -> Any:
        """What stands for a leaf of a changed container, so that the tensors themselves are not kept."""
        if _is_atom(leaf):
            return (leaf,)
        if id(leaf) in places:
            return places[id(leaf)]
        if not isinstance(leaf, Tensor):
            raise UnsupportedError(
                f"a layer puts a {type(leaf).__name__} into a {type(self.containers[number].empty).__name__} that it is "
                f"given ({self.name_of(self._place_of(number))}): {INSTEAD}"
            )
        known = [*outputs, *tensors]
        index = next((i for i, each in enumerate(known) if each is leaf), len(known))
        if index == len(known):
            tensors.append(leaf)
        return _New(index)

    def _place_of(self, number: int) -> int:
        return next(place for place, leaf in enumerate(self.flat) if isinstance(leaf, _At) and leaf.number == number)

    def name_of(self, place: int) -> str:
        """The argument that the leaf in this place belongs to, in words."""
        while place >= self.tree.num_leaves:
            inside = next(number for number, each in enumerate(self.containers) if place in each.leaves)
            place = self._place_of(inside)
        args, values = tree_unflatten(list(range(self.tree.num_leaves)), self.tree)
        index = next(index for index, each in enumerate((*args, *values)) if place in tree_flatten(each)[0])
        return f"argument {index + 1}" if index < len(args) else f"argument {self.names[index - len(args)]}"

    def refuse_hidden_graphs(self) -> None:
        """Refuse an object that is not looked into and holds tensors that want a gradient: it would not get one."""
        for place, leaf in enumerate(self.flat):
            if _is_opaque(leaf) and any(isinstance(x, Tensor) and x.requires_grad for x, _ in reachable(leaf)):
                raise UnsupportedError(
                    f"a layer's {self.name_of(place)}, a {type(leaf).__name__}, holds tensors that want a gradient: {INSTEAD}"
                )

    def seen(self, flat: list[Any]) -> list[list[Seen]]:
        """Leaf by leaf what there is to change in place: a tensor, and all that another object holds."""
        return [
            [(x, version(x))] if isinstance(x, Tensor) else list(reachable(x)) if _is_opaque(x) else [] for x in flat
        ]

    def changed_in_place(self, flat: list[Any], before: list[list[Seen]]) -> str | None:
        """What a run changed of its leaves, in words; None if they are what they were."""
        for place, (leaf, was) in enumerate(zip(flat, before, strict=True)):
            if isinstance(leaf, Tensor) and version(leaf) != was[0][1]:
                return f"writes into a tensor that it is given ({self.name_of(place)})"
            if _is_opaque(leaf) and not same(list(reachable(leaf)), was):
                return f"changes a {type(leaf).__name__} that it is given ({self.name_of(place)})"
        return None


def apply_changes(changes: list[Change], originals: list[Any], flat: list[Any], outputs: list[Any]) -> None:
    """Put what a run of a layer left in its own containers into the caller's."""
    for change in changes:
        leaves = [_resolved(leaf, originals, flat, outputs) for leaf in change.leaves]
        _fill(originals[change.number], change.keys, tree_unflatten(leaves, change.tree))


def _resolved(leaf: Any, originals: list[Any], flat: list[Any], outputs: list[Any]) -> Any:
    if isinstance(leaf, _New):
        return outputs[leaf.number]
    if isinstance(leaf, int):
        return _leaf(flat[leaf], originals)
    return leaf[0]


def _leaf(leaf: Any, containers: list[Any]) -> Any:
    return containers[leaf.number] if isinstance(leaf, _At) else leaf


def _is_leaf(value: Any) -> bool:
    """Only tuples are looked into at once; a `torch.Size` is none."""
    return not isinstance(value, tuple) or isinstance(value, torch.Size)


def _is_container(value: Any) -> bool:
    return type(value) in _MAPPINGS or type(value) is list or isinstance(value, UserDict)


def _is_atom(value: Any) -> bool:
    return isinstance(value, _ATOMS)


def _is_opaque(value: Any) -> bool:
    # What this library passes through a model is its own affair.
    plain = isinstance(value, (*_FIXED, Tensor, _At))
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
    """How often the tensor, or what it is a view of, was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def reachable(value: Any) -> Iterator[Seen]:
    """All that an object holds, itself first: attributes, entries, and theirs; modules and functions are not entered."""
    met: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in met and not _is_atom(each):
            continue
        met.add(id(each))
        yield each, version(each) if isinstance(each, Tensor) else 0
        if not isinstance(each, (*_FIXED, Tensor)):
            waiting += _held(each)


def _held(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    inside = list(value) if isinstance(value, list | tuple | set | frozenset) else []
    slots = (name for kind in type(value).__mro__ for name in _names(kind))
    return [*inside, *getattr(value, "__dict__", {}).values(), *(getattr(value, n) for n in slots if hasattr(value, n))]


def _names(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if n not in ("__dict__", "__weakref__"))


def same(now: list[Seen], before: list[Seen]) -> bool:
    """True if two looks at one object found the same things, none of them written to between."""
    return len(now) == len(before) and all(
        (a is b or (_is_atom(a) and a == b)) and i == j for (a, i), (b, j) in zip(now, before, strict=True)
    )
