"""Structure keys: hashes of a model's code and module tree, under which the survey stores its findings.

    structure = Structure.of(model, layers)
    structure.layers   ["3f0c...", "3f0c...", ...]   a key for each layer
    structure.model    "91ab..."                     a key for everything around the layers

    hashed                                              not hashed
    the text of the source files of the model's classes sizes: of a number only the sign, of a float also 0 and 1
    the module tree: classes, names, weight dimensions  devices, dtypes, values of weights and buffers
    every attribute and config switch that code reads   windows, token ids, a layer's index

Two models with equal keys run the same code.

`Structure.of` returns None for anything that could change the code: a class from outside transformers and torch, a
function that is not the one its file defines, a forward on an instance, a hook, a weight of another kind. Without a key
the model is run instead (`findings.py`). A missing key costs a second; a wrong key would be a silent error.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from ithaca.models.discover.logits_path import numbers_read
from ithaca.models.layers.hooks import hooked

_ROOTS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, transformers))
_STANDARD = str(Path(inspect.__file__).parent) + "/"
# Classes of these transformers modules are checked for the functions that lead into a forward, and for no others: the
# rest of their code loads, generates and saves.
_GENERAL = ("transformers.modeling_utils", "transformers.generation", "transformers.utils", "transformers.integrations")
_INTO_FORWARD = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__setattr__")
_NOT_RUN = ("__init__", "_init_weights", "__init_subclass__", "__repr__", "extra_repr")
_OF_ANY_MODULE = frozenset(nn.Module().__dict__)
# Special tokens, the layer's index, sharding plans and flags of loading: none changes what a layer's children compute.
_NOT_KEYED = frozenset((
    "padding_idx", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "layer_idx", "layer_id", "dtype",
    "generation_config", "_is_hf_initialized", "_tp_plan", "_pp_plan", "_ep_plan", "_fsdp_plan",
))  # fmt: skip
_PLAIN = (bool, int, float, str)
# The only private switch of a config that selects code outside attention.
_EXPERTS = "_experts_implementation_internal"
_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


class _Unknown(Exception):
    """Raised for code or objects that no key covers."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure keys of one model: one for the model around its layers, one for each layer."""

    model: str
    layers: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, layers: list[nn.Module]) -> Structure | None:
        """Return the keys; None if the model has anything that a key cannot cover."""
        try:
            if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
                raise _Unknown("hooks on every module")
            code = _Code()
            for kind in {type(module) for module in model.modules()}:
                code.add_class(kind)
            within = {inner for layer in layers for inner in layer.modules()}
            weights = [id(p) for inner in within for p in inner._parameters.values() if p is not None]
            if len(weights) != len(set(weights)):
                raise _Unknown("a weight that two modules share")
            files = [*sorted(map(_digest, code.files)), *sorted(code.library_functions)]
            each = tuple(_key([*files, *_lines(layer, code.names, frozenset())]) for layer in layers)
            around = [*_lines(model, code.names, within - set(layers)), *_config_lines(model, code.names)]
            return cls(_key([*files, *around]), each)
        except (_Unknown, OSError):
            return None


