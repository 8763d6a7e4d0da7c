"""Checks of the arguments of public functions, with messages that name the argument that was meant.

    UlyssesConfig(sp=2)         ->  UlyssesConfig has no argument 'sp': use sp_size=2
    save_pretrained("out", m)   ->  model is 'out': pass the model first, as in save_pretrained(model, folder)

Python's own TypeError does not name the right argument, and an argument of a wrong kind fails far from the call.
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
    """Decorate a function or a class, so that a call with a wrong argument raises ArgumentError."""
    if isinstance(target, type):
        decorated: Any = target
        decorated.__init__ = _checked(decorated.__init__, target.__name__, implicit=1)
        return target
    return cast(T, _checked(target, target.__name__, implicit=0))


def _checked(function: Callable[..., Any], name: str, implicit: int) -> Callable[..., Any]:
    """Return the function with the check. `implicit`: number of first arguments that Python passes, such as self."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters)[implicit:]

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            # Bound only after a TypeError, so that a correct call costs nothing. If binding works, the TypeError came
            # from inside the function.
            try:
                signature.bind(*given, **named)
            except TypeError as wrong:
                problem = str(wrong)
            else:
                raise
            unknown = next((key for key in named if key not in parameters), None)
            problem = f"{name}: {problem}" if unknown is None else f"{name} has no argument {unknown!r}"
            raise ArgumentError(f"{problem}: {_hint(unknown, parameters, named)}") from None

    return call


def _hint(unknown: str | None, parameters: Sequence[str], named: dict[str, Any]) -> str:
    meant = None if unknown is None else _nearest(unknown, [name for name in parameters if name not in named])
    if unknown is None or meant is None:
        return f"it takes {', '.join(parameters)}"
    value = named[unknown]
    return f"use {meant}={value!r}" if isinstance(value, str | int | float | bool) else f"did you mean {meant}?"


def shown(value: object) -> str:
    """Return a short text for a value in a message; only the type of a model or a batch, which would fill pages."""
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
    """Refuse a value that is not of `kind`. `needed`: end of the message, such as "pass the model first"."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {shown(value)}: {needed}")


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither True nor False: in Python the text "false" counts as true."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={shown(value)}: pass True or False")


def check_count(name: str, value: object, least: int = 1, instead: str = "") -> None:
    """Refuse a value that is no whole number of at least `least`. `instead`: end of the message, such as ", or None"."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ArgumentError(f"{name}={shown(value)}: pass a whole number of at least {least}{instead}")


def _nearest(unknown: str, parameters: Sequence[str]) -> str | None:
    """Return the parameter that shares its words with `unknown`, or has a similar spelling; None if there is none."""
    words = set(unknown.split("_"))
    words_of = {name: set(name.split("_")) for name in parameters}
    sharing = [name for name, own in words_of.items() if words <= own or own <= words]
    return next(iter(sharing + difflib.get_close_matches(unknown, parameters, 1, 0.6)), None)
