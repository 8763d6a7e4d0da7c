"""Names under which a profile finds the exchange and the attention: `training/profile.py` adds them up."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")
EXCHANGE, ATTENTION = "ithaca::exchange", "ithaca::attention"


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose time counts under `name`; costs a microsecond where nothing is profiled."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            with record_function(name):
                return function(*args, **kwargs)

        return named

    return decorate
