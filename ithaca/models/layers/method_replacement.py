"""What is put in the place of a model's method looks like that method.

transformers, Trainer, PEFT and accelerate read from a forward's signature what a model may be called with: `generate`
makes positions and a mask only for a forward that takes them, and all logits of the prompt for one that takes no
`logits_to_keep`; Trainer drops the columns of a dataset that the signature does not name. So the callable objects that
stand in for methods here carry the signature, name and documentation of the method.

accelerate (seen in 1.15) takes `forward.__func__` where there is one and binds it to the model again; without it, it
binds the forward itself, which would then be called with the model as an argument that nobody gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any


def looks_like(instead: Any, original: Callable[..., Any]) -> None:
    """Give `instead`, a callable object, the look of the bound method `original`.

    Attributes of the object itself and no function around it: a copy of the model copies them along.
    """
    update_wrapper(instead, original, updated=())
    instead.__signature__ = inspect.signature(original)
    instead.__func__ = partial(_called_with_module, instead)


def _called_with_module(instead: Callable[..., Any], _module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return instead(*args, **kwargs)
