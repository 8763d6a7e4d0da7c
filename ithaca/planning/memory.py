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
POSITIONS = "B*L*(2*D*c + 3*8)"


def optimizer_bytes(job: Job) -> float:
    """State of one parameter: two moments like the weight; in 8 bits with an fp32 scale for each 256; in bf16."""
    return {"adamw": 2.0 * job.weight_bytes, "adamw8bit": 2 * (1 + 4 / 256), "bf16_sr": 4.0, "none": 0.0}[job.optimizer]


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


def standing_terms(sizes: ModelSizes, job: Job, *, rebuilds: bool = False) -> list[Term]:
    """What is there all the time: weights and optimizer state, on the device or on the host."""
    total, trainable = sizes.total, sizes.trainable
    weights = total * job.weight_bytes // job.shards
    state = int(trainable * optimizer_bytes(job)) // job.shards
    over = f" / {job.shards} ranks" if job.shards > 1 else ""
    terms = [_placed("weights", weights, f"{total:,} * {job.weight_bytes}{over}", job.weights_on_host)]
    if job.gathers:
        layers = GATHERED_REBUILDING if rebuilds else GATHERED
        gathered = (layers * sizes.largest_layer + sizes.root) * job.compute_bytes
        terms.append(Term("gathered weights", gathered, 0, f"({layers} layers + embedding + head) * c"))
    formula = f"{trainable:,} * {optimizer_bytes(job):.4g}{over}"
    terms.append(_placed("optimizer state", state, formula, job.optimizer_on_host))
    return [term for term in terms if term.device_bytes or term.host_bytes]


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
        # The last ones to set out never leave: they are still here when backward wants them.
        out = [index for index, size in enumerate(self.away) if size]
        self.late = set(out[-STAGED:])
        self.trainable = sizes.trainable
        self.standing = standing_terms(sizes, job, rebuilds="rebuild" in plan.layers)
        self.positions = job.tokens * (2 * sizes.key_size * job.compute_bytes + 3 * 8)
        self._work: dict[tuple[LayerMode, int, int], tuple[str, list[Piece], int]] = {}

    def memory(self) -> Memory:
        """The terms of the moment with the largest total."""
        moments = [("optimizer step", self._gradients(self.trainable), list[Piece]())]
        moments.append(("loss", self._gradients(0), self._at_loss()))
        index, resident, made = self._worst_layer()
        part, work, _ = self._layer_work(index)
        unreduced = Piece("unreduced gradients", self._unreduced_bytes(index), "a layer * (c + 4) + head * c")
        gradients = [*self._gradients(made), unreduced]
        moments.append((f"{part} of layer {index}, backward", gradients, self._at_layer(index, resident) + work))
        moment, gradients, pieces = max(moments, key=lambda m: _total(m[1]) + (1 + SLACK) * _total(m[2]))
        slack = Piece("allocator slack", int(SLACK * _total(pieces)), f"{SLACK:.0%} of activations")
        device = [Term(p.name, p.bytes, 0, p.formula) for p in (*gradients, *pieces, slack) if p.bytes]
        return Memory(moment, (*self.standing, *device, *self.host_terms()))

    def _worst_layer(self) -> tuple[int, int, int]:
        """The layer whose backward takes most, what is saved on the device up to it, and gradients made before it."""
        made = 0 if self.sizes.adapters else self.sizes.head or self.sizes.embedding
        resident = sum(self.here)
        worst, largest = (0, 0, 0), -1.0
        for index in reversed(range(len(self.saved))):
            activations = sum(self._held(index, resident)) + self._layer_work(index)[2]
            total = (1 + SLACK) * activations + self._gradient_bytes(made) + self._unreduced_bytes(index)
            if total > largest:
                worst, largest = (index, resident, made), total
            resident -= self.here[index]
            made += self.sizes.layer_trainable(index)
        return worst

    def host_terms(self) -> list[Term]:
        """What waits in pinned memory; gradients there are counted whole."""
        job = self.job
        pinned = sum(
            -(-part // PAGE) * PAGE
            for parts, away in zip(self.saved, self.plan.offload, strict=True)
            for part in (parts if away else ())
        )
        terms = [Term("saved tensors, pinned", 0, pinned, "each saved tensor of an offloaded layer, to 2 MiB")]
        if job.gradients_on_host:
            gradients = self.trainable * job.gradient_bytes // job.shards
            terms.append(Term("gradients", 0, gradients, f"{self.trainable:,} * {job.gradient_bytes}"))
        return [term for term in terms if term.host_bytes]

    def _gradient_bytes(self, made: int) -> int:
        """Gradients of the parameters behind us; all of them where earlier micro-batches left theirs."""
        count = self.trainable if self.job.accumulate else made
        return 0 if self.job.gradients_on_host else count * self.job.gradient_bytes // self.job.shards

    def _gradients(self, made: int) -> list[Piece]:
        formula = "every" if self.job.accumulate else f"{made:,} made so far"
        return [Piece("gradients", self._gradient_bytes(made), f"{formula} * {self.job.gradient_bytes}")]

    def _unreduced_bytes(self, index: int) -> int:
        """FSDP2's: a layer's own before they are reduced, the fp32 copy that is, and the root's until the end."""
        if not self.job.gathers:
            return 0
        c = self.job.compute_bytes
        return self.sizes.layer_trainable(index) * (c + 4) + (0 if self.sizes.adapters else self.sizes.embedding * c)

    def _at_loss(self) -> list[Piece]:
        return [
            Piece("saved on the device", sum(self.here), "layers not offloaded"),
            Piece("staged for the host", sum(self.away[i] for i in self.late), "of the last layers, on their way out"),
            *loss_work(self.flow, self.sizes, self.plan.loss_tile, trains=not self.sizes.adapters),
            Piece("positions and ids", self.positions, POSITIONS),
        ]

    def _held(self, index: int, resident: int) -> tuple[int, int, int, int, int]:
        """Bytes that a layer's backward finds: `resident` up to this layer, staged, rebuilt, attended again, positions."""
        place = self.chain[index]
        # A chain's tensors all came back for its rebuilding; the layer before it is being prefetched.
        back = set() if self.plan.layers[index] == "keep" else set(range(max(index - place - 1, 0), index + 1))
        staged = sum(self.away[i] for i in back | {i for i in self.late if i <= index})
        again = self.flow.anchor if self.plan.layers[index - place] == "recompute" else 0
        return resident, staged, place * self.flow.x, again, self.positions

    def _at_layer(self, index: int, resident: int) -> list[Piece]:
        resident, staged, rebuilt, again, positions = self._held(index, resident)
        return [
            Piece("saved on the device", resident, "layers not offloaded, those still to come in backward"),
            Piece("staged for the host", staged, "of this layer (and its chain) and of the next one, prefetched"),
            Piece("rebuilt inputs", rebuilt, f"{self.chain[index]} X"),
            Piece("attention run again", again, "B*L*H*E*c + B*S*h*4"),
            Piece("positions and ids", positions, POSITIONS),
        ]

    def _layer_work(self, index: int) -> tuple[str, list[Piece], int]:
        """The larger of the two halves of a layer's backward, its pieces, and their total."""
        mode, layer = self.plan.layers[index], self.sizes.layers[index]
        key = (mode, layer.width, layer.mlp)
        if key not in self._work:
            attention = attention_work(self.flow, mode)
            mlp = mlp_work(self.flow, layer, mode, self.plan.mlp_tile, trains=not self.sizes.adapters)
            halves = [(name, work, _total(work)) for name, work in (("attention", attention), ("MLP", mlp))]
            self._work[key] = max(halves, key=lambda half: half[2])
        return self._work[key]


def _placed(name: str, size: int, formula: str, on_host: bool) -> Term:
    return Term(name, 0 if on_host else size, size if on_host else 0, formula)


def _total(pieces: list[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)
