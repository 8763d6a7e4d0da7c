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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ithaca.errors import UnsupportedError
from ithaca.memory.layer_arguments import INSTEAD, Arguments, Change, apply_changes, version
from ithaca.memory.offload import HostStore, Ticket
from ithaca.memory.random_state import Rng
from ithaca.memory.replay_guard import Noted
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

    def accounting(self) -> AbstractContextManager[None]:
        """Running out of memory inside is told with what held it."""


@dataclass(slots=True)
class Chain:
    """The layers of one forward pass that left something behind, linked from last to first.

    `gave` is the output of the last of them and how often it was written to; a layer whose input is another tensor has
    an input that cannot be rebuilt. `strict`: a layer that was given "rebuild" by hand is then refused, else its input
    is saved.
    """

    last: Kept | None = None
    gave: tuple[Tensor, int] | None = None
    strict: bool = True

    def begin(self) -> None:
        """Start a forward pass, or let go of one."""
        self.last = self.gave = None

    def gives(self, x: Any) -> bool:
        """Return whether `x` is what the last layer gave. FSDP2 passes on another view of the same memory."""
        if self.gave is None:
            return False
        output, written = self.gave
        if not version(x) == version(output) == written:
            return False
        return x is output or _place(x) == _place(output)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are, and how they are read; of two tensors alive at once that says if they are one."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


@dataclass(eq=False)
class Layer:
    """One decoder layer of a model under one mode: called in place of the layer's own forward, whose look it is given."""

    module: nn.Module
    runner: Runner
    chain: Chain
    mode: Mode
    index: int = 0
    store: HostStore | None = None
    units: list[Unit] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.runner.accounting():
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.mode == "keep" or not torch.is_grad_enabled():
            outcome = self.runner.run(args, kwargs, None, value=True)
            self.runner.say_aside(outcome.aside)
            return outcome.output
        arguments, originals = Arguments.of(args, kwargs)
        arguments.refuse_hidden_graphs()
        flat, places = list(arguments.flat), arguments.differentiable
        hidden = flat[places[0]]
        call = _Call(self, arguments, places, self._saves_input(hidden))
        # Where no input wants a gradient (frozen embeddings) the graph must still reach this layer's weights.
        trains = any(p.requires_grad for p in self.module.parameters())
        tether = torch.empty(0, device=hidden.device, requires_grad=trains)
        outputs = list(_Replayed.apply(tether, call, *(flat[i] for i in places)))
        assert call.structure is not None
        count = call.structure.num_leaves
        apply_changes(call.changes, originals, flat, outputs)
        self.chain.gave = outputs[0], version(outputs[0])
        self.runner.say_aside(outputs[count + call.written :])
        return tree_unflatten(outputs[:count], call.structure)

    def _saves_input(self, hidden: Tensor) -> bool:
        """Whether the input is saved: always but under "rebuild", and there too where no layer's output is this input."""
        if self.mode != "rebuild":
            return True
        if self.chain.gives(hidden):
            return False
        if self.chain.strict:
            raise UnsupportedError(unlinked(self.index))
        return True


def unlinked(index: int) -> str:
    """The sentence that refuses to rebuild this layer's input."""
    return (
        f"layer {index} cannot be under 'rebuild': its input is not the output of the layer before it, from which it would "
        "be made again; use 'save' or 'recompute' for that layer"
    )


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a layer: its arguments, and the places of those that are differentiated.

    `changes`: what the layer put into containers that it was given; `written` tensors of it follow the layer's outputs.
    """

    layer: Layer
    arguments: Arguments
    places: list[int]
    saves_input: bool
    structure: TreeSpec | None = None
    changes: list[Change] = field(default_factory=list)
    written: int = 0

    def first(self, inputs: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Run it in forward: its outputs, and its anchors."""
        run = self.arguments.run_with(self.places, inputs)
        before = self.arguments.seen(run.flat)
        outcome = self.layer.runner.run(run.args, run.kwargs, None, value=True)
        changed = self.arguments.changed_in_place(run.flat, before)
        if changed is not None:
            raise UnsupportedError(f"layer {self.layer.index} {changed}: {INSTEAD}")
        outputs, self.structure = tree_flatten(outcome.output)
        self.changes, written = self.arguments.changes(run.flat, run.containers, outputs)
        self.written = len(written)
        return [*outputs, *written, *outcome.aside], outcome.anchors

    def again(
        self, inputs: list[Tensor], anchors: list[Tensor] | None, *, value: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """Run it once more, from its anchors or attending again: its outputs, and its anchors."""
        run = self.arguments.run_with(self.places, inputs)
        outcome = self.layer.runner.run(run.args, run.kwargs, anchors, value=value)
        outputs = tree_flatten(outcome.output)[0]
        written = self.arguments.changes(run.flat, run.containers, outputs)[1]
        if len(written) != self.written:
            raise UnsupportedError(
                f"layer {self.layer.index} put {self.written} tensors into what it shares with other layers, and "
                f"{len(written)} when it was run again: {INSTEAD}"
            )
        return [*outputs, *written, *outcome.aside], outcome.anchors


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
            call.saves_input,
            [unit.tile for unit in layer.units],
            Noted.of([layer.module]),
        )
        if not call.saves_input:
            kept.inputs = [torch.empty(0), *inputs[1:]]
        # The call's own references would keep alive what is to go to the host.
        for place in call.places:
            call.arguments.flat[place] = None
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
                outputs, anchors = kept.call.again(kept.inputs, kept.anchors, value=True)
            if isinstance(module, FSDPModule):
                module.reshard()
            if kept.anchors is None:
                # It attended again just now; its own backward need not.
                kept.anchors = anchors
            after.inputs[0] = outputs[0]
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
        # Of keys and values that no later layer reads no gradient is made up.
        ctx.set_materialize_grads(False)
        rng = Rng(inputs[0].device)
        outputs, anchors = call.first(list(inputs))
        ctx.kept = Kept.of(call, list(inputs), anchors, rng if rng.moved() else None)
        return tuple(outputs)

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
        with kept.call.layer.runner.accounting():
            return (None, None, *_replay(kept, ctx.needs_input_grad[2:], douts))


def _replay(kept: Kept, wants: tuple[bool, ...], douts: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Run the layer once more, with gradients, and go back through it; gives the inputs' gradients."""
    kept.bring_back()
    with torch.enable_grad(), kept.as_it_was():
        inputs = [x.detach().requires_grad_(want) for x, want in zip(kept.inputs, wants, strict=True)]
        outputs = kept.call.again(inputs, kept.anchors, value=False)[0]
    kept.inputs, kept.anchors = [], None
    pairs = [
        (get_gradient_edge(o), d) for o, d in zip(outputs, douts, strict=True) if d is not None and o.requires_grad
    ]
    # The edges are enough to start from: the values are not held through the layer's backward.
    del outputs
    torch.autograd.backward([edge for edge, _ in pairs], [d for _, d in pairs])
    return [x.grad for x in inputs]
