"""Handle of a parallelized model: the list of all changes to the model, and the undo of them.

    handle = Handle.on(model, mesh)                 # hangs on the model, as model.__dict__["_ithaca"]
    handle.replace(layer, "forward", replay)        # a step: remembers the attribute from before
    handle.add(model.register_forward_hook(leave))  # a step: anything with a `remove`
    handle.keep(Binding(...))                       # a part: an object of a folder above, found again by its type
    handle.part(Binding)
    handle.undo()                                   # steps are undone from the last to the first

Every change of a module goes through the handle, so `undo` restores the model. Sharding alone cannot be undone: FSDP2's
classes and hooks stay, and with them the steps added with `while_sharded` and the handle itself.

The handle is an attribute of its model and of nothing else: it is freed with the model, and a deep copy of the model has
its own.
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
    """One step: a change, such as a hook, that can undo itself."""

    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ReplacedAttribute:
    """Replaced attribute of one instance. `before`: the instance's own value; empty if the class provided it."""

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
    """Step that removes a part from its handle."""

    handle: Handle
    kind: type

    def remove(self) -> None:
        del self.handle.parts[self.kind]


@dataclass(eq=False)
class Handle:
    """Changes to one model, and parts kept for other folders. `explain` adds the plan to an out-of-memory error."""

    mesh: Mesh
    root: nn.Module
    steps: list[Removable] = field(default_factory=list)
    while_sharded: list[Removable] = field(default_factory=list)
    parts: dict[type, Any] = field(default_factory=dict)
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    explain: Callable[[torch.OutOfMemoryError], torch.OutOfMemoryError] | None = None

    @classmethod
    def on(cls, model: nn.Module, mesh: Mesh) -> Handle:
        """Return the model's handle, a new one if the model has none."""
        found = handle_of(model)
        if found is None:
            found = model.__dict__[KEY] = cls(mesh, model)
        return found

    def add(self, step: Removable, *, while_sharded: bool = False) -> None:
        """Add a change to the list. `while_sharded`: the change outlasts `undo`, as sharded weights do."""
        (self.while_sharded if while_sharded else self.steps).append(step)

    def replace(self, module: nn.Module, name: str, value: Any, *, while_sharded: bool = False) -> None:
        """Set an attribute of one instance, not of its class."""
        before = (module.__dict__[name],) if name in module.__dict__ else ()
        self.add(_ReplacedAttribute(module, name, before), while_sharded=while_sharded)
        module.__dict__[name] = value

    def replace_method(
        self, module: nn.Module, name: str, instead: Callable[..., Any], *, while_sharded: bool = False
    ) -> None:
        """Replace a method of one instance; a callable object gets the method's signature and name."""
        if not inspect.ismethod(instead):
            looks_like(instead, getattr(module, name))
        self.replace(module, name, instead, while_sharded=while_sharded)

    def mark(self, module: nn.Module) -> None:
        """Make `handle_of` find the handle on this module too."""
        if KEY not in module.__dict__:
            self.replace(module, KEY, self)

    def keep(self, part: T, *, while_sharded: bool = False) -> T:
        """Store a part, the only one of its type."""
        self.parts[type(part)] = part
        self.add(_KeptPart(self, type(part)), while_sharded=while_sharded)
        return part

    def part(self, kind: type[T]) -> T | None:
        """Return the part of this type, None if there is none."""
        return self.parts.get(kind)

    def steps_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer of the model's weights, by a weak reference."""
        self.optimizers = [weakref.ref(each) for each in dict.fromkeys((*self.living_optimizers(), optimizer))]

    def living_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the recorded optimizers that still exist."""
        return [optimizer for each in self.optimizers if (optimizer := each()) is not None]

    def undo(self) -> None:
        """Undo all steps, the last first; remove the handle itself unless weights are sharded."""
        self._undo_to(0)
        self.explain = None
        if not self.while_sharded:
            self.root.__dict__.pop(KEY, None)

    def _undo_to(self, count: int) -> None:
        while len(self.steps) > count:
            self.steps.pop().remove()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undo all steps if an error ends the block."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    @contextmanager
    def temporarily(self) -> Iterator[None]:
        """Undo the steps added inside the block at its end."""
        count = len(self.steps)
        try:
            yield
        finally:
            self._undo_to(count)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Explain an out-of-memory error of the block by the memory plan; blocks may be nested."""
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
        # Optimizers step the original's weights.
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "optimizers": []}, memo))
        return twin

    def __reduce__(self) -> Any:
        raise UnsupportedError(NOT_PICKLED)


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a model or of a model inside it (PEFT, DDP); None if there is none."""
    return next((module.__dict__[KEY] for module in model.modules() if KEY in module.__dict__), None)


def is_bound(model: nn.Module) -> bool:
    """True if the model has changes that `unbind` undoes."""
    handle = handle_of(model)
    return handle is not None and bool(handle.steps)


def looks_like(instead: Any, original: Callable[..., Any]) -> None:
    """Give `instead`, a callable object, the signature, name and documentation of the bound method `original`.

    transformers, Trainer, PEFT and accelerate read the model's arguments from the signature of forward: `generate` makes
    positions and a mask only for a forward that takes them, and Trainer drops dataset columns that the signature does not
    name. Attributes of the object, not a function around it, because a copy of the model copies them.
    """
    update_wrapper(instead, original, updated=())
    instead.__signature__ = inspect.signature(original)
    # accelerate (seen in 1.15) binds `forward.__func__` to the model again. Without `__func__` it would bind the forward
    # itself, and call it with the model as an additional first argument.
    instead.__func__ = partial(_called_with_module, instead)


def _called_with_module(instead: Callable[..., Any], _module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return instead(*args, **kwargs)
