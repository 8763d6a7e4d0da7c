"""The way from the last hidden states to the logits, read from the model's own forward while it runs.

    hidden -> * or / a number -> head.weight, head.bias -> * or / a number -> (tanh) -> * or / a number -> logits

The forward of the class is run on a few tokens, and every torch function in it is recorded. Where what comes out as
`logits` was made from the last hidden states by the head's weight and by numbers alone, those numbers are the way: they
are taken from the operations themselves, so no name in a config decides and no value is compared. Anything else on the
way (a module, another tensor, a slice) gives None, and the logits are computed whole by the model.

Training mode and evaluation mode are both run, and must agree: a dropout in front of the head shows in one of them only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ithaca.memory.head_loss import LossSpec
from ithaca.memory.random_state import Rng
from ithaca.models.discover.roles import few_tokens, switched

_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "true_divide", "__truediv__", "__div__", "__itruediv__"}
_TANH = {"tanh", "tanh_"}
# Switches of a call, and a router's loss: neither is on the way to the logits.
_SWITCHES = ("output_", "use_", "return_", "training", "is_", "gradient_", "router_")
_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Way:
    """What was done around the head's product: `times / over`, then a tanh if `capped`, then `outer`."""

    times: float = 1.0
    over: float = 1.0
    outer: float = 1.0
    capped: bool = False

    def spec(self) -> LossSpec:
        if not self.capped:
            return LossSpec(scale=self.times / self.over)
        # softcap * tanh(scale * x / softcap); a cap divided by itself is 1, to the bit.
        return LossSpec(scale=self.times * self.outer / self.over, softcap=self.outer)


# A tensor, the version it had, and its way: one that was written to since is another.
_Held = tuple[Tensor, int, _Way]


@dataclass(eq=False)
class _Recorder(TorchFunctionMode):
    """Follows the last hidden states to the head and the head's product from there."""

    head: Any
    hidden: list[_Held] = field(default_factory=list)
    logits: list[_Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args else None
        before, after = _way_of(self.hidden, source), _way_of(self.logits, source)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if "dropout" in getattr(func, "__name__", "") and (before or after) is not None:
            # One that drops nothing gives its very input, and may be set to drop something yet.
            self.hidden.clear()
            self.logits.clear()
        elif func is F.linear and before is not None:
            if self._is_head(before, *args[1:], **kwargs):
                self.logits.append((result, result._version, before))
        elif before is not None and (way := _step(func, source, args[1:], kwargs, result, before)) is not None:
            if not way.capped:
                self.hidden.append((result, result._version, way))
        elif after is not None and (way := _step(func, source, args[1:], kwargs, result, after)) is not None:
            self.logits.append((result, result._version, way))
        return result

    def _is_head(self, before: _Way, weight: Any, bias: Any = None) -> bool:
        # A number in front of the head is one behind it only where there is no bias.
        foldable = bias is None or before == _Way()
        return weight is self.head.weight and bias is getattr(self.head, "bias", None) and foldable


def _way_of(held: list[_Held], x: Any) -> _Way | None:
    """The latest way of a tensor that nothing has written to since."""
    return next((way for each, version, way in reversed(held) if x is each and x._version == version), None)


def _is_same(result: Tensor, source: Tensor) -> bool:
    """True if the result is the source under another name: all of its values, and none changed."""
    return (result.data_ptr(), result.shape, result.stride(), result.dtype) == (
        source.data_ptr(),
        source.shape,
        source.stride(),
        source.dtype,
    ) and result._version == source._version


def _step(func: Any, source: Any, others: Any, kwargs: Any, result: Tensor, way: _Way) -> _Way | None:
    """The way after one more operation; None where that is not one of a way."""
    name = getattr(func, "__name__", "")
    if _is_same(result, source) and result is not source:
        return way
    if result.shape != source.shape or not result.is_floating_point():
        return None
    if name in ("float", "double", "to", "contiguous", "type_as"):
        # The loss is taken in fp32 at least, whatever the model's own cast.
        return way if torch.finfo(result.dtype).bits >= min(32, torch.finfo(source.dtype).bits) else None
    if name in _TANH:
        return None if way.capped else replace(way, capped=True)
    number = others[0] if len(others) == 1 and not kwargs else None
    if not isinstance(number, int | float) or isinstance(number, bool) or not (name in _TIMES or name in _OVER):
        return None
    if way.capped:
        return replace(way, outer=way.outer * number if name in _TIMES else way.outer / number)
    return replace(way, times=way.times * number) if name in _TIMES else replace(way, over=way.over * number)


def read_logits(model: PreTrainedModel, head: Any) -> LossSpec | None:
    """What the model's forward does to the product of its last hidden states with the head; None where that is more."""
    found = []
    for training in (True, False):
        with Rng(head.weight.device).again(), switched(model, training=training):
            found.append(_record(model, head))
    first, second = found
    return first.spec() if first is not None and first == second else None


def _record(model: PreTrainedModel, head: Any) -> _Way | None:
    recorder, given = _Recorder(head), {"input_ids": few_tokens(model), "use_cache": False}
    plain: list[bool] = []

    def before(base: nn.Module, args: Any, kwargs: Any) -> None:
        plain.append(_adds_nothing(base, given, args, kwargs))

    def after(base: nn.Module, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        recorder.hidden = [(hidden, hidden._version, _Way())] if isinstance(hidden, Tensor) else []

    base = model.base_model
    handles = [base.register_forward_pre_hook(before, with_kwargs=True), base.register_forward_hook(after)]
    try:
        with torch.no_grad(), recorder:
            output = model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return _way_of(recorder.logits, getattr(output, "logits", None)) if plain == [True] else None


def _adds_nothing(base: nn.Module, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the model's forward hands its inner model what it was given, and no more than switches and defaults."""
    parameters = inspect.signature(base.forward).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    passed = dict(zip(parameters, args, strict=False)) | kwargs
    if any(passed.get(key) is not value for key, value in given.items()):
        return False
    return all(
        key in given or value is None or key.startswith(_SWITCHES) or value is defaults.get(key, base)
        for key, value in passed.items()
    )


def numbers_read(model: PreTrainedModel) -> tuple[tuple[str, Any], ...]:
    """The numbers, words and switches that the model's own forward reads by name, on itself and on its config.

    A way that was found holds while these stay what they were.
    """
    owners = {"model": model, "config": model.config, "text": model.config.get_text_config()}
    found = []
    kind: Any = type(model)
    for name in _names(kind):
        for place, owner in owners.items():
            value = getattr(owner, name, _MISSING)
            if isinstance(value, _PLAIN):
                found.append((f"{place}.{name}", value))
    return tuple(found)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    forwards: list[Callable[..., Any]] = [vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each)]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in forwards]
    names = {name for code in codes if code is not None for name in code.co_names}
    return tuple(sorted(name for name in names if not name.startswith((*_SWITCHES, "_"))))
