"""Source files, names and functions that a model's classes consist of.

    code = SourceCode()
    code.add_class(LlamaMLP)     code.files {".../modeling_llama.py", ...}   code.names {"gate_proj", "act_fn", ...}

Every function that the code reaches has to be the function that its own file defines. UnknownStructure is raised if a
class, a function, a global or a function of torch (`F.silu`) has been replaced, by whomever. Methods of tensors and
functions that torch defines in C are not looked at, and neither are edits of a file after its import.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
import transformers

_ROOTS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, transformers))
_STANDARD = str(Path(inspect.__file__).parent) + "/"
# Classes of these transformers modules are checked for the functions that lead into a forward, and for no others: the
# rest of their code loads, generates and saves.
_GENERAL = (
    "transformers.modeling_utils", "transformers.generation", "transformers.utils", "transformers.integrations",
    "transformers.distributed",
)  # fmt: skip
_INTO_FORWARD = (
    "forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "__setattr__",
)  # fmt: skip
_NOT_RUN = ("__init__", "_init_weights", "__init_subclass__", "__repr__", "extra_repr")
_CONTAINERS = (tuple, list, dict, set, frozenset, type(None))
PLAIN = (bool, int, float, str)
_LruCache = type(cache(lambda: None))


class UnknownStructure(Exception):
    """Raised for code or objects that no key covers."""


@dataclass(eq=False)
class SourceCode:
    """The source files that a model's classes come from, the names that their functions read, the functions that
    decorators have given to the classes, and values of the classes themselves, by name."""

    files: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    values: set[tuple[str, str]] = field(default_factory=set)
    seen: set[Any] = field(default_factory=set)

    def lines(self) -> list[str]:
        """Return what two models with the same code share; classes have caches too, which no function here reads."""
        values = sorted(line for name, line in self.values if name in self.names)
        return [*sorted(map(_digest, self.files)), *sorted(self.given), *values]

    def add_class(self, kind: type) -> None:
        """Add a class and its base classes; raise UnknownStructure if one of them is not the class that its file defines."""
        for base in kind.__mro__:
            if base in self.seen:
                continue
            self.seen.add(base)
            home, name = sys.modules.get(base.__module__), base.__module__
            if home is None or not name.startswith(("transformers.", "torch.")) or base is object:
                if base.__module__ in ("builtins", "typing", "abc") or name in sys.stdlib_module_names:
                    continue
                raise UnknownStructure(f"{base.__module__}.{base.__qualname__}")
            if getattr(home, base.__qualname__, None) is not base and not name.startswith("torch."):
                raise UnknownStructure(f"another {base.__qualname__}")
            if name.startswith("torch.") or name.startswith(_GENERAL):
                self._check_ways_in(base)
            else:
                self._add_functions(base, home)

    def _check_ways_in(self, base: type) -> None:
        for name in _INTO_FORWARD:
            function = vars(base).get(name)
            if name not in vars(base):
                continue
            if not isinstance(function, FunctionType) or not all(map(is_library, wrapped_functions(function))):
                raise UnknownStructure(f"{base.__qualname__}.{name}")
            if name == "forward":
                self._add_paths(function)

    def _add_functions(self, base: type, home: ModuleType) -> None:
        self.files.add(str(home.__file__))
        for name, value in vars(base).items():
            functions = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
            if name == "forward" and not isinstance(value, FunctionType):
                raise UnknownStructure(f"{base.__qualname__}.forward")
            for function in functions:
                if isinstance(function, FunctionType):
                    self._add_function(function, home, f"{base.__qualname__}.{name}", reads=name not in _NOT_RUN)
                elif isinstance(function, type | GetSetDescriptorType | MemberDescriptorType):
                    continue
                elif callable(function) or hasattr(function, "__get__"):
                    raise UnknownStructure(f"{base.__qualname__}.{name}")
                elif isinstance(function, PLAIN) and not name.startswith("__"):
                    self.values.add((name, f"{base.__qualname__}.{name}={function!r}"))

    def _add_function(self, function: FunctionType, home: ModuleType, qualified: str, *, reads: bool) -> None:
        *wrappers, innermost = wrapped_functions(function)
        if innermost.__code__.co_filename != home.__file__ or innermost.__qualname__ != qualified:
            # A decorator of transformers gives experts functions of its own module, which the key names.
            defined = getattr(sys.modules.get(innermost.__module__), innermost.__qualname__, None)
            if defined is not innermost:
                raise UnknownStructure(f"{qualified} is {innermost.__module__}.{innermost.__qualname__}")
            self._add_library(qualified, innermost)
        for wrapper in wrappers:
            self._add_library(qualified, wrapper)
        if not reads:
            return
        for code in (code for each in (*wrappers, innermost) for code in _codes(each.__code__)):
            self.names.update(code.co_names)
            self.names.update(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
        for code in _codes(innermost.__code__):
            for path in _globals_of(code):
                if path[0] in innermost.__globals__:
                    self._add_global(path[0], innermost.__globals__[path[0]], home)
        self._add_paths(innermost)

    def _add_global(self, name: str, value: Any, home: ModuleType) -> None:
        """Add a global that a function reads: code of the same file, and objects of a known library by name."""
        if (home, name, id(value)) in self.seen:
            return
        self.seen.add((home, name, id(value)))
        full = f"{home.__name__}.{name}"
        value = getattr(value, "__wrapped__", value) if isinstance(value, _LruCache) else value
        if isinstance(value, type):
            self.given.add(f"{full}={value.__module__}.{value.__qualname__}")
            if not _is_known(value.__module__):
                raise UnknownStructure(full)
            if issubclass(value, torch.autograd.Function) and value.__module__.startswith("transformers."):
                self.add_class(value)
        elif isinstance(value, FunctionType) and sys.modules.get(value.__module__) is home:
            self._add_function(value, home, name, reads=True)
        elif isinstance(value, FunctionType):
            for each in wrapped_functions(value):
                self._add_library(full, each)
        elif isinstance(value, ModuleType):
            if not _is_known(value.__name__) or sys.modules.get(value.__name__) is not value:
                raise UnknownStructure(full)
        elif isinstance(value, PLAIN):
            self.given.add(f"{full}={value!r}")
        elif not _is_object_of_library(value):
            raise UnknownStructure(full)

    def _add_paths(self, function: FunctionType) -> None:
        """Check the functions that the code reaches through modules, as `nn.functional.silu`."""
        for code in _codes(function.__code__):
            for name, *attributes in _globals_of(code):
                value = function.__globals__.get(name)
                for attribute in attributes:
                    if not isinstance(value, ModuleType):
                        break
                    value = getattr(value, attribute, None)
                else:
                    # Functions of C have no file, and no Python code that could be another.
                    if attributes and isinstance(value, FunctionType):
                        for each in wrapped_functions(value):
                            self._add_library(".".join((name, *attributes)), each)

    def _add_library(self, name: str, function: FunctionType) -> None:
        """Add the file of a function of transformers, and the name under which the code calls the function."""
        file = function.__code__.co_filename
        if not is_library(function):
            raise UnknownStructure(f"{name} is from {file}")
        self.given.add(f"{name}={function.__module__}.{function.__qualname__}")
        if file.startswith(_ROOTS[1]):
            self.files.add(file)


@cache
def _digest(file: str) -> str:
    # Line ends differ between Windows and Unix installations of one version.
    return hashlib.sha256(Path(file).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def wrapped_functions(function: FunctionType) -> list[FunctionType]:
    """Return the function and the functions it wraps: functools.wraps copies names, so every link must be checked."""
    links: list[FunctionType] = [function]
    while (inner := getattr(links[-1], "__wrapped__", None)) is not None:
        if not isinstance(inner, FunctionType):
            raise UnknownStructure(f"{function.__qualname__} wraps {type(inner).__name__}")
        links.append(inner)
    return links


def _is_known(module: str) -> bool:
    root = module.partition(".")[0]
    return root in ("torch", "transformers", "builtins") or root in sys.stdlib_module_names


def _is_object_of_library(value: Any) -> bool:
    """True if the object can be no function or module of somebody else's, under another type."""
    return type(value) in _CONTAINERS or type(value).__module__.partition(".")[0] in (
        "torch",
        "transformers",
        "logging",
    )


def is_library(function: FunctionType) -> bool:
    """True if the function, and every function that it was made around, is from a file of torch, transformers or Python."""
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            continue
        if isinstance(inner, FunctionType) and not _is_of_file(inner):
            return False
    return _is_of_file(function)


def _is_of_file(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return file.startswith(_ROOTS) or (file.startswith(_STANDARD) and "site-packages" not in file)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


@cache
def _globals_of(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Return the globals that code reads, each with the attributes that it reads of them: ("nn", "functional", "silu")."""
    found: set[tuple[str, ...]] = set()
    path: tuple[str, ...] = ()
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            path = (str(each.argval),)
        elif path and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, str(each.argval))
        elif each.opname not in ("CACHE", "EXTENDED_ARG"):
            path = ()
        if path:
            found.add(path)
    return frozenset(found)
