"""Hooks of users and other libraries on a model's modules: finding them, copying their inputs, running without them.

A hook reads a module's input and may change its output. Work that is cut into tiles, compiled, moved to another module
or skipped would show the hook other tensors, so a module with hooks runs as the module it was.
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
# transformers leaves its recorders on a model after recording outputs; they change nothing. `called_alone` only raises.
_RECORDERS = ("transformers.utils.output_capturing", "ithaca.models.called_alone")
# FSDP2 gathers a layer's weights, and a training run records its progress: neither changes a layer's input or output.
AROUND_LAYERS = ("torch.distributed.fsdp", "ithaca.training")
# Hooks of these packages compute no losses.
_LIBRARIES = ("ithaca.", "torch.", "transformers.", "accelerate.", "peft.", "deepspeed.")
logger = logging.getLogger("ithaca")

HOOKED_INSIDE = (
    "%s is in a layer that is run again in backward, and has a forward hook: what the hook sees has no gradient, so that a "
    "loss made of it trains nothing there (pass a MemoryPlan with 'keep' for that layer, or memory=None)"
)


def hooked(module: nn.Module, ignored: tuple[str, ...] = ()) -> bool:
    """True if the module has hooks, other than recorders and hooks of the packages in `ignored`."""
    # A fast path: most modules have no hooks.
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return False
    return any(_is_foreign(hook, ignored) for kind in _KINDS for hook in module.__dict__[kind].values())


def forward_hooked(layer: nn.Module, path: str = "") -> str | None:
    """Return the path of the first module inside a layer that has a forward hook; None if there is none."""
    for name, child in layer._modules.items():
        if child is None:
            continue
        if child._forward_hooks and any(_is_foreign(hook) for hook in child._forward_hooks.values()):
            return path + name
        if (found := forward_hooked(child, f"{path}{name}.")) is not None:
            return found
    return None


def hooked_inside(module: nn.Module) -> bool:
    """True if the module, a module inside or one of their weights has hooks."""
    # Plain loops, as every unit of every pass calls this: modules() and any() take three times as long.
    if hooked(module):
        return True
    for weight in module._parameters.values():
        # A tensor hook must see the sum of the gradients of all tiles, once.
        if weight is not None and weight._backward_hooks:
            return True
    for child in module._modules.values():  # noqa: SIM110
        if child is not None and hooked_inside(child):
            return True
    return False


def _is_foreign(hook: Any, ignored: tuple[str, ...] = ()) -> bool:
    """True if the hook is no recorder and not from a package in `ignored`."""
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith((*_RECORDERS, *ignored))


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules have no hooks but recorders; hooks that are registered inside stay afterwards."""
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
    """Take all hooks but recorders off the modules; other modules that share a dict of hooks keep theirs."""
    for module in modules:
        for kind in _KINDS:
            hooks = module.__dict__[kind]
            module.__dict__[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_foreign(hook))


def _gradient_requested(copy: Any) -> bool:
    """True if a hook called `register_hook` or `retain_grad` on its copy of a tensor."""
    if not isinstance(copy, Tensor) or not copy.requires_grad:
        return False
    # The mark itself has registered one hook.
    return len(copy._backward_hooks or ()) > 1 or copy.retains_grad


@dataclass(frozen=True, slots=True)
class _CopyingHook:
    """A user's hook, called with marked copies of its arguments: backward can tell a loss made of copies from the model's
    own gradients."""

    func: Callable[..., Any]
    name: str
    is_pre_hook: bool
    active: Callable[[], bool]
    model: nn.Module

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        # In backward, or without a graph, no tensor that the hook sees can become part of a loss.
        if not is_grad_enabled() or current_backward() >= 0 or not self.active():
            replaying = is_grad_enabled() and current_backward() >= 0
            before = leaves_below(tree_leaves(given)) if replaying else []
            changed = self.func(module, *given)
            if replaying:
                self._refuse_trained((given, changed), before)
            return changed
        copied, marks = mark_copies(given, f"what a hook on {self.name} was shown")
        passed_on = copied if self.is_pre_hook and len(copied) > 1 else copied[-1]
        copies = tree_leaves(passed_on)
        changed = self.func(module, *copied)
        self._refuse_trained((passed_on, changed))
        if changed is None or changed is passed_on:
            left = tree_leaves(passed_on)
            same = len(left) == len(copies) and all(mine is theirs for mine, theirs in zip(copies, left, strict=True))
            if same and not any(map(_gradient_requested, copies)):
                return None
            # The hook changed a container in place, or requested the gradient that the model's own use has.
            changed = passed_on
        # The model itself continues with the copies, so gradients through them are the model's own.
        for mark in marks:
            mark.free = True
        return changed

    def _refuse_trained(self, changed: Any, before: Sequence[Tensor] = ()) -> None:
        """Raise UnsupportedError if a hook adds a trained tensor that is no parameter of the model.

        Only the model's parameters have their gradients summed over ranks.
        """
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
class CopyingHooks:
    """Users' hooks on one model's inner modules, each wrapped in a `_CopyingHook`; `remove` unwraps them."""

    model: nn.Module
    active: Callable[[], bool]
    warned: bool = False
    wrapped: list[tuple[dict[int, Callable[..., Any]], int]] = field(default_factory=list)

    def begin(self, rank: int) -> None:
        """Wrap the hooks that were registered since the last pass."""
        for module in self.model.modules():
            if not (module._forward_hooks or module._forward_pre_hooks) or module is self.model:
                continue
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    if not isinstance(hook, _CopyingHook) and _is_foreign(hook, _LIBRARIES):
                        name = next(name for name, each in self.model.named_modules() if each is module)
                        hooks[key] = _CopyingHook(
                            hook, name, hooks is module._forward_pre_hooks, self.active, self.model
                        )
                        self.wrapped.append((hooks, key))
                        self._warn(name, rank)

    def _warn(self, name: str, rank: int) -> None:
        if not self.warned and rank == 0:
            logger.warning(
                "%s has a hook, which is shown the tokens of its own rank alone: a loss made of them is exact as "
                "ithaca.reduce_mean(model, total, count, mesh), of their sum and their number",
                name,
            )
        self.warned = True

    def remove(self) -> None:
        """Unwrap the hooks that are still registered."""
        for hooks, key in self.wrapped:
            hook = hooks.get(key)
            if isinstance(hook, _CopyingHook):
                hooks[key] = hook.func
        self.wrapped.clear()
