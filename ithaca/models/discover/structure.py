"""Structure keys: hashes of a model's code and module tree, under which the survey stores its findings.

    structure = Structure.of(model, layers)
    structure.layers   ["3f0c...", "3f0c...", ...]   a key for each layer
    structure.model    "91ab..."                     a key for everything around the layers

    hashed                                              not hashed
    the text of the source files of the model's classes sizes: of a number only the sign, of a float also 0 and 1
    the module tree: classes, names, weight dimensions  devices, dtypes, values of weights and buffers
    every attribute and config switch that code reads   windows, token ids, a layer's index

Two models with equal keys run the same code: no modeling file of a stored type compares a size with anything but 0
(`repeat_kv` apart, which belongs to attention).

`Structure.of` returns None for anything that could change the code: a class from outside transformers and torch, a
function that is not the one its file defines, a forward on an instance, a hook, a weight of another kind. Without a key
the model is run instead (`findings.py`). A missing key costs a second; a wrong key would be a silent error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel

from ithaca.models.discover.logits_path import numbers_read
from ithaca.models.discover.structure_code import PLAIN, SourceCode, UnknownStructure, is_library, wrapped_functions
from ithaca.models.layers.hooks import hooked

_OF_ANY_MODULE = frozenset(nn.Module().__dict__)
# Special tokens, the layer's index, sharding plans and flags of loading: none changes what a layer's children compute.
_NOT_KEYED = frozenset((
    "padding_idx", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "layer_idx", "layer_id", "dtype",
    "generation_config", "_is_hf_initialized", "_tp_plan", "_pp_plan", "_ep_plan", "_fsdp_plan",
))  # fmt: skip
# Numbers of torch's modules that follow from a model's size; a dim or a stride does not, and is keyed as it is.
_TORCH_SIZES = frozenset(
    ("in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape", "eps", "p")
)
# The inner model, whose output the head takes, hangs on the model by this name.
_ALWAYS_READ = frozenset(("base_model_prefix",))
# The only private switch of a config that selects code outside attention.
_EXPERTS = "_experts_implementation_internal"
_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


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
                raise UnknownStructure("hooks on every module")
            paths = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
            if len(paths) != len(set(paths)):
                raise UnknownStructure("a module at two places")
            code = SourceCode(names=set(_ALWAYS_READ))
            for kind in {type(module) for module in model.modules()}:
                code.add_class(kind)
            within = {inner for layer in layers for inner in layer.modules()}
            weights = [id(p) for inner in within for p in inner._parameters.values() if p is not None]
            if len(weights) != len(set(weights)):
                raise UnknownStructure("a weight at two places")
            files = code.lines()
            each = tuple(_key([*files, *_lines(layer, None, frozenset(), frozenset())]) for layer in layers)
            stacked = frozenset(layers)
            around = [*_lines(model, code.names, within - stacked, stacked), *_config_lines(model, code.names)]
            return cls(_key([*files, *around]), each)
        except (UnknownStructure, OSError):
            return None


def _key(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _lines(
    root: nn.Module, names: set[str] | None, left_out: Collection[nn.Module], stacked: Collection[nn.Module]
) -> list[str]:
    """Return a line for every module below `root`; modules of `stacked` that have one form have one line.

    `names`: the attributes that count, None for all of them.
    """
    found: dict[str, None] = {}
    for path, module in root.named_modules():
        if module in left_out:
            continue
        kind = type(module)
        if hooked(module, ("ithaca.",)):
            raise UnknownStructure(f"a hook on {path}")
        children = ["*" if child in stacked else name for name, child in module._modules.items()]
        line = (
            path.rpartition(".")[0] + ".*" if module in stacked else path,
            f"{kind.__module__}.{kind.__qualname__}",
            *dict.fromkeys(children),
            *(_weight(name, weight) for name, weight in (module._parameters | module._buffers).items()),
            *_attributes(module, names),
        )
        found[" ".join(line)] = None
    return list(found)


def _weight(name: str, weight: Tensor | None) -> str:
    if weight is not None and type(weight) not in (nn.Parameter, Tensor):
        raise UnknownStructure(f"{name} is a {type(weight).__name__}")
    return f"{name}:{'' if weight is None else weight.ndim}"


def _attributes(module: nn.Module, names: set[str] | None) -> Iterator[str]:
    """Yield the module's attributes that the code may read: switches by value, functions by name."""
    of_torch = type(module).__module__.startswith("torch.")
    for key, value in sorted(vars(module).items()):
        home = type(value).__module__
        # Attributes of `parallelize` wrap the forward and come off with `unbind`.
        if key in _OF_ANY_MODULE or key in _NOT_KEYED or home.startswith("ithaca."):
            continue
        if callable(value) and not isinstance(value, nn.Module | type) and hasattr(type(module), key):
            raise UnknownStructure(f"{key} of an instance")
        if names is not None and key not in names and not of_torch:
            continue
        if isinstance(value, partial):
            fixed = [f"{name}={each!r}" for name, each in sorted(value.keywords.items())] + [*map(repr, value.args)]
            yield f"{key}={_function(key, value.func)}({', '.join(fixed)})"
        elif isinstance(value, FunctionType | BuiltinFunctionType):
            yield f"{key}={_function(key, value)}"
        elif callable(value) and home.partition(".")[0] not in ("torch", "transformers"):
            raise UnknownStructure(key)
        elif of_torch and key not in _TORCH_SIZES and isinstance(value, (*PLAIN, tuple)):
            yield f"{key}={value!r}"
        else:
            yield f"{key}={_shown(key, value)}"


