"""The one model of memory: what a step takes on one rank, term by term, at the moment when it takes most.

Memory has a peak, not a sum: while backward goes down the layers, saved tensors go and gradients come. So the terms
are those of the worst moment: the loss, the backward of one layer's attention or MLP, or the optimizer step.
Device and host bytes of a term stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from ithaca.errors import MemoryPlanError
from ithaca.planning.activations import Flow, Piece, attention_work, loss_work, mlp_work, saved
from ithaca.planning.plan import Job, LayerMode, MemoryPlan
from ithaca.planning.sizes import ModelSizes

GIB = 2**30
# What the caching allocator holds in gaps, as a share of all activations.
SLACK = 0.04
# Decoder layers whose weights are gathered at once: the one in use and the next; one more while inputs are rebuilt.
GATHERED, GATHERED_REBUILDING = 2, 3
# Layers whose saved tensors may still be on their way out when the next layer starts.
STAGED = 2
# Pinned memory is pooled and comes in pages of this size.
PAGE = 2 * 2**20
# Bytes a parameter: two fp32 moments; two 8-bit ones with an fp32 scale for each 256 values; two bf16 ones.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "bf16_sr": 4.0, "none": 0.0}


@dataclass(frozen=True, slots=True)
class Term:
    """One share of a rank's memory at the worst moment."""

    name: str
    device_bytes: int
    host_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Memory:
    """All terms at the worst moment, in the order in which they come to be."""

    moment: str
    terms: tuple[Term, ...]

    @property
    def device_bytes(self) -> int:
        return sum(term.device_bytes for term in self.terms)

    @property
    def host_bytes(self) -> int:
        return sum(term.host_bytes for term in self.terms)

    def largest(self, *, host: bool = False) -> Term:
        """The term to blame when the device (or the host) is full."""
        return max(self.terms, key=lambda term: term.host_bytes if host else term.device_bytes)


