"""A decoder layer that is run again in backward, from its input and its anchors.

Forward runs the layer without a graph and keeps what its mode says; backward brings that back, runs the layer once
more with gradients, its attention starting from the anchor, and lets go of it. Per layer one mode:

    keep       nothing is run again: the graph keeps what it needs
    save       the input and the attention's anchor are kept: attention forward runs once
    rebuild    the anchor alone is kept; the input is made again from the last layer before that kept one
    recompute  the input alone is kept: attention forward runs twice

This module knows nothing of attention or of transformers: a `Runner` is told how to run a layer. What backward needs
is on the autograd context, so any thread may run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ithaca.errors import UnsupportedError
from ithaca.memory.noted import Noted
from ithaca.memory.offload import HostStore, Ticket
from ithaca.memory.rng import Rng
from ithaca.memory.tiles import Unit

Mode = Literal["keep", "save", "rebuild", "recompute"]
WHOLE_BACKWARD = (
    "torch.autograd.grad and backward(inputs=...) cannot go through layers that are run again: call loss.backward(), or "
    "use parallelize(..., memory=None)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a layer gave: its output, what it says on the side (router logits), and its anchors."""

    output: Any
    aside: list[Tensor]
    anchors: list[Tensor]


class Runner(Protocol):
    """How one layer is run; given by the folder that knows the model."""

    def run(self, args: Any, kwargs: Any, anchors: list[Tensor] | None, *, value: bool) -> Outcome:
        """Run it from the anchors, or attend if there are none. `value`: somebody looks at the output."""

    def say_aside(self, tensors: list[Tensor]) -> None:
        """Hand on what the layer says on the side."""

    def out_of_memory(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """The same error, with what can be said about it."""


@dataclass(slots=True)
class Chain:
    """The layers of one forward pass that left something behind, linked from last to first."""

    last: Kept | None = None


@dataclass(eq=False)
class Layer:
    """One decoder layer of a model under one mode: called in place of the layer's own forward, whose look it is given."""

    module: nn.Module
    runner: Runner
    chain: Chain
    mode: Mode
    store: HostStore | None = None
    units: list[Unit] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.accounting():
            return self._run(args, kwargs)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Running out of memory in here is told with what held it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self.runner.out_of_memory(error) from error

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.mode == "keep" or not torch.is_grad_enabled():
            outcome = self.runner.run(args, kwargs, None, value=True)
            self.runner.say_aside(outcome.aside)
            return outcome.output
        flat, tree = tree_flatten((args, kwargs))
        call = _Call(self, flat, tree, _differentiable(flat))
        # Where no input wants a gradient (frozen embeddings) the graph must still reach this layer's weights.
        trains = any(p.requires_grad for p in self.module.parameters())
        tether = torch.empty(0, device=flat[call.places[0]].device, requires_grad=trains)
        outputs = list(_Replayed.apply(tether, call, *(flat[i] for i in call.places)))
        assert call.structure is not None
        count = call.structure.num_leaves
        self.runner.say_aside(outputs[count:])
        return tree_unflatten(outputs[:count], call.structure)


def _differentiable(flat: list[Any]) -> list[int]:
    """Where the hidden states stand (the first floating tensor), and whatever else wants a gradient."""
    floating = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.is_floating_point()]
    return [floating[0], *(i for i in floating[1:] if flat[i].requires_grad)]


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a layer: its arguments, flat, and the places of those that are differentiated."""

    layer: Layer
    flat: list[Any]
    tree: TreeSpec
    places: list[int]
    structure: TreeSpec | None = None

    def run(self, inputs: list[Tensor], anchors: list[Tensor] | None, *, value: bool) -> Outcome:
        flat = list(self.flat)
        for place, tensor in zip(self.places, inputs, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.tree)
        return self.layer.runner.run(args, kwargs, anchors, value=value)


@dataclass(eq=False, slots=True)
class Kept:
    """What a call left behind for its backward, here or on the host."""

    call: _Call
    inputs: list[Tensor]
    anchors: list[Tensor] | None
    rng: Rng | None
    before: Kept | None
    hidden: bool
    tiles: list[int]
    noted: Noted
    ticket: Ticket | None = None
    input_away: bool = False
    used: bool = False

    @classmethod
    def of(cls, call: _Call, inputs: list[Tensor], anchors: list[Tensor], rng: Rng | None) -> Kept:
        layer = call.layer
        kept = cls(
            call,
            inputs,
            None if layer.mode == "recompute" else anchors,
            rng,
            layer.chain.last,
            layer.mode != "rebuild",
            [unit.tile for unit in layer.units],
            Noted.of([layer.module]),
        )
        if layer.mode == "rebuild":
            kept.inputs = [torch.empty(0), *inputs[1:]]
        # The call's own references would keep alive what is to go to the host.
        for place in call.places:
            call.flat[place] = None
        layer.chain.last = kept
        if layer.store is not None:
            kept._send_away(layer.store)
        return kept

    def _send_away(self, store: HostStore) -> None:
        tensors = [*(self.inputs[:1] if self.hidden else []), *(self.anchors or [])]
        self.ticket, self.input_away = store.put(tensors), self.hidden
        if self.hidden:
            self.inputs[0] = torch.empty(0)
        self.anchors = None if self.anchors is None else []

    def bring_back(self) -> None:
        """After this the tensors are here, and those of the layer before have set out."""
        if self.ticket is not None:
            tensors, self.ticket = self.ticket.get(), None
            if self.input_away:
                self.inputs[0] = tensors.pop(0)
            if self.anchors is not None:
                self.anchors = tensors
        if not self.hidden:
            self._rebuild()
        if self.before is not None and self.before.ticket is not None:
            self.before.ticket.prefetch()

    def _rebuild(self) -> None:
        """Run the layers since the last kept input once more, from their anchors; each gets its input back."""
        between: list[Kept] = []
        at = self
        while not at.hidden:
            assert at.before is not None, "the first layer always keeps its input"
            at = at.before
            between.append(at)
        for kept, after in zip(reversed(between), [*reversed(between[:-1]), self], strict=True):
            kept.bring_back()
            module = kept.call.layer.module
            if isinstance(module, FSDPModule):
                module.unshard()
            with torch.no_grad(), kept.as_it_was():
                outcome = kept.call.run(kept.inputs, kept.anchors, value=True)
            if isinstance(module, FSDPModule):
                module.reshard()
            if kept.anchors is None:
                # It attended again just now; its own backward need not.
                kept.anchors = outcome.anchors
            after.inputs[0] = tree_flatten(outcome.output)[0][0]
            after.hidden = True

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, the layer draws the numbers it drew, in the tiles it had; refused if it is not what it was."""
        self.noted.refuse_changed()
        units = self.call.layer.units
        now = [unit.tile for unit in units]
        _set_tiles(units, self.tiles)
        try:
            with self._same_numbers():
                yield
        finally:
            _set_tiles(units, now)

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        switched = self.noted.switched
        if switched and self.rng is not None:
            self.noted.refuse_switched()
        # What drew nothing when it was evaluated may draw now.
        since = Rng(self.inputs[0].device) if switched else None
        with nullcontext() if self.rng is None else self.rng.again():
            yield
        if since is not None and since.moved():
            self.noted.refuse_switched()


