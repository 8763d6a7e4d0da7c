"""What decoder layers pass to each other, found by watching one run of a few tokens rather than by class names.

A layer can be run again in backward from what it was given, if what it was given is still what it was, and what it
handed on came back from it. So for every call of every layer the watch notes

    links     whether its input is the very output of the layer before it: else "rebuild" would make another input. A
              stack of layers that begins anew, a norm or a sum between two layers breaks the link
    changes   tensors written to, objects changed, tensors left on modules: state that a replay would write twice, or
              whose readers would get no gradient. Dicts and lists of tensors are no such thing: replays follow them
              (`memory/layer_arguments.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.memory.layer_arguments import INSTEAD, Arguments, ObjectVersion, reachable, same_versions, version
from ithaca.memory.replay import ReplayChain, rebuild_refusal
from ithaca.models.bound import Binding, logger, unsharded
from ithaca.models.discover.roles import few_tokens
from ithaca.models.planner.plan_in_force import AutoMemory
from ithaca.planning.memory_plan import Decided, MemoryPlan

_OF_ANY_MODULE = frozenset(nn.Module().__dict__)
# Their objects on modules are configs and the like: large, and without tensors.
_NOT_ENTERED = ("transformers.", "torch.", "ithaca.")


@dataclass(frozen=True, slots=True)
class Passing:
    """What was found of one model. `unlinked`: layers whose input is not the output of the layer before. `refused`: why
    no layer can be run again, None if layers can. `copied`: a layer that puts something into a dict or list that FSDP2
    would hand it a copy of, None if there is none."""

    unlinked: frozenset[int] = frozenset()
    refused: str | None = None
    copied: str | None = None

    def refuse_copies(self) -> None:
        """Refuse a model whose layers would not see, under FSDP2, what other layers leave for them."""
        if self.copied is not None:
            raise UnsupportedError(
                f"{self.copied}, and FSDP2 gives every layer a copy of its own: use weights='none', or a "
                "collections.UserDict in the model's code"
            )

    def settled(self, given: MemoryPlan | Decided, count: int) -> MemoryPlan | Decided:
        """What is given, checked; where modes are left to a plan and no layer can be run again, all of them are "keep"."""
        modes = given.layers if isinstance(given, MemoryPlan) else given.spread(count).modes(count)
        if modes is None:
            return given if self.refused is None else replace(given, layers="keep")  # type: ignore[arg-type]
        if self.refused is not None and set(modes) != {"keep"}:
            raise UnsupportedError(f"{self.refused}: {INSTEAD}")
        for index, mode in enumerate(modes):
            if mode == "rebuild" and index in self.unlinked:
                raise UnsupportedError(rebuild_refusal(index))
        return given

    def inform(self, auto: AutoMemory, given: MemoryPlan | Decided) -> None:
        """Let plans be made for what was found; `given` is what `settled` gave."""
        if given is not auto.given and auto.mesh.rank == 0:
            logger.warning("memory: every layer is under 'keep', for %s: %s", self.refused, INSTEAD)
        auto.given = given
        auto.sizes = replace(auto.sizes, linked=auto.sizes.linked and not self.unlinked)


@dataclass(eq=False)
class PassingWatch:
    """A pass of a model under watch, layer by layer."""

    model: PreTrainedModel
    layers: list[nn.Module]
    chain: ReplayChain = field(default_factory=ReplayChain)
    before: int = -1
    unlinked: set[int] = field(default_factory=set)
    refused: str | None = None
    copied: str | None = None
    left: str | None = None

    def __post_init__(self) -> None:
        within = {module for layer in self.layers for module in layer.modules()}
        self.outside = [(name, module) for name, module in self.model.named_modules() if module not in within]

    def hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is done ahead of a call of layer `index`, and after it."""
        calls: list[tuple[Arguments, list[Any], list[list[ObjectVersion]], dict[str, list[ObjectVersion]]]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments, containers = Arguments.of(args, kwargs)
            hidden = arguments.flat[arguments.differentiable[0]]
            if self.before != index - 1 or not self.chain.is_last_output(hidden):
                self.unlinked.add(index)
            calls.append((arguments, containers, arguments.object_versions(arguments.flat), self._attributes(index)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            arguments, containers, seen, attributes = calls.pop()
            outputs = tree_flatten(output)[0]
            self.before, self.chain.last_output = index, (outputs[0], version(outputs[0]))
            changed = arguments.changed_in_place(arguments.flat, seen)
            if changed is not None:
                self.refused = self.refused or f"layer {index} {changed}"
            try:
                changes, _ = arguments.changes(arguments.flat, containers, outputs)
                kinds = [type(containers[change.number]) for change in changes]
                kind = next((kind for kind in kinds if kind in SUPPORTED_NODES), None)
                if kind is not None:
                    self.copied = self.copied or f"layer {index} changes a {kind.__name__} that it is given"
            except UnsupportedError as error:
                self.refused = self.refused or f"layer {index}: {str(error).removesuffix(f': {INSTEAD}')}"
            now = self._attributes(index)
            name = next((name for name in now if not same_versions(now[name], attributes.get(name, []))), None)
            if name is not None:
                self.left = self.left or f"layer {index} leaves tensors on a module ({name})"

        return enter, leave

    def _attributes(self, index: int) -> dict[str, list[ObjectVersion]]:
        """Tensors on the layer's modules, and on those outside the layers, beside their parameters."""
        within = [(f"layer {index}: {name}", module) for name, module in self.layers[index].named_modules()]
        found: dict[str, list[ObjectVersion]] = {}
        for path, module in (*within, *self.outside):
            own = {key: value for key, value in vars(module).items() if key not in _OF_ANY_MODULE}
            for key, value in (own | module._buffers).items():
                if isinstance(value, Tensor):
                    found[f"{path}.{key}"] = [(value, version(value))]
                elif not isinstance(value, nn.Module) and not type(value).__module__.startswith(_NOT_ENTERED):
                    found[f"{path}.{key}"] = [each for each in reachable(value) if isinstance(each[0], Tensor)]
        return found


@contextmanager
def watching(model: PreTrainedModel, layers: list[nn.Module]) -> Iterator[PassingWatch]:
    """Inside, a pass of the model is watched."""
    watch = PassingWatch(model, layers)
    handles = []
    for index, layer in enumerate(layers):
        enter, leave = watch.hooks(index)
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave, with_kwargs=True))
    try:
        yield watch
    finally:
        watch.chain.begin()
        for handle in handles:
            handle.remove()


def found_by(watch: PassingWatch) -> Passing:
    """What a watched pass showed. Tensors left on a module may be a table made once: a second pass decides."""
    refused = watch.refused
    if refused is None and watch.left is not None:
        with torch.no_grad(), watching(watch.model, watch.layers) as again:
            watch.model(input_ids=few_tokens(watch.model), use_cache=False)
        refused = again.left
    return Passing(frozenset(watch.unlinked - {0}), refused, watch.copied)


def passing_of(binding: Binding, layers: list[nn.Module]) -> Passing:
    """What the layers of a model pass to each other, in a run of its own."""
    model = binding.model
    if not layers:
        return Passing()
    with unsharded(model), torch.no_grad(), watching(model, layers) as watch:
        model(input_ids=few_tokens(model), use_cache=False)
    return found_by(watch)


def hands_on(layer: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a layer gives more than hidden states, in its output or in what it shares: any of it may hold the value."""
    arguments = Arguments.of(args, kwargs)[0]
    run = arguments.run_with([], [])
    with torch.no_grad():
        outputs = tree_flatten(layer(*run.args, **run.kwargs))[0]
    if sum(isinstance(x, Tensor) for x in outputs) > 1:
        return True
    try:
        return bool(arguments.changes(run.flat, run.containers, outputs)[0])
    except UnsupportedError:
        # Such a layer is not run again.
        return True
