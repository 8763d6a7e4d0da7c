"""Calls of public functions with wrong arguments, refused by the name of the argument that was meant, or by its kind.

Python's own TypeError names what was given, and not what is taken: `UlyssesConfig(sp=2)` is a usual slip. An argument of
a wrong kind, such as the model in the place of the mesh, would fail far from the call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral
from types import UnionType
from typing import Any, TypeVar, cast

from ithaca.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])


def named_arguments(target: T) -> T:
    """Have a function, or a class as it is made, refuse arguments that it does not take."""
    if isinstance(target, type):
        made: Any = target
        made.__init__ = _checked(made.__init__, target.__name__, hidden=1)
        return target
    return cast(T, _checked(target, target.__name__, hidden=0))


def _checked(function: Callable[..., Any], name: str, hidden: int) -> Callable[..., Any]:
    """`hidden`: how many of the first arguments the caller does not give."""
    signature = inspect.signature(function)
    taken = list(signature.parameters)[hidden:]

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            # Looked at afterwards, so that a call that is right costs nothing; another TypeError is the function's own.
            try:
                signature.bind(*given, **named)
            except TypeError as wrong:
                problem = str(wrong)
            else:
                raise
            unknown = next((key for key in named if key not in taken), None)
            problem = f"{name}: {problem}" if unknown is None else f"{name} has no argument {unknown!r}"
            raise ArgumentError(f"{problem}: {_instead(unknown, taken, named)}") from None

    return call


def _instead(unknown: str | None, taken: Sequence[str], named: dict[str, Any]) -> str:
    meant = None if unknown is None else _nearest(unknown, [name for name in taken if name not in named])
    if unknown is None or meant is None:
        return f"it takes {', '.join(taken)}"
    value = named[unknown]
    return f"use {meant}={value!r}" if isinstance(value, str | int | float | bool) else f"did you mean {meant}?"


def shown(value: object) -> str:
    """Return a short text for a value in a message: the kind alone of a model or a batch, which would fill pages."""
    plain = str | int | float | None
    if isinstance(value, plain):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    few = isinstance(value, list | tuple) and len(value) <= 8 and all(isinstance(each, plain) for each in value)
    if few and len(repr(value)) <= 60:
        return repr(value)
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"


def check_kind(name: str, value: object, kind: type | UnionType, needed: str) -> None:
    """Refuse what is not of `kind`; `needed` says what is, and how it is passed."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {shown(value)}: {needed}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: every text is true, "no" and "false" too."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={shown(value)}: pass True or False")


def check_count(name: str, value: object, least: int = 1, instead: str = "") -> None:
    """Refuse what is no whole number of at least `least`; `instead`: what else may be passed."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ArgumentError(f"{name}={shown(value)}: pass a whole number of at least {least}{instead}")


def _nearest(unknown: str, taken: Sequence[str]) -> str | None:
    """The argument of which `unknown` is a word, or which is spelled nearly so; None if there is none."""
    words = set(unknown.split("_"))
    each = {name: set(name.split("_")) for name in taken}
    sharing = [name for name, own in each.items() if words <= own or own <= words]
    return next(iter(sharing + difflib.get_close_matches(unknown, taken, 1, 0.6)), None)