def _set_tiles(units: list[Unit], tiles: list[int]) -> None:
    for unit, tile in zip(units, tiles, strict=True):
        unit.tile = tile


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tether: Tensor, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        rng = Rng(inputs[0].device)
        outcome = call.run(list(inputs), None, value=True)
        outputs, call.structure = tree_flatten(outcome.output)
        ctx.kept = Kept.of(call, list(inputs), outcome.anchors, rng if rng.moved() else None)
        return (*outputs, *outcome.aside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        kept: Kept = ctx.kept
        if not torch.autograd._is_checkpoint_valid():
            # Weights' gradients are added up as the layer is run again: that cannot be kept to some of them.
            raise UnsupportedError(WHOLE_BACKWARD)
        if kept.used:
            raise UnsupportedError(
                "backward ran a second time through a layer that had let go of what it kept: retain_graph=True needs "
                "parallelize(..., memory=None)"
            )
        kept.used = True
        with kept.call.layer.accounting():
            return (None, None, *_replay(kept, ctx.needs_input_grad[2:], douts))


def _replay(kept: Kept, wants: tuple[bool, ...], douts: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Run the layer once more, with gradients, and go back through it; gives the inputs' gradients."""
    kept.bring_back()
    with torch.enable_grad(), kept.as_it_was():
        inputs = [x.detach().requires_grad_(want) for x, want in zip(kept.inputs, wants, strict=True)]
        outcome = kept.call.run(inputs, kept.anchors, value=False)
    kept.inputs, kept.anchors = [], None
    outputs = [*tree_flatten(outcome.output)[0], *outcome.aside]
    pairs = [
        (get_gradient_edge(o), d) for o, d in zip(outputs, douts, strict=True) if d is not None and o.requires_grad
    ]
    # The edges are enough to start from: the values are not held through the layer's backward.
    del outcome, outputs
    torch.autograd.backward([edge for edge, _ in pairs], [d for _, d in pairs])
    return [x.grad for x in inputs]