def _function(key: str, value: Any) -> str:
    """Return the full name of a function of torch or transformers."""
    if isinstance(value, FunctionType) and not all(map(is_library, wrapped_functions(value))):
        raise UnknownStructure(key)
    if not isinstance(value, FunctionType | BuiltinFunctionType):
        raise UnknownStructure(key)
    return f"{value.__module__}.{value.__qualname__}"


def _config_lines(model: PreTrainedModel, names: set[str]) -> list[str]:
    """Return the config's switches that the code may read; lists are per layer, and each layer has its own key."""
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    found = {f"{name}={'1' if value == 1 else _shown(name, value)}" for name, value in numbers_read(model)}
    for config in [*configs.values(), model.config.get_text_config()]:
        if getattr(config, "is_heterogeneous", False):
            raise UnknownStructure("layers with configs of their own")
        found.add(f"config {type(config).__module__}.{type(config).__qualname__}")
        for key in sorted(names - _NOT_KEYED):
            value = _value(config, key) if not key.startswith("_") else None
            if isinstance(value, PLAIN):
                found.add(f"config.{key}={_shown(key, value)}")
        if "_experts_implementation" in names and (name := vars(config).get(_EXPERTS)) is not None:
            # Anybody may register experts of his own, under a name that was there before.
            function = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.get(name)
            found.add(f"config.{_EXPERTS}={name} {'' if function is None else _function(name, function)}")
    return sorted(found)


def _value(config: PretrainedConfig, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except ValueError as error:
        raise UnknownStructure(f"config.{key}") from error


def _shown(key: str, value: Any) -> str:
    """Return the part of a value that a key covers: strings and bools in full, the sign of a number, else the type."""
    if isinstance(value, bool | str) or value is None:
        # Only the attention function, which `parallelize` replaces, reads a window.
        return "" if "window" in key else repr(value)
    if isinstance(value, int | float):
        if "window" in key:
            return ""
        if isinstance(value, int) and value < 0:
            # A dim, and no size.
            return repr(value)
        unit = isinstance(value, float) and value == 1
        return "1.0" if unit else "0" if value == 0 else "+" if value > 0 else "-"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{name}: {_shown(key, each)}' for name, each in value.items()))}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{{{', '.join(sorted({_shown(key, each) for each in value}))}}}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