def memory_of(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> Memory:
    """One rank's memory under `plan`."""
    return _Step(sizes, job, plan).memory()


class _Step:
    """The moments of one step, worked out from what all of them share."""

    def __init__(self, sizes: ModelSizes, job: Job, plan: MemoryPlan) -> None:
        if len(plan.layers) != len(sizes.layers):
            raise MemoryPlanError(f"a plan of {len(plan.layers)} layers for a model of {len(sizes.layers)}")
        self.sizes, self.job, self.plan = sizes, job, plan
        self.flow = Flow.of(sizes, job, plan.head_groups)
        self.tiled = plan.mlp_tile < job.tokens
        self.chain = plan.chain
        self.saved = [
            saved(self.flow, layer, mode, tiled=self.tiled)
            for layer, mode in zip(sizes.layers, plan.layers, strict=True)
        ]
        self.here = [0 if away else sum(parts) for parts, away in zip(self.saved, plan.offload, strict=True)]
        self.away = [sum(parts) if away else 0 for parts, away in zip(self.saved, plan.offload, strict=True)]
        self._work: dict[tuple[LayerMode, int, int], tuple[str, list[Piece]]] = {}

    def memory(self) -> Memory:
        """The terms of the moment with the largest total."""
        standing = self.standing()
        moments: list[tuple[str, list[Piece], list[Piece]]] = [("optimizer step", self._gradients(made=self.sizes.trainable), [])]
        moments.append(("loss", self._gradients(made=0), self._at_loss()))
        made = 0 if self.sizes.adapters else self.sizes.head or self.sizes.embedding
        resident = sum(self.here)
        for index in reversed(range(len(self.saved))):
            part, pieces = self._at_layer(index, resident)
            gradients = self._gradients(made=made) + self._layer_gradients(index)
            moments.append((f"{part} of layer {index}, backward", gradients, pieces))
            resident -= self.here[index]
            made += self.sizes.layer_trainable(index)
        moment, gradients, pieces = max(moments, key=lambda m: _total(m[1]) + (1 + SLACK) * _total(m[2]))
        slack = Piece("allocator slack", int(SLACK * _total(pieces)), f"{SLACK:.0%} of activations")
        device = [Term(p.name, p.bytes, 0, p.formula) for p in (*gradients, *pieces, slack) if p.bytes]
        return Memory(moment, (*standing, *device, *self.host_terms()))

    def standing(self) -> list[Term]:
        """What is there all the time: weights and optimizer state, on the device or on the host."""
        sizes, job = self.sizes, self.job
        weights = sizes.total * job.weight_bytes // job.shards
        state = int(sizes.trainable * OPTIMIZER_BYTES[job.optimizer]) // job.shards
        over = f" / {job.shards} ranks" if job.shards > 1 else ""
        terms = [_placed("weights", weights, f"{sizes.total:,} * {job.weight_bytes}{over}", job.weights_on_host)]
        if job.gathers:
            layers = GATHERED_REBUILDING if "rebuild" in self.plan.layers else GATHERED
            gathered = (layers * sizes.largest_layer + sizes.root) * job.compute_bytes
            terms.append(Term("gathered weights", gathered, 0, f"({layers} layers + embedding + head) * c"))
        formula = f"{sizes.trainable:,} * {OPTIMIZER_BYTES[job.optimizer]:.4g}{over}"
        terms.append(_placed("optimizer state", state, formula, job.optimizer_on_host))
        return [term for term in terms if term.device_bytes or term.host_bytes]

    def host_terms(self) -> list[Term]:
        """What waits in pinned memory; gradients there are counted whole."""
        sizes, job = self.sizes, self.job
        pinned = sum(
            -(-part // PAGE) * PAGE
            for parts, away in zip(self.saved, self.plan.offload, strict=True)
            for part in (parts if away else ())
        )
        terms = [Term("saved tensors, pinned", 0, pinned, "each saved tensor of an offloaded layer, to 2 MiB")]
        if job.gradients_on_host:
            gradients = sizes.trainable * job.gradient_bytes // job.shards
            terms.append(Term("gradients", 0, gradients, f"{sizes.trainable:,} * {job.gradient_bytes}"))
        return [term for term in terms if term.host_bytes]

    def _gradients(self, made: int) -> list[Piece]:
        """Gradients of the parameters behind us; all of them where earlier micro-batches left theirs."""
        job = self.job
        if job.gradients_on_host:
            return []
        count = self.sizes.trainable if job.accumulate else made
        return [Piece("gradients", count * job.gradient_bytes // job.shards, f"{count:,} made so far * {job.gradient_bytes}")]

    def _layer_gradients(self, index: int) -> list[Piece]:
        """FSDP2's: a layer's own before they are reduced, the fp32 copy that is, and the root's until the end."""
        if not self.job.gathers:
            return []
        sizes, c = self.sizes, self.job.compute_bytes
        root = 0 if sizes.adapters else sizes.embedding
        layer = sizes.layer_trainable(index)
        return [Piece("unreduced gradients", layer * (c + 4) + root * c, "a layer * (c + 4) + head * c")]

    def _at_loss(self) -> list[Piece]:
        last = sum(self.away[-STAGED:])
        return [
            *self._saved_pieces(sum(self.here), last, "of the last layers, on their way out"),
            *loss_work(self.flow, self.sizes, self.plan.loss_tile, trains=not self.sizes.adapters),
            self._positions(),
        ]

    def _at_layer(self, index: int, resident: int) -> tuple[str, list[Piece]]:
        """Everything a layer's backward finds and makes; `resident` is saved on the device up to this layer."""
        staged = self.away[index] + (self.away[index - 1] if index else 0)
        part, work = self._layer_work(index)
        pieces = self._saved_pieces(resident, staged, "of this layer and of the next one, prefetched")
        place = self.chain[index]
        if place:
            pieces.append(Piece("rebuilt inputs", place * self.flow.x, f"{place} X"))
        if self.plan.layers[index - place] == "recompute":
            pieces.append(Piece("attention run again", self.flow.anchor, "B*L*H*E*c + B*S*h*4"))
        return part, [*pieces, *work, self._positions()]

    def _layer_work(self, index: int) -> tuple[str, list[Piece]]:
        mode, layer = self.plan.layers[index], self.sizes.layers[index]
        key = (mode, layer.width, layer.mlp)
        if key not in self._work:
            attention = attention_work(self.flow, mode)
            mlp = mlp_work(self.flow, layer, mode, self.plan.mlp_tile, trains=not self.sizes.adapters)
            self._work[key] = max(("attention", attention), ("MLP", mlp), key=lambda work: _total(work[1]))
        return self._work[key]

    def _saved_pieces(self, resident: int, staged: int, which: str) -> list[Piece]:
        return [
            Piece("saved on the device", resident, "layers not offloaded, those still to come in backward"),
            Piece("staged for the host", staged, which),
        ]

    def _positions(self) -> Piece:
        size = self.flow.tokens * (2 * self.sizes.key_size * self.job.compute_bytes + 3 * 8)
        return Piece("positions and ids", size, "B*L*(2*D*c + 3*8)")


def _placed(name: str, size: int, formula: str, on_host: bool) -> Term:
    return Term(name, 0 if on_host else size, size if on_host else 0, formula)


def _total(pieces: list[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)
