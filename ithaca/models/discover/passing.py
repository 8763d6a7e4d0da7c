r"""Tensors that decoder layers pass to each other, found by recording one run of a few tokens.

    layer 0 --hidden--> layer 1 --hidden--> norm --> layer 2        layer 2 is unlinked: its input is the norm's output
         \-- shared["kv"] = (k, v) ------------------^             a dict of tensors: replays follow it

Backward can run a layer again if the layer's arguments are still what they were, and if everything the layer hands on is
part of its output. Every call of every layer is checked for both:

    links     the layer's input must be the very output of the layer before, or the mode "rebuild" would start from another
              tensor. A second stack of layers, or a norm or a sum between two layers, breaks the link
    changes   tensors written in place, objects changed and tensors left on modules are refused: a replay would repeat
              the write, or the tensor's readers would get no gradient. Dicts and lists of tensors are allowed: replays
              follow them (`memory/layer_arguments.py`)
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
# Objects of these packages on modules are configs and the like: large, and without tensors.
_NOT_SEARCHED = ("transformers.", "torch.", "ithaca.")


@dataclass(frozen=True, slots=True)
class Passing:
    """Findings about one model's layers.

    `unlinked`: layers whose input is not the output of the layer before. `refused`: the reason why no layer can run
    again, None if layers can. `copied`: a layer that changes a dict or list of which FSDP2 would pass a copy, or None.
    """

    unlinked: frozenset[int] = frozenset()
    refused: str | None = None
    copied: str | None = None

    def refuse_copies(self) -> None:
        """Raise UnsupportedError if FSDP2's copies would hide one layer's changes from the others."""
        if self.copied is not None:
            raise UnsupportedError(
                f"{self.copied}, and FSDP2 gives every layer a copy of its own: use weights='none', or a "
                "collections.UserDict in the model's code"
            )

    def checked_plan(self, given: MemoryPlan | Decided, count: int) -> MemoryPlan | Decided:
        """Return the plan after checking it; modes left to the planner become "keep" if no layer can run again."""
        modes = given.layers if isinstance(given, MemoryPlan) else given.spread(count).modes(count)
        if modes is None:
            return given if self.refused is None else replace(given, layers="keep")  # type: ignore[arg-type]
        if self.refused is not None and set(modes) != {"keep"}:
            raise UnsupportedError(f"{self.refused}: {INSTEAD}")
        for index, mode in enumerate(modes):
            if mode == "rebuild" and index in self.unlinked:
                raise UnsupportedError(rebuild_refusal(index))
        return given

    def restrict(self, auto: AutoMemory, given: MemoryPlan | Decided) -> None:
        """Restrict the planner to these findings; `given` is the result of `checked_plan`."""
        if given is not auto.given and auto.mesh.rank == 0:
            logger.warning("memory: every layer is under 'keep', for %s: %s", self.refused, INSTEAD)
        auto.given = given
        auto.sizes = replace(auto.sizes, linked=auto.sizes.linked and not self.unlinked)


@dataclass(eq=False)
class PassingWatch:
    """Hooks that record one forward of a model.

    `last_index`: the layer that ran last. `unlinked`, `refused`, `copied`: as in `Passing`. `left_on_module`: a layer that
    leaves tensors on a module. `outside`: modules that belong to no layer.
    """

    model: PreTrainedModel
    layers: list[nn.Module]
    chain: ReplayChain = field(default_factory=ReplayChain)
    last_index: int = -1
    unlinked: set[int] = field(default_factory=set)
    refused: str | None = None
    copied: str | None = None
    left_on_module: str | None = None

    def __post_init__(self) -> None:
        within = {module for layer in self.layers for module in layer.modules()}
        self.outside = [(name, module) for name, module in self.model.named_modules() if module not in within]

    def hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the forward pre-hook and the forward hook of layer `index`."""
        calls: list[tuple[Arguments, list[Any], list[list[ObjectVersion]], dict[str, list[ObjectVersion]]]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments, containers = Arguments.of(args, kwargs)
            hidden = arguments.flat[arguments.differentiable[0]]
            if self.last_index != index - 1 or not self.chain.is_last_output(hidden):
                self.unlinked.add(index)
            calls.append((arguments, containers, arguments.object_versions(arguments.flat), self._attributes(index)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            arguments, containers, versions, attributes = calls.pop()
            outputs = tree_flatten(output)[0]
            self.last_index, self.chain.last_output = index, (outputs[0], version(outputs[0]))
            changed = arguments.changed_in_place(arguments.flat, versions)
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
                self.left_on_module = self.left_on_module or f"layer {index} leaves tensors on a module ({name})"

        return enter, leave

    def _attributes(self, index: int) -> dict[str, list[ObjectVersion]]:
        """Return the tensors and their versions on the layer's modules and on modules outside the layers, without parameters."""
        within = [(f"layer {index}: {name}", module) for name, module in self.layers[index].named_modules()]
        found: dict[str, list[ObjectVersion]] = {}
        for path, module in (*within, *self.outside):
            own = {key: value for key, value in vars(module).items() if key not in _OF_ANY_MODULE}
            for key, value in (own | module._buffers).items():
                if isinstance(value, Tensor):
                    found[f"{path}.{key}"] = [(value, version(value))]
                elif not isinstance(value, nn.Module) and not type(value).__module__.startswith(_NOT_SEARCHED):
                    found[f"{path}.{key}"] = [each for each in reachable(value) if isinstance(each[0], Tensor)]
        return found


@contextmanager
def watching(model: PreTrainedModel, layers: list[nn.Module]) -> Iterator[PassingWatch]:
    """Inside, a forward of the model is recorded."""
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


def passing_from(watch: PassingWatch) -> Passing:
    """Return the findings of a recorded forward."""
    refused = watch.refused
    # A tensor left on a module may be a table that is made once: a second run decides.
    if refused is None and watch.left_on_module is not None:
        with torch.no_grad(), watching(watch.model, watch.layers) as again:
            watch.model(input_ids=few_tokens(watch.model), use_cache=False)
        refused = again.left_on_module
    return Passing(frozenset(watch.unlinked - {0}), refused, watch.copied)


def find_passing(binding: Binding, layers: list[nn.Module]) -> Passing:
    """Run the model on a few tokens; return the tensors that its layers pass to each other."""
    model = binding.model
    if not layers:
        return Passing()
    with unsharded(model), torch.no_grad(), watching(model, layers) as watch:
        model(input_ids=few_tokens(model), use_cache=False)
    return passing_from(watch)


def has_side_outputs(layer: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a layer returns more than hidden states, or leaves tensors in a shared dict or list."""
    arguments = Arguments.of(args, kwargs)[0]
    run = arguments.run_with([], [])
    with torch.no_grad():
        outputs = tree_flatten(layer(*run.args, **run.kwargs))[0]
    if sum(isinstance(x, Tensor) for x in outputs) > 1:
        return True
    try:
        return bool(arguments.changes(run.flat, run.containers, outputs)[0])
    except UnsupportedError:
        # A layer with such changes is never run again, so its outputs need no more detail.
        return True
