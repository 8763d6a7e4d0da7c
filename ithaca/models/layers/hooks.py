"""Hooks on a model's modules: whether a module has any, and a run without them.

A hook sees what its module is called with and may change what it gives. Work that is cut into tiles, compiled, done by
another module or left out would show it something else, so what has hooks is run as it stands.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils._pytree import tree_leaves

from ithaca.errors import UnsupportedError
from ithaca.models.reduction_marks import current_backward, leaves_below, mark_copies

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# transformers leaves these on a model once it has recorded outputs; they look on, and only while it records. Ours look
# at how a part of the model is called.
_RECORDERS = ("transformers.utils.output_capturing", "ithaca.models.called_alone")
# Around a layer FSDP2 gathers its weights, and a run notes where it is: neither changes what goes in or out.
AROUND_LAYERS = ("torch.distributed.fsdp", "ithaca.training")
# Hooks of libraries, which make no losses of what they see.
_LIBRARIES = ("ithaca.", "torch.", "transformers.", "accelerate.", "peft.", "deepspeed.")
logger = logging.getLogger("ithaca")

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


def _is_followed(copy: Any) -> bool:
    """True if a hook asked for the gradient of what it was shown: by `register_hook` or `retain_grad`."""
    if not isinstance(copy, Tensor) or not copy.requires_grad:
        return False
    # One hook is the mark's own.
    return len(copy._backward_hooks or ()) > 1 or copy.retains_grad


@dataclass(frozen=True, slots=True)
class _Shown:
    """In place of somebody's hook: it is shown copies, so that a loss made of them can be told from the model's own use."""

    func: Callable[..., Any]
    name: str
    before: bool
    active: Callable[[], bool]
    model: nn.Module

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        # In backward, and where a layer keeps no graph, nothing that is shown can come into a loss.
        if not is_grad_enabled() or current_backward() >= 0 or not self.active():
            again = is_grad_enabled() and current_backward() >= 0
            before = leaves_below(tree_leaves(given)) if again else []
            changed = self.func(module, *given)
            if again:
                self._refuse_trained((given, changed), before)
            return changed
        shown, marks = mark_copies(given, f"what a hook on {self.name} was shown")
        goes_on = shown if self.before and len(shown) > 1 else shown[-1]
        copies = tree_leaves(goes_on)
        changed = self.func(module, *shown)
        self._refuse_trained((goes_on, changed))
        if changed is None or changed is goes_on:
            left = tree_leaves(goes_on)
            same = len(left) == len(copies) and all(mine is theirs for mine, theirs in zip(copies, left, strict=True))
            if same and not any(map(_is_followed, copies)):
                return None
            # A container was changed in place, or the hook asked for the gradient that the model's own use has.
            changed = goes_on
        for mark in marks:
            # The model goes on with what the hook made of them.
            mark.free = True
        return changed

    def _refuse_trained(self, changed: Any, before: Sequence[Tensor] = ()) -> None:
        """What a hook brings in may be trained as a weight of the model only: of all else no rank has the gradient."""
        found = leaves_below(tree_leaves(changed))
        if not found:
            return
        known = {*map(id, before), *map(id, self.model.parameters())}
        if any(id(leaf) not in known for leaf in found):
            raise UnsupportedError(
                f"a hook on {self.name} brings in a tensor that is trained and no parameter of the model, of whose gradient "
                "each rank would have its own tokens' part: give it to that module before ithaca.parallelize, as "
                "module.register_parameter(name, parameter), and read it from there in the hook"
            )


@dataclass(eq=False)
class ShownToHooks:
    """The hooks of others on one model's inner modules, each behind a `_Shown`; `remove` gives them back."""

    model: nn.Module
    active: Callable[[], bool]
    said: bool = False
    kept: list[tuple[dict[int, Callable[..., Any]], int]] = field(default_factory=list)

    def begin(self, rank: int) -> None:
        """Before a pass: hooks may have come since the last one."""
        for module in self.model.modules():
            if not (module._forward_hooks or module._forward_pre_hooks) or module is self.model:
                continue
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    if not isinstance(hook, _Shown) and _asks(hook, _LIBRARIES):
                        name = next(name for name, each in self.model.named_modules() if each is module)
                        hooks[key] = _Shown(hook, name, hooks is module._forward_pre_hooks, self.active, self.model)
                        self.kept.append((hooks, key))
                        self._say(name, rank)

    def _say(self, name: str, rank: int) -> None:
        if not self.said and rank == 0:
            logger.warning(
                "%s has a hook, which is shown the tokens of its own rank alone: a loss made of them is exact as "
                "ithaca.reduce_mean(model, total, count, mesh), of their sum and their number",
                name,
            )
        self.said = True

    def remove(self) -> None:
        """Put the hooks back that are still there."""
        for hooks, key in self.kept:
            hook = hooks.get(key)
            if isinstance(hook, _Shown):
                hooks[key] = hook.func
        self.kept.clear()
