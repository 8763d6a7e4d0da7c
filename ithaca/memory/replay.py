"""Activation checkpointing of a decoder layer that keeps its attention output (its anchor).

Forward runs the layer without a graph and saves what the layer's mode names. Backward restores the saved tensors,
runs the layer once more with gradients, its attention starting from the anchor, and frees them. Each layer has a mode:

    mode       saved in forward      run again in backward             the field's name
    keep       autograd's graph      nothing                           no checkpointing
    save       input, anchor         all but attention                 checkpointing that saves attention
    rebuild    anchor                the same, and the layers that     the same without a saved input
                                     make the input
    recompute  input                 the layer, attention too          full activation checkpointing

An example of three layers, backward through layer 2:

    layer 0 save       layer 1 rebuild     layer 2 rebuild
    input, anchor ---> anchor -----------> anchor
       1. run layer 0 from its input: the input of layer 1
       2. run layer 1 from that input: the input of layer 2
       3. run layer 2 with gradients and go back through it; layer 1 already has its input then

This module imports nothing of attention or of transformers: a `LayerFunction` runs the layer. All that backward needs
is on the autograd context, since CUDA runs backward on another thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ithaca.errors import UnsupportedError
from ithaca.memory.layer_arguments import INSTEAD, Arguments, ContainerChange, apply_changes, version
from ithaca.memory.layer_function import LayerFunction
from ithaca.memory.offload import HostStore, Ticket
from ithaca.memory.random_state import Rng
from ithaca.memory.replay_guard import ModuleSnapshot
from ithaca.memory.tiles import Unit

Mode = Literal["keep", "save", "rebuild", "recompute"]
WHOLE_BACKWARD = (
    "torch.autograd.grad and backward(inputs=...) cannot go through layers that are run again: call loss.backward(), or "
    "use parallelize(..., memory=None)"
)


@dataclass(slots=True)
class ReplayChain:
    """Linked list of one forward pass's saved layers, from the last to the first.

    `last_output` is the output of the last layer and its version; a layer whose input is another tensor cannot rebuild
    its input. `strict`: such a layer is refused under a given "rebuild"; otherwise its input is saved.
    """

    last: SavedCall | None = None
    last_output: tuple[Tensor, int] | None = None
    strict: bool = True

    def begin(self) -> None:
        """Start a forward pass, or forget one."""
        self.last = self.last_output = None

    def is_last_output(self, x: Any) -> bool:
        """True if `x` is the output of the last layer, unchanged."""
        if self.last_output is None:
            return False
        output, written = self.last_output
        if not version(x) == version(output) == written:
            return False
        # FSDP2 passes on another view of the same memory.
        views = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (x, output)]
        return x is output or views[0] == views[1]


@dataclass(eq=False)
class Layer:
    """One decoder layer under one mode: called in place of the layer's own forward."""

    module: nn.Module
    runner: LayerFunction
    chain: ReplayChain
    mode: Mode
    index: int = 0
    store: HostStore | None = None
    units: list[Unit] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.runner.accounting():
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.mode == "keep" or not torch.is_grad_enabled():
            result = self.runner.run(args, kwargs, None, value=True)
            self.runner.emit_side_outputs(result.side_outputs)
            return result.output
        arguments, originals = Arguments.of(args, kwargs)
        arguments.refuse_hidden_graphs()
        flat, differentiated = list(arguments.flat), arguments.differentiable
        hidden = flat[differentiated[0]]
        call = _LayerCall(self, arguments, differentiated, self._saves_input(hidden))
        # With frozen embeddings no input has a gradient, and the graph must still reach this layer's weights.
        trains = any(p.requires_grad for p in self.module.parameters())
        tether = torch.empty(0, device=hidden.device, requires_grad=trains)
        outputs = list(_Replayed.apply(tether, call, *(flat[i] for i in differentiated)))
        assert call.structure is not None
        count = call.structure.num_leaves
        apply_changes(call.changes, originals, flat, outputs)
        self.chain.last_output = outputs[0], version(outputs[0])
        self.runner.emit_side_outputs(outputs[count + call.written :])
        return tree_unflatten(outputs[:count], call.structure)

    def _saves_input(self, hidden: Tensor) -> bool:
        """True unless the mode is "rebuild" and the input is the output of the layer before."""
        if self.mode != "rebuild":
            return True
        if self.chain.is_last_output(hidden):
            return False
        if self.chain.strict:
            raise UnsupportedError(rebuild_refusal(self.index))
        return True


