"""The operations between the last hidden states and the logits, read from the model's own forward while it runs.

    hidden -> * or / a number -> head.weight, head.bias -> * or / a number -> (tanh) -> * or / a number -> logits

The model runs on a few tokens, and a TorchFunctionMode records every torch function. If the tensor returned as `logits`
comes from the last hidden states through the head's weight and numbers alone, those numbers give the scale and the
softcap. They are taken from the recorded operations: no config name is trusted and no value is compared. Any other
operation (a module, another tensor, a slice) gives None, and the model computes its logits whole.

The model runs in training mode and in evaluation mode, and both must agree: a dropout before the head is recorded in
training mode only.
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
from ithaca.models.discover.roles import few_tokens, training_mode

_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "true_divide", "__truediv__", "__div__", "__itruediv__"}
_TANH = {"tanh", "tanh_"}
# Prefixes of arguments that are switches of a call or belong to the router's loss: none changes the logits.
_SWITCHES = ("output_", "use_", "return_", "training", "is_", "gradient_", "router_")
_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Path:
    """Numbers applied around the head's product: `times / over`, then a tanh if `capped`, then `outer`."""

    times: float = 1.0
    over: float = 1.0
    outer: float = 1.0
    capped: bool = False

    def spec(self) -> LossSpec:
        if not self.capped:
            return LossSpec(scale=self.times / self.over)
        # softcap * tanh(scale * x / softcap): scale = times * cap / over is exact, as cap / cap is 1 to the bit.
        return LossSpec(scale=self.times * self.outer / self.over, softcap=self.outer)


# A tensor, its version counter when recorded, and its path: after a write in place the entry is void.
_Tracked = tuple[Tensor, int, _Path]


@dataclass(eq=False)
class _Recorder(TorchFunctionMode):
    """Tracks the tensors made from the last hidden states before the head (`hidden`) and after it (`logits`)."""

    head: Any
    hidden: list[_Tracked] = field(default_factory=list)
    logits: list[_Tracked] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args else None
        before, after = _path_of(self.hidden, source), _path_of(self.logits, source)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if "dropout" in getattr(func, "__name__", "") and (before or after) is not None:
            # A dropout of probability 0 returns its input; its probability may be raised later.
            self.hidden.clear()
            self.logits.clear()
        elif func is F.linear and before is not None:
            if self._is_head(before, *args[1:], **kwargs):
                self.logits.append((result, result._version, before))
        elif before is not None and (path := _step(func, source, args[1:], kwargs, result, before)) is not None:
            if not path.capped:
                self.hidden.append((result, result._version, path))
        elif after is not None and (path := _step(func, source, args[1:], kwargs, result, after)) is not None:
            self.logits.append((result, result._version, path))
        return result

    def _is_head(self, before: _Path, weight: Any, bias: Any = None) -> bool:
        # A factor before the head equals the factor after the head only if there is no bias.
        foldable = bias is None or before == _Path()
        return weight is self.head.weight and bias is getattr(self.head, "bias", None) and foldable


def _path_of(tracked: list[_Tracked], x: Any) -> _Path | None:
    """Return the latest path of a tensor; None if the tensor is not tracked or was written in place since."""
    return next((path for each, version, path in reversed(tracked) if x is each and x._version == version), None)


def _is_same(result: Tensor, source: Tensor) -> bool:
    """True if the result is a view of the whole source, unchanged."""
    return (result.data_ptr(), result.shape, result.stride(), result.dtype) == (
        source.data_ptr(),
        source.shape,
        source.stride(),
        source.dtype,
    ) and result._version == source._version


def _step(func: Any, source: Any, others: Any, kwargs: Any, result: Tensor, path: _Path) -> _Path | None:
    """Return the path after one more operation; None if a path has no such operation."""
    name = getattr(func, "__name__", "")
    if _is_same(result, source) and result is not source:
        return path
    if result.shape != source.shape or not result.is_floating_point():
        return None
    if name in ("float", "double", "to", "contiguous", "type_as"):
        # The tiled loss computes in fp32 at least, so a cast to fp32 or wider changes nothing.
        return path if torch.finfo(result.dtype).bits >= min(32, torch.finfo(source.dtype).bits) else None
    if name in _TANH:
        return None if path.capped else replace(path, capped=True)
    number = others[0] if len(others) == 1 and not kwargs else None
    if not isinstance(number, int | float) or isinstance(number, bool) or not (name in _TIMES or name in _OVER):
        return None
    if path.capped:
        return replace(path, outer=path.outer * number if name in _TIMES else path.outer / number)
    return replace(path, times=path.times * number) if name in _TIMES else replace(path, over=path.over * number)


def read_logits(model: PreTrainedModel, head: Any) -> LossSpec | None:
    """Return the scale and softcap of the model's logits; None if its forward does anything else to them."""
    found = []
    for training in (True, False):
        with Rng(head.weight.device).again(), training_mode(model, training=training):
            found.append(_record(model, head))
    in_training, in_evaluation = found
    return in_training.spec() if in_training is not None and in_training == in_evaluation else None


def _record(model: PreTrainedModel, head: Any) -> _Path | None:
    """Return the path to the logits in one run of the model; None if there is none."""
    recorder, given = _Recorder(head), {"input_ids": few_tokens(model), "use_cache": False}
    plain: list[bool] = []

    def before(base: nn.Module, args: Any, kwargs: Any) -> None:
        plain.append(_adds_nothing(base, given, args, kwargs))

    def after(base: nn.Module, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        recorder.hidden = [(hidden, hidden._version, _Path())] if isinstance(hidden, Tensor) else []

    base = model.base_model
    handles = [base.register_forward_pre_hook(before, with_kwargs=True), base.register_forward_hook(after)]
    try:
        with torch.no_grad(), recorder:
            output = model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return _path_of(recorder.logits, getattr(output, "logits", None)) if plain == [True] else None


def _adds_nothing(base: nn.Module, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model's forward passes `given` on to its inner model, and nothing else but switches and defaults."""
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
    """Return the numbers, strings and switches that the model's forward reads by name, on itself and on its config.

    A path found by `read_logits` holds while these values stay the same.
    """
    owners = {"model": model, "config": model.config, "text": model.config.get_text_config()}
    found = []
    kind: Any = type(model)
    for name in _names_read(kind):
        for prefix, owner in owners.items():
            value = getattr(owner, name, _MISSING)
            if isinstance(value, _PLAIN):
                found.append((f"{prefix}.{name}", value))
    return tuple(found)


@cache
def _names_read(kind: Any) -> tuple[str, ...]:
    """Return every attribute name in the bytecode of the class's forwards."""
    forwards: list[Callable[..., Any]] = [vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each)]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in forwards]
    names = {name for code in codes if code is not None for name in code.co_names}
    return tuple(sorted(name for name in names if not name.startswith((*_SWITCHES, "_"))))
