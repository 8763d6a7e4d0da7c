"""The handle of a parallelized model: everything that was put on the model, and the way to take it off again.

    handle = Handle.on(model, mesh)                 # hangs on the model, as model.__dict__["_ithaca"]
    handle.replace(layer, "forward", replay)        # a step: the attribute before, the attribute now
    handle.add(model.register_forward_hook(leave))  # a step: anything with a `remove`
    handle.keep(Binding(...))                       # a part: an object of a folder above, found again by its type
    handle.part(Binding)
    handle.undo()                                   # steps are undone from the last to the first

Every change of a module goes through here, so that `undo` leaves the model as it was. Sharded weights alone cannot be
put back: FSDP2's classes and hooks stay, and with them what was put on `while_sharded` and the handle itself.

The handle hangs on its model and on nothing else: it is freed with the model, and a deep copy of the model has its own.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ithaca.errors import NOT_PICKLED, UnsupportedError
from ithaca.mesh import Mesh

KEY = "_ithaca"
T = TypeVar("T")


class Removable(Protocol):
    """One step: something that was put on, such as a hook, and can take itself off."""

    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ReplacedAttribute:
    """An attribute of one instance. `before`: what the instance had under that name; empty where that was its class's."""

    module: nn.Module
    name: str
    before: tuple[Any, ...]

    def remove(self) -> None:
        if self.before:
            self.module.__dict__[self.name] = self.before[0]
        else:
            self.module.__dict__.pop(self.name, None)


@dataclass(frozen=True, slots=True)
class _KeptPart:
    """A part of a handle."""

    handle: Handle
    kind: type

    def remove(self) -> None:
        del self.handle.parts[self.kind]


@dataclass(eq=False)
class Handle:
    """All that is on one model. `explain`: the frame of an out-of-memory message, set by whoever plans the memory."""

    mesh: Mesh
    root: nn.Module
    steps: list[Removable] = field(default_factory=list)
    while_sharded: list[Removable] = field(default_factory=list)
    parts: dict[type, Any] = field(default_factory=dict)
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    explain: Callable[[torch.OutOfMemoryError], torch.OutOfMemoryError] | None = None

    @classmethod
    def on(cls, model: nn.Module, mesh: Mesh) -> Handle:
        """Return the model's handle, or hang a new one on it."""
        found = handle_of(model)
        if found is None:
            found = model.__dict__[KEY] = cls(mesh, model)
        return found

    def add(self, step: Removable, *, while_sharded: bool = False) -> None:
        """List a change that was made. `while_sharded`: it lasts as long as weights are sharded, so beyond `undo`."""
        (self.while_sharded if while_sharded else self.steps).append(step)

    def replace(self, module: nn.Module, name: str, value: Any, *, while_sharded: bool = False) -> None:
        """Give one instance an attribute; its class, and other instances, stay as they are."""
        before = (module.__dict__[name],) if name in module.__dict__ else ()
        self.add(_ReplacedAttribute(module, name, before), while_sharded=while_sharded)
        module.__dict__[name] = value

    def replace_method(
        self, module: nn.Module, name: str, instead: Callable[..., Any], *, while_sharded: bool = False
    ) -> None:
        """The same for a method, which a callable object is given the look of."""
        if not inspect.ismethod(instead):
            looks_like(instead, getattr(module, name))
        self.replace(module, name, instead, while_sharded=while_sharded)

    def mark(self, module: nn.Module) -> None:
        """Let the handle be found on this module too, by code that is given no other."""
        if KEY not in module.__dict__:
            self.replace(module, KEY, self)

    def keep(self, part: T, *, while_sharded: bool = False) -> T:
        """Keep an object, the only one of its type, for whoever has the handle."""
        self.parts[type(part)] = part
        self.add(_KeptPart(self, type(part)), while_sharded=while_sharded)
        return part

    def part(self, kind: type[T]) -> T | None:
        """Return the part of this type, None if there is none."""
        return self.parts.get(kind)

    def steps_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer of the model's weights, without keeping it alive."""
        self.optimizers = [weakref.ref(each) for each in dict.fromkeys((*self.living_optimizers(), optimizer))]

    def living_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that somebody still has."""
        return [optimizer for each in self.optimizers if (optimizer := each()) is not None]

    def undo(self) -> None:
        """Take everything off, the last first; without sharded weights the handle itself goes too."""
        self._undo_to(0)
        self.explain = None
        if not self.while_sharded:
            self.root.__dict__.pop(KEY, None)

    def _undo_to(self, count: int) -> None:
        while len(self.steps) > count:
            self.steps.pop().remove()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take everything off where an error, a refusal above all, ends the block."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    @contextmanager
    def temporarily(self) -> Iterator[None]:
        """Take off at the end of the block what was put on inside."""
        count = len(self.steps)
        try:
            yield
        finally:
            self._undo_to(count)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Where the block runs out of memory, raise the error with an account of what held it; blocks may be nested."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            explained = error if self.explain is None else self.explain(error)
            if explained is error:
                raise
            raise explained from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        # Optimizers step the weights of the original.
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "optimizers": []}, memo))
        return twin

    def __reduce__(self) -> Any:
        raise UnsupportedError(NOT_PICKLED)


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a model or of what it wraps (PEFT, DDP); None if there is none."""
    return next((module.__dict__[KEY] for module in model.modules() if KEY in module.__dict__), None)


def is_bound(model: nn.Module) -> bool:
    """True if something is on the model that `unbind` takes off."""
    handle = handle_of(model)
    return handle is not None and bool(handle.steps)


def looks_like(instead: Any, original: Callable[..., Any]) -> None:
    """Give `instead`, a callable object, the signature, name and documentation of the bound method `original`.

    transformers, Trainer, PEFT and accelerate read from a forward's signature what a model may be called with:
    `generate` makes positions and a mask only for a forward that takes them, Trainer drops the columns of a dataset that
    the signature does not name. They are attributes of the object and no function around it: a copy of the model copies
    them along.
    """
    update_wrapper(instead, original, updated=())
    instead.__signature__ = inspect.signature(original)
    # accelerate (seen in 1.15) binds `forward.__func__` to the model again; without it, it binds the forward itself, which
    # would then be called with the model as an argument that nobody gave.
    instead.__func__ = partial(_called_with_module, instead)


def _called_with_module(instead: Callable[..., Any], _module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return instead(*args, **kwargs)