def rebuild_refusal(index: int) -> str:
    """Return the sentence that refuses to rebuild this layer's input."""
    return (
        f"layer {index} cannot be under 'rebuild': its input is not the output of the layer before it, from which it would "
        "be made again; use 'save' or 'recompute' for that layer"
    )


@dataclass(eq=False, slots=True)
class _LayerCall:
    """One call of a layer: its arguments, and the positions of the differentiated ones.

    `changes`: what the layer put into containers among its arguments; `written` tensors of them follow the outputs.
    """

    layer: Layer
    arguments: Arguments
    differentiated: list[int]
    saves_input: bool
    structure: TreeSpec | None = None
    changes: list[ContainerChange] = field(default_factory=list)
    written: int = 0

    def run_forward(self, inputs: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Run the layer in forward; return its outputs and its anchors."""
        run = self.arguments.run_with(self.differentiated, inputs)
        before = self.arguments.object_versions(run.flat)
        result = self.layer.runner.run(run.args, run.kwargs, None, value=True)
        changed = self.arguments.changed_in_place(run.flat, before)
        if changed is not None:
            raise UnsupportedError(f"layer {self.layer.index} {changed}: {INSTEAD}")
        outputs, self.structure = tree_flatten(result.output)
        self.changes, written = self.arguments.changes(run.flat, run.containers, outputs)
        self.written = len(written)
        return [*outputs, *written, *result.side_outputs], result.anchors

    def run_again(
        self, inputs: list[Tensor], anchors: list[Tensor] | None, *, value: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """Run the layer once more, from its anchors if there are any; return its outputs and its anchors."""
        run = self.arguments.run_with(self.differentiated, inputs)
        result = self.layer.runner.run(run.args, run.kwargs, anchors, value=value)
        outputs = tree_flatten(result.output)[0]
        written = self.arguments.changes(run.flat, run.containers, outputs)[1]
        if len(written) != self.written:
            raise UnsupportedError(
                f"layer {self.layer.index} put {self.written} tensors into what it shares with other layers, and "
                f"{len(written)} when it was run again: {INSTEAD}"
            )
        return [*outputs, *written, *result.side_outputs], result.anchors


# The layer's hidden states between forward and backward: on the device, in host memory, or not saved.
InputState = Literal["here", "on host", "to rebuild"]


@dataclass(eq=False, slots=True)
class SavedCall:
    """Saved tensors of one call, for its backward. `hidden` is None unless `state` is "here"."""

    call: _LayerCall
    state: InputState
    hidden: Tensor | None
    others: list[Tensor]
    anchors: list[Tensor] | None
    rng: Rng | None
    before: SavedCall | None
    tiles: list[int]
    snapshot: ModuleSnapshot
    ticket: Ticket | None = None
    used: bool = False

    @classmethod
    def of(cls, call: _LayerCall, inputs: list[Tensor], anchors: list[Tensor], rng: Rng | None) -> SavedCall:
        """Save a call's tensors, start their copy to the host where the plan says so, and link the call to the chain."""
        layer = call.layer
        saved = cls(
            call,
            "here" if call.saves_input else "to rebuild",
            inputs[0] if call.saves_input else None,
            inputs[1:],
            None if layer.mode == "recompute" else anchors,
            rng,
            layer.chain.last,
            [unit.tile for unit in layer.units],
            ModuleSnapshot.of([layer.module]),
        )
        # The call's own references would keep the device memory of offloaded tensors.
        for position in call.differentiated:
            call.arguments.flat[position] = None
        layer.chain.last = saved
        if layer.store is not None:
            saved._offload(layer.store)
        return saved

    @property
    def inputs(self) -> list[Tensor]:
        assert self.hidden is not None, self.state
        return [self.hidden, *self.others]

    def _offload(self, store: HostStore) -> None:
        self.ticket = store.put([*([] if self.hidden is None else [self.hidden]), *(self.anchors or [])])
        if self.hidden is not None:
            self.state, self.hidden = "on host", None
        self.anchors = None if self.anchors is None else []

    def restore(self) -> None:
        """Bring all tensors to the device, and start prefetching those of the layer before."""
        if self.ticket is not None:
            tensors, self.ticket = self.ticket.get(), None
            if self.state == "on host":
                self.state, self.hidden = "here", tensors.pop(0)
            if self.anchors is not None:
                self.anchors = tensors
        if self.state == "to rebuild":
            _rebuild_inputs(self)
        if self.before is not None and self.before.ticket is not None:
            self.before.ticket.prefetch()

    def free(self) -> None:
        """Drop all tensors."""
        self.hidden, self.others, self.anchors = None, [], None

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run a block under forward's random numbers and tiles; refuse it if the layer has changed since."""
        self.snapshot.refuse_changed()
        units = self.call.layer.units
        tiles_now = [unit.tile for unit in units]
        _set_tiles(units, self.tiles)
        try:
            with self._same_numbers():
                yield
        finally:
            _set_tiles(units, tiles_now)

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        changed_mode = self.snapshot.mode_changed
        if changed_mode and self.rng is not None:
            self.snapshot.refuse_changed_mode()
        # A layer that drew nothing in evaluation may draw in training.
        since = Rng(self.inputs[0].device) if changed_mode else None
        with nullcontext() if self.rng is None else self.rng.again():
            yield
        if since is not None and since.moved():
            self.snapshot.refuse_changed_mode()


def _rebuild_inputs(saved: SavedCall) -> None:
    """Run the layers from the last saved input up to `saved` once more, from their anchors; set each one's input."""
    chain = [saved]
    while chain[0].state == "to rebuild":
        assert chain[0].before is not None, "the first layer always keeps its input"
        chain.insert(0, chain[0].before)
    for source, target in pairwise(chain):
        source.restore()
        module = source.call.layer.module
        # The layer is called outside of FSDP2's hooks on backward, so its weights are gathered and freed here.
        if isinstance(module, FSDPModule):
            module.unshard()
        with torch.no_grad(), source.as_in_forward():
            outputs, anchors = source.call.run_again(source.inputs, source.anchors, value=True)
        if isinstance(module, FSDPModule):
            module.reshard()
        if source.anchors is None:
            # The layer has attended again here; its own backward starts from this result.
            source.anchors = anchors
        target.state, target.hidden = "here", outputs[0]


def _set_tiles(units: list[Unit], tiles: list[int]) -> None:
    for unit, tile in zip(units, tiles, strict=True):
        unit.tile = tile


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tether: Tensor, call: _LayerCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Keys and values that no later layer reads get no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        rng = Rng(inputs[0].device)
        outputs, anchors = call.run_forward(list(inputs))
        ctx.saved_call = SavedCall.of(call, list(inputs), anchors, rng if rng.moved() else None)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: SavedCall = ctx.saved_call
        # Private, and what torch.utils.checkpoint asks of its own backward: False under torch.autograd.grad and
        # backward(inputs=...). The replay accumulates gradients of all the layer's weights, not of the named ones.
        # Checked with torch 2.11 to 2.13.
        if not torch.autograd._is_checkpoint_valid():
            raise UnsupportedError(WHOLE_BACKWARD)
        if saved.used:
            raise UnsupportedError(
                "backward ran a second time through a layer that had let go of what it kept: retain_graph=True needs "
                "parallelize(..., memory=None)"
            )
        saved.used = True
        with saved.call.layer.runner.accounting():
            return (None, None, *_replay(saved, ctx.needs_input_grad[2:], douts))


def _replay(saved: SavedCall, needs_grad: tuple[bool, ...], douts: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Run the layer once more with gradients and go back through it; return its inputs' gradients."""
    saved.restore()
    with torch.enable_grad(), saved.as_in_forward():
        inputs = [x.detach().requires_grad_(need) for x, need in zip(saved.inputs, needs_grad, strict=True)]
        outputs = saved.call.run_again(inputs, saved.anchors, value=False)[0]
    saved.free()
    pairs = [
        (get_gradient_edge(o), d) for o, d in zip(outputs, douts, strict=True) if d is not None and o.requires_grad
    ]
    # Backward starts from the edges: the outputs themselves need not live through it.
    del outputs
    torch.autograd.backward([edge for edge, _ in pairs], [d for _, d in pairs])
    return [x.grad for x in inputs]