def _key(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def _digest(file: str) -> str:
    # Line ends differ between Windows and Unix installations of one version.
    return hashlib.sha256(Path(file).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


@dataclass(eq=False)
class _Code:
    """Source code of a model's classes.

    `files`: their source files. `names`: every name that their functions read. `library_functions`: functions of other
    transformers modules that the classes call. `seen`: classes and globals that are already added.
    """

    files: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    library_functions: set[str] = field(default_factory=set)
    seen: set[Any] = field(default_factory=set)

    def add_class(self, kind: type) -> None:
        """Add a class and its base classes; raise _Unknown if one of them is not the class that its file defines."""
        for base in kind.__mro__:
            if base in self.seen:
                continue
            self.seen.add(base)
            home, name = sys.modules.get(base.__module__), base.__module__
            if home is None or not name.startswith(("transformers.", "torch.")) or base is object:
                if base.__module__ in ("builtins", "typing", "abc") or name in sys.stdlib_module_names:
                    continue
                raise _Unknown(f"{base.__module__}.{base.__qualname__}")
            if getattr(home, base.__qualname__, None) is not base and not name.startswith("torch."):
                raise _Unknown(f"another {base.__qualname__}")
            if name.startswith("torch.") or name.startswith(_GENERAL):
                self._check_forward_path(base)
            else:
                self._add_functions(base, home)

    def _check_forward_path(self, base: type) -> None:
        """Raise _Unknown if a function between `__call__` and `forward` is not a library's own."""
        for name in _INTO_FORWARD:
            function = vars(base).get(name)
            if isinstance(function, FunctionType) and not all(map(_is_library, _wrapped(function))):
                raise _Unknown(f"{base.__qualname__}.{name}")

    def _add_functions(self, base: type, home: ModuleType) -> None:
        """Add the source file and the functions of one class of a modeling file."""
        self.files.add(str(home.__file__))
        for name, value in vars(base).items():
            functions = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
            if name == "forward" and not isinstance(value, FunctionType):
                raise _Unknown(f"{base.__qualname__}.forward")
            for function in functions:
                if isinstance(function, FunctionType):
                    self._add_function(function, home, f"{base.__qualname__}.{name}", reads=name not in _NOT_RUN)
                elif callable(function) and not isinstance(function, type):
                    raise _Unknown(f"{base.__qualname__}.{name}")

    def _add_function(self, function: FunctionType, home: ModuleType, qualified: str, *, reads: bool) -> None:
        *wrappers, innermost = _wrapped(function)
        if innermost.__code__.co_filename != home.__file__ or innermost.__qualname__ != qualified:
            # transformers' decorator for experts replaces methods by functions of its own module: the key names them.
            defined = getattr(sys.modules.get(innermost.__module__), innermost.__qualname__, None)
            if defined is not innermost:
                raise _Unknown(f"{qualified} is {innermost.__module__}.{innermost.__qualname__}")
            self._add_library(qualified, innermost)
        for wrapper in wrappers:
            self._add_library(qualified, wrapper)
        if not reads:
            return
        for code in (code for each in (*wrappers, innermost) for code in _codes(each.__code__)):
            self.names.update(code.co_names)
            self.names.update(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
        for code in _codes(innermost.__code__):
            for name in set(_globals_of(code)):
                if name in innermost.__globals__:
                    self._add_global(name, innermost.__globals__[name], home)

    def _add_global(self, name: str, value: Any, home: ModuleType) -> None:
        """Add a global that a function reads: a function with its code, a class only if a known library defines it."""
        if not isinstance(value, FunctionType | type) or (home, name, value) in self.seen:
            return
        self.seen.add((home, name, value))
        module = sys.modules.get(value.__module__)
        if isinstance(value, type):
            root = value.__module__.partition(".")[0]
            if root not in ("torch", "transformers") and root not in sys.stdlib_module_names and root != "builtins":
                raise _Unknown(f"{home.__name__}.{name}")
        elif module is home:
            self._add_function(value, home, name, reads=True)
        else:
            for each in _wrapped(value):
                self._add_library(f"{home.__name__}.{name}", each)

    def _add_library(self, name: str, function: FunctionType) -> None:
        """Add the file of a function of transformers, and the name under which the code calls the function."""
        file = function.__code__.co_filename
        if not _is_library(function):
            raise _Unknown(f"{name} is from {file}")
        self.library_functions.add(f"{name}={function.__module__}.{function.__qualname__}")
        if file.startswith(_ROOTS[1]):
            self.files.add(file)


def _wrapped(function: FunctionType) -> list[FunctionType]:
    """Return the function and the functions it wraps: functools.wraps copies names, so every link must be checked."""
    links: list[FunctionType] = [function]
    while (inner := getattr(links[-1], "__wrapped__", None)) is not None:
        if not isinstance(inner, FunctionType):
            raise _Unknown(f"{function.__qualname__} wraps {type(inner).__name__}")
        links.append(inner)
    return links


def _is_library(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return file.startswith(_ROOTS) or (file.startswith(_STANDARD) and "site-packages" not in file)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    return tuple({str(each.argval) for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"})


def _lines(root: nn.Module, names: set[str], left_out: frozenset[nn.Module] | set[nn.Module]) -> list[str]:
    """Return a line for every module below `root`; list entries with equal content share one line."""
    found: dict[str, None] = {}
    for path, module in root.named_modules():
        if module in left_out:
            continue
        kind = type(module)
        if hooked(module, ("ithaca.",)):
            raise _Unknown(f"a hook on {path}")
        children = [f"{'*' if name.isdigit() else name}" for name in module._modules]
        line = (
            ".".join("*" if part.isdigit() else part for part in path.split(".")),
            f"{kind.__module__}.{kind.__qualname__}",
            *dict.fromkeys(children),
            *(_weight(name, weight) for name, weight in (module._parameters | module._buffers).items()),
            *_attributes(module, names),
        )
        found[" ".join(line)] = None
    return list(found)


def _weight(name: str, weight: Tensor | None) -> str:
    if weight is not None and type(weight) not in (nn.Parameter, Tensor):
        raise _Unknown(f"{name} is a {type(weight).__name__}")
    return f"{name}:{'' if weight is None else weight.ndim}"


def _attributes(module: nn.Module, names: set[str]) -> Iterator[str]:
    """Yield the module's attributes that the code may read: switches by value, functions by name."""
    of_torch = type(module).__module__.startswith("torch.")
    for key, value in sorted(vars(module).items()):
        home = type(value).__module__
        # Attributes of `parallelize` wrap the forward and come off with `unbind`.
        if key in _OF_ANY_MODULE or key in _NOT_KEYED or home.startswith("ithaca."):
            continue
        if callable(value) and not isinstance(value, nn.Module | type) and hasattr(type(module), key):
            raise _Unknown(f"{key} of an instance")
        if key not in names and not of_torch:
            continue
        if isinstance(value, partial):
            fixed = [f"{name}={_shown(name, each)}" for name, each in sorted(value.keywords.items())]
            yield f"{key}={_function(key, value.func)}({', '.join(fixed)})"
        elif isinstance(value, FunctionType | BuiltinFunctionType):
            yield f"{key}={_function(key, value)}"
        elif callable(value) and home.partition(".")[0] not in ("torch", "transformers"):
            raise _Unknown(key)
        else:
            yield f"{key}={_shown(key, value)}"


def _function(key: str, value: Any) -> str:
    """Return the full name of a function of torch or transformers."""
    if isinstance(value, FunctionType) and not all(map(_is_library, _wrapped(value))):
        raise _Unknown(key)
    if not isinstance(value, FunctionType | BuiltinFunctionType):
        raise _Unknown(key)
    return f"{value.__module__}.{value.__qualname__}"


def _config_lines(model: PreTrainedModel, names: set[str]) -> list[str]:
    """Return the config's switches that the code may read; lists are per layer, and each layer has its own key."""
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    found = {f"{name}={'1' if value == 1 else _shown(name, value)}" for name, value in numbers_read(model)}
    for config in [*configs.values(), model.config.get_text_config()]:
        if getattr(config, "is_heterogeneous", False):
            raise _Unknown("layers with configs of their own")
        for key, value in vars(config).items():
            read = key in names and key not in _NOT_KEYED and not key.startswith("_")
            if (read or (key == _EXPERTS and "_experts_implementation" in names)) and isinstance(value, _PLAIN):
                found.add(f"config.{key}={_shown(key, value)}")
    return sorted(found)


def _shown(key: str, value: Any) -> str:
    """Return the part of a value that a key covers: strings and bools in full, the sign of a number, else the type."""
    if isinstance(value, bool | str) or value is None:
        # Only the attention function, which `parallelize` replaces, reads a window.
        return "" if "window" in key else repr(value)
    if isinstance(value, int | float):
        if "window" in key:
            return ""
        unit = isinstance(value, float) and value == 1
        return "1.0" if unit else "0" if value == 0 else "+" if value > 0 else "-"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{name}: {_shown(key, each)}' for name, each in value.items()))}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{{{', '.join(sorted({_shown(key, each) for each in value}))}}}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
