"""Logits of whole sequences, computed when they are read: `output.logits` beside a loss costs nothing until then.

    out = model(**batch)          # with labels: head and loss in tiles, no logits
    out.loss                      # computes no logits
    out.logits.argmax(-1)         # the model runs once more without labels, on all ranks of the group
    out = model(**batch)          # logits of the call before were read, so this call computes both in one pass

Reading logits is a collective call, as a forward is: every rank of a sequence group reads them, or no rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(slots=True)
class LogitsRequest:
    """A flag: True once the logits of a call were read. The next call with labels looks at the flag."""

    done: bool = False


class LazyLogits(Tensor):
    """A tensor that the first operation on it computes.

    `isinstance` and passing the tensor on are free; every operation, `shape` and `detach` included, is done on the value.
    """

    _fetch: Callable[[], Tensor] | None
    _value: Tensor | None
    _reading: LogitsRequest

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        fetch: Callable[[], Tensor],
        reading: LogitsRequest,
    ) -> LazyLogits:
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._fetch, made._value, made._reading = fetch, None, reading
        return made

    def __init__(self, *_: Any) -> None:
        # Tensor.__init__ takes no arguments.
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(value_of, args), **tree_map(value_of, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Collectives are called past the Python layer above.
        return func(*tree_map(value_of, args), **tree_map(value_of, kwargs or {}))


def value_of(thing: Any) -> Any:
    """Return the value of lazy logits, computed at the first call; anything else as it is."""
    if not isinstance(thing, LazyLogits):
        return thing
    # Attributes by `__dict__`: an attribute of the tensor would go through `__torch_function__`, and recurse.
    own = thing.__dict__
    if own["_value"] is None:
        own["_reading"].done = True
        own["_value"], own["_fetch"] = own["_fetch"](), None
    return own["_value"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of the random generators before a call, so that the call can be repeated with the same dropout."""

    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    @contextmanager
    def again(self, device: torch.device) -> Any:
        """Draw random numbers from this state inside; restore the generators afterwards."""
        after = RandomState.now(device)
        self._set(device)
        try:
            yield
        finally:
            after._set(device)

    def _set(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
