"""Detection of the user's own code in a model, which the survey of transformers' architectures has not measured.

Classes and functions of the libraries in `_KNOWN` were measured, or keep their contract. A model is examined again at
`parallelize` if one of its modules has a forward, a `__call__`, a method or a helper function from elsewhere, or is a
class of torch that may mix tokens. An attention function of the user's own is refused: Ulysses takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import activation
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.errors import UnsupportedError

_MIXING_ACTIVATIONS = {"GLU", "LogSoftmax", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin"}
# Classes of torch that compute each token alone. All that measured architectures have is among these and the two norms.
_TOKENWISE = {
    nn.Module,
    nn.Linear,
    nn.Embedding,
    nn.Identity,
    nn.Dropout,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    *(getattr(activation, name) for name in activation.__all__ if name not in _MIXING_ACTIVATIONS),
}
_KNOWN = {"transformers", "torch", "ithaca", "trl", "peft", "accelerate", "liger_kernel"}
_BEFORE_FORWARD = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
_STANDARD = {"builtins", *sys.stdlib_module_names}
_MODELING = "transformers.models."


def foreign_within(model: nn.Module) -> str | None:
    """Return path and class of the first module to examine, or its function; None if there is none."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        kind, own = type(module), module.__dict__
        called = [getattr(kind, key) for key in _BEFORE_FORWARD] + [own[key] for key in _BEFORE_FORWARD if key in own]
        if any(map(is_foreign, called)) or _may_mix(module):
            return f"{name or 'the model'} ({kind.__name__})"
        functions = [(key, each) for key, each in own.items() if callable(each) and not isinstance(each, nn.Module)]
        for base in kind.__mro__:
            if base.__module__.startswith(_MODELING):
                functions += [(key, each) for key, each in vars(base).items() if key != "__init__"]
        for key, function in functions:
            found = _own_helper(key, function, seen)
            if found is not None:
                return f"{found}, which {name or 'the model'} ({kind.__name__}) calls,"
    return None


def foreign_forwards(model: nn.Module) -> dict[nn.Module, set[str]]:
    """Return the modules inside `model` with a forward of the user's own, each with the names of the code's modules."""
    found: dict[nn.Module, set[str]] = {}
    for module in model.modules():
        forward = module.__dict__.get("forward")
        # Ithaca's own forwards wrap what was there at `parallelize`, and `own_loss` compares the model's.
        if forward is None or module is model or type(forward).__module__.startswith("ithaca."):
            continue
        homes = {home for home in _homes(forward) if not _is_known(home)}
        if homes:
            found[module] = homes
    return found


def refuse_forward_put_on_later(model: nn.Module, before: dict[nn.Module, set[str]]) -> None:
    """Refuse a forward of the user's own that was put on after `parallelize`, which did not examine it."""
    for module, homes in foreign_forwards(model).items():
        if homes - before.get(module, set()):
            name = next(name for name, each in model.named_modules() if each is module)
            raise UnsupportedError(
                f"{name} was given a forward after parallelize: do so before it, or call ithaca.unbind(model) and "
                "parallelize it again"
            )


def refuse_own_attention(model: PreTrainedModel) -> None:
    """Refuse a model whose config or modeling file names an attention function of the user's own."""
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        # A kernel of the hub is named by its repository.
        if "/" in (name or ""):
            continue
        for base in type(module).__mro__:
            home = vars(sys.modules.get(base.__module__, sys))
            functions = home.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
            default = home.get("eager_attention_forward") if base.__module__.startswith(_MODELING) else None
            function = functions.get(name, default)
            if function is not None and is_foreign(function):
                raise UnsupportedError(
                    f"config._attn_implementation={name!r} runs an attention function of your own, "
                    f"{getattr(function, '__qualname__', type(function).__name__)}, which parallelize would replace: set "
                    "'sdpa' if that computes the same, or call ithaca.ulysses_attention in a hand-written model"
                )


def _may_mix(module: nn.Module) -> bool:
    """True if the module's forward is one of torch that may read several tokens."""
    home = next(base for base in type(module).__mro__ if "forward" in vars(base))
    if home in (nn.LayerNorm, nn.RMSNorm):
        shape: Any = module.normalized_shape
        return len(shape) > 1
    return home.__module__.startswith("torch.nn.modules.") and home not in _TOKENWISE


def _own_helper(name: str, function: Any, seen: set[int]) -> str | None:
    """Return the name of the first function from elsewhere that a call runs; it follows functions of modeling files."""
    function = getattr(function, "fget", getattr(function, "__func__", function))
    if id(function) in seen or not callable(function) or isinstance(function, BuiltinFunctionType | ModuleType):
        return None
    seen.add(id(function))
    homes = [function.__module__] if isinstance(function, type) else _homes(function)
    if not all(_is_known(home) or home.partition(".")[0] in _STANDARD for home in homes):
        return name
    while function is not None:
        if isinstance(function, FunctionType) and function.__module__.startswith(_MODELING):
            reads = function.__globals__
            for each in _names_in(function.__code__):
                found = _own_helper(each, reads.get(each), seen)
                if found is not None:
                    return found
        function = getattr(function, "__wrapped__", None)
    return None


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the globals that code reads, with those of inner functions."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _is_known(home: str) -> bool:
    return home.partition(".")[0] in _KNOWN


def is_foreign(function: Callable[..., Any]) -> bool:
    """True if a call of `function`, or of a function that it wraps, runs code from outside the known libraries."""
    return not all(map(_is_known, _homes(function)))


def _homes(function: Any) -> Iterator[str]:
    """Yield the names of modules whose code runs in a call."""
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        # Not `__module__`, which functools.wraps copies.
        names: Any = getattr(function, "__globals__", None)
        yield names["__name__"] if names is not None else type(function).__module__
        function = getattr(function, "__wrapped__", None)
