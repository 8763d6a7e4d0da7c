"""Hooks on a model's modules: whether a module has any, and a run without them.

A hook sees what its module is called with and may change what it gives. Work that is cut into tiles, compiled, done by
another module or left out would show it something else, so what has hooks is run as it stands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# transformers leaves these on a model once it has recorded outputs; they look on, and only while it records. Ours look
# at how a part of the model is called.
_RECORDERS = ("transformers.utils.output_capturing", "ithaca.models.alone")
# Around a layer FSDP2 gathers its weights, and a run notes where it is: neither changes what goes in or out.
AROUND_LAYERS = ("torch.distributed.fsdp", "ithaca.training")


HOOKED_INSIDE = (
    "%s is in a layer that is run again in backward, and has a forward hook: what the hook sees has no gradient, so that a "
    "loss made of it trains nothing there (pass a MemoryPlan with 'keep' for that layer, or memory=None)"
)


def hooked(module: nn.Module, besides: tuple[str, ...] = ()) -> bool:
    """Whether a call of the module's forward alone would pass somebody's hook by. `besides`: whose hooks may be."""
    # Asked nearly always for nothing.
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return False
    return any(_asks(hook, besides) for kind in _KINDS for hook in module.__dict__[kind].values())


def forward_hooked(layer: nn.Module, path: str = "") -> str | None:
    """The first module inside a layer that has somebody's forward hook, by its name there."""
    for name, child in layer._modules.items():
        if child is None:
            continue
        if child._forward_hooks and any(_asks(hook) for hook in child._forward_hooks.values()):
            return path + name
        if (found := forward_hooked(child, f"{path}{name}.")) is not None:
            return found
    return None


def hooked_inside(module: nn.Module) -> bool:
    """Whether it, a module in it or one of their weights has hooks: that of a weight is to see the sum, and once."""
    # Asked of every unit in every pass: plain loops, for modules() and any() take three times as long.
    if hooked(module):
        return True
    for weight in module._parameters.values():
        if weight is not None and weight._backward_hooks:
            return True
    for child in module._modules.values():  # noqa: SIM110
        if child is not None and hooked_inside(child):
            return True
    return False


def _asks(hook: Any, besides: tuple[str, ...] = ()) -> bool:
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith((*_RECORDERS, *besides))


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules have no hooks but transformers' recorders, and those put on them there, which stay."""
    kept = [(module, {kind: module.__dict__[kind] for kind in _KINDS}) for module in modules]
    drop_hooks(module for module, _ in kept)
    try:
        yield
    finally:
        for module, hooks in kept:
            for kind in _KINDS:
                hooks[kind].update(module.__dict__[kind])
            module.__dict__.update(hooks)


def drop_hooks(modules: Iterable[nn.Module]) -> None:
    """Leave the modules without hooks, transformers' recorders aside; who else has the same hooks keeps them."""
    for module in modules:
        for kind in _KINDS:
            hooks = module.__dict__[kind]
            module.__dict__[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if not _asks(hook))
