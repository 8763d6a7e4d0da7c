"""The one model of memory: what a step takes on one rank, term by term, at the moment when it takes most.

Memory has a peak, not a sum: while backward goes down the layers, saved tensors go and gradients come. So the terms
are those of the worst moment: the loss, the backward of one layer's attention or MLP, or the optimizer step.
Device and host bytes of a term stand side by side.

A `Frame` holds what plans with the same tiles and head groups share, so that a search can ask it about thousands of
them. Invariant: `Frame.fits` is true where the terms that `Frame.memory` would write out add up to no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter, mul, sub
from typing import NamedTuple

from ithaca.errors import MemoryPlanError
from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan, behind_root
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import (
    FP32,
    Flow,
    Piece,
    attention_work,
    gone_before_attention,
    loss_work,
    mlp_work,
    saved,
)

# What the caching allocator holds in gaps, as a share of all activations, and the name of that term.
SLACK, GAPS = 0.04, "allocator slack"
# Decoder layers whose weights are gathered at once: the one in use and the next; one more while inputs are rebuilt.
GATHERED, GATHERED_REBUILDING = 2, 3
# Layers whose saved tensors may still be on their way out when the next layer starts.
STAGED = 2
# Pinned memory is pooled and comes in pages of this size.
PAGE = 2 * 2**20
POSITIONS = "B*L*(2*D*c + 3*8)"


def optimizer_bytes(job: Job) -> float:
    """State of one parameter: two moments like it; in 8 bits with an fp32 scale for each 256; in bf16."""
    return {"adamw": 2.0 * job.gradient_bytes, "adamw8bit": 2 * (1 + 4 / 256), "bf16_sr": 4.0, "none": 0.0}[
        job.optimizer
    ]


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

    @property
    def allocated(self) -> tuple[Term, ...]:
        """Without what is set aside for the allocator's gaps."""
        return tuple(term for term in self.terms if term.name != GAPS)

    def largest(self, *, host: bool = False) -> Term:
        """The term to blame when the device (or the host) is full."""
        return max(self.terms, key=lambda term: term.host_bytes if host else term.device_bytes)


def memory_of(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> Memory:
    """One rank's memory under `plan`."""
    if len(plan.layers) != len(sizes.layers):
        raise MemoryPlanError(f"a plan of {len(plan.layers)} layers for a model of {len(sizes.layers)}")
    return Frame(sizes, job, plan.mlp_tile, plan.loss_tile, plan.head_groups).memory(plan.layers, plan.offload)


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


class Work(NamedTuple):
    """Half of a layer's backward: what it makes, and what of the layer's saved tensors is gone by then."""

    part: str
    pieces: list[Piece]
    gone: int

    @property
    def more(self) -> int:
        return total(self.pieces) - self.gone


class Frame:
    """One step of a job with given tiles and head groups; how layers are kept and where is asked of it."""

    def __init__(self, sizes: ModelSizes, job: Job, mlp_tile: int, loss_tile: int, head_groups: int) -> None:
        self.sizes, self.job, self.mlp_tile = sizes, job, mlp_tile
        self.flow = Flow.of(sizes, job, head_groups)
        self.tiled = mlp_tile < job.tokens
        self.kinds = sizes.kinds
        self.trainable, self.shards, self.gathers = sizes.trainable, job.shards, job.gathers
        self.standing = {again: standing_terms(sizes, job, rebuilds=again) for again in (False, True)}
        # Keys and values that later layers read are there until those are done in backward, and so are their gradients.
        self.shared = 2 * sizes.kv_stores * self.flow.kv
        self.positions = job.tokens * (2 * sizes.key_size * job.compute_bytes + 3 * 8) + self.shared
        self.loss = loss_work(self.flow, sizes, loss_tile, trains=sizes.head_trainable > 0)
        self.standing_bytes = {
            again: sum(term.device_bytes for term in terms) for again, terms in self.standing.items()
        }
        # On the host beside saved tensors.
        gradients = self.trainable * job.gradient_bytes // self.shards if job.gradients_on_host else 0
        self.host_beside = sum(term.host_bytes for term in self.standing[False]) + gradients
        self._saved: dict[tuple[int, LayerMode], tuple[int, int]] = {}
        self._asked: tuple[tuple[LayerMode, ...], list[tuple[int, int]]] = (), []
        self._more: dict[tuple[int, LayerMode], int] = {}

    @cached_property
    def unreduced(self) -> list[int]:
        trained = self._trained
        pairs = list(zip(trained, [*trained[1:], 0], strict=True))
        known = {pair: self.unreduced_bytes(*pair) for pair in set(pairs)}
        return [known[pair] for pair in pairs]

    @cached_property
    def beside(self) -> list[int]:
        """Of each layer, what the device holds beside activations while it runs backward."""
        if self.job.accumulate or self.job.gradients_on_host:
            every = self.gradient_bytes(0)
            return [every + waiting for waiting in self.unreduced]
        each, shards = self.job.gradient_bytes, self.shards
        return [made * each // shards + waiting for made, waiting in zip(self.made, self.unreduced, strict=True)]

    def all_saves(self, modes: Sequence[LayerMode]) -> list[tuple[int, int]]:
        """`saves` of every layer; what was asked last is asked again soon."""
        modes = tuple(modes)
        if modes is not self._asked[0]:
            try:
                saves = list(map(self._saved.__getitem__, zip(self.kinds, modes, strict=True)))
            except KeyError:
                saves = [self.saves(index, mode) for index, mode in enumerate(modes)]
            self._asked = modes, saves
        return self._asked[1]

    def saves(self, index: int, mode: LayerMode) -> tuple[int, int]:
        """What layer `index` saves under `mode`: its bytes, and the same in pinned pages."""
        key = (self.kinds[index], mode)
        if key not in self._saved:
            parts = saved(self.flow, self.sizes.layers[index], mode, tiled=self.tiled)
            self._saved[key] = sum(parts), sum(-(-part // PAGE) * PAGE for part in parts)
        return self._saved[key]

    def fits(self, modes: Sequence[LayerMode], offload: Sequence[bool], device: int) -> bool:
        """Whether no moment takes more than `device` bytes of the device."""
        room = device - self.standing_bytes["rebuild" in modes]
        resident, away = self._split(modes, offload)
        loss = sum(resident) + sum(away[i] for i in _late(away)) + total(self.loss) + self.positions
        if self.gradient_bytes(self.trainable) > room or self.gradient_bytes(0) + loss + int(SLACK * loss) > room:
            return False
        # From the last layer on, where most is saved: what does not fit is seen soon.
        backward = self._backward(modes, resident, away)
        beside = self.beside
        return all(beside[index] + held + int(SLACK * held) <= room for index, _, _, held in backward)

    def pinned(self, modes: Sequence[LayerMode], offload: Sequence[bool]) -> int:
        """Bytes of saved tensors on the host."""
        pairs = zip(self.all_saves(modes), offload, strict=True)
        return sum(pages for (_, pages), away in pairs if away)

    def memory(self, modes: Sequence[LayerMode], offload: Sequence[bool]) -> Memory:
        """The terms of the moment with the largest total."""
        resident, away = self._split(modes, offload)
        backward = self._backward(modes, resident, away)
        index, here, staged, _ = max(backward, key=lambda each: (1 + SLACK) * each[3] + self.beside[each[0]])
        work = self._layer_work(index, modes[index])
        unreduced = Piece("unreduced gradients", self.unreduced[index], "layer * c + the one after it * 4 + head * c")
        moments = [
            ("optimizer step", self._gradients(self.trainable), list[Piece]()),
            ("loss", self._gradients(0), self._at_loss(resident, away)),
            (
                f"{work.part} of layer {index}, backward",
                [*self._gradients(self.made[index]), unreduced],
                [*self._at_layer(modes, index, here - work.gone, staged), *work.pieces],
            ),
        ]
        moment, gradients, pieces = max(moments, key=lambda m: total(m[1]) + (1 + SLACK) * total(m[2]))
        slack = Piece(GAPS, int(SLACK * total(pieces)), f"{SLACK:.0%} of activations")
        device = [Term(p.name, p.bytes, 0, p.formula) for p in (*gradients, *pieces, slack) if p.bytes]
        host = self._host_terms(modes, offload)
        return Memory(moment, (*self.standing["rebuild" in modes], *device, *host))

    def _split(self, modes: Sequence[LayerMode], offload: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Of each layer what it leaves on the device, and what it sends to the host."""
        sizes = list(map(itemgetter(0), self.all_saves(modes)))
        away = list(map(mul, sizes, offload))
        return list(map(sub, sizes, away)), away

    def _backward(
        self, modes: Sequence[LayerMode], resident: list[int], away: list[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Layer by layer from the last: its index, what is saved on the device up to it, what is staged for the host,
        and all activations that its backward finds or makes."""
        late, here = _late(away), sum(resident)
        x, anchor, more, kinds, positions = self.flow.x, self.flow.anchor, self._more, self.kinds, self.positions
        for index in range(len(modes) - 1, -1, -1):
            # Not of all layers beforehand: what does not fit is seen at the first few.
            mode, place = modes[index], behind_root(modes, index)
            # A chain's tensors all came back for its rebuilding; the layer before it is being prefetched.
            first = index + 1 if mode == "keep" else max(index - place - 1, 0)
            staged = sum(away[first : index + 1])
            for i in late:
                if i < first and i <= index:
                    staged += away[i]
            key = (kinds[index], mode)
            own = more[key] if key in more else self.layer_more(index, mode)
            again = anchor if modes[index - place] == "recompute" else 0
            yield index, here, staged, here + staged + place * x + again + positions + own
            here -= resident[index]

    def _host_terms(self, modes: Sequence[LayerMode], offload: Sequence[bool]) -> list[Term]:
        """What waits in pinned memory; gradients there are counted whole."""
        job, pinned = self.job, self.pinned(modes, offload)
        terms = [Term("saved tensors, pinned", 0, pinned, "each saved tensor of an offloaded layer, to 2 MiB")]
        if job.gradients_on_host:
            gradients = self.trainable * job.gradient_bytes // job.shards
            terms.append(Term("gradients", 0, gradients, f"{self.trainable:,} * {job.gradient_bytes}"))
        return [term for term in terms if term.host_bytes]

    @cached_property
    def made(self) -> list[int]:
        """Of each layer, the parameters whose gradients were made before its own backward."""
        made, before = self.sizes.head_trainable, list[int]()
        for own in reversed(self._trained):
            before.append(made)
            made += own
        return before[::-1]

    @cached_property
    def _trained(self) -> list[int]:
        """Parameters of each layer that want a gradient."""
        each = {kind: self.sizes.layer_trainable(self.kinds.index(kind)) for kind in set(self.kinds)}
        return [each[kind] for kind in self.kinds]

    def gradient_bytes(self, made: int) -> int:
        """Gradients of the parameters behind us; all of them where earlier micro-batches left theirs."""
        count = self.trainable if self.job.accumulate else made
        return 0 if self.job.gradients_on_host else count * self.job.gradient_bytes // self.shards

    def _gradients(self, made: int) -> list[Piece]:
        formula = "every" if self.job.accumulate else f"{made:,} made so far"
        return [Piece("gradients", self.gradient_bytes(made), f"{formula} * {self.job.gradient_bytes}")]

    def unreduced_bytes(self, own: int, after: int) -> int:
        """FSDP2's: a layer's own, the fp32 copy of the next one's on its way, and the root's until the end."""
        if not self.gathers:
            return 0
        return (own + self.sizes.head_trainable) * self.job.compute_bytes + after * FP32

    def _at_loss(self, resident: list[int], away: list[int]) -> list[Piece]:
        return [
            Piece("saved on the device", sum(resident), "layers not offloaded"),
            Piece("staged for the host", sum(away[i] for i in _late(away)), "of the last layers, on their way out"),
            *self.loss,
            *self._positions,
        ]

    @property
    def _positions(self) -> list[Piece]:
        """What is there in every layer."""
        own = Piece("positions and ids", self.positions - self.shared, POSITIONS)
        formula = f"2 * {self.sizes.kv_stores} layers * B*L*K*(D+E)*c"
        return [own, Piece("keys and values that layers share", self.shared, formula)] if self.shared else [own]

    def _at_layer(self, modes: Sequence[LayerMode], index: int, here: int, staged: int) -> list[Piece]:
        place = behind_root(modes, index)
        again = self.flow.anchor if modes[index - place] == "recompute" else 0
        return [
            Piece("saved on the device", here, "layers not offloaded, those still to come in backward"),
            Piece("staged for the host", staged, "of this layer (and its chain) and of the next one, prefetched"),
            Piece("rebuilt inputs", place * self.flow.x, f"{place} X"),
            Piece("attention run again", again, "B*L*H*E*c + B*S*h*4"),
            *self._positions,
        ]

    def layer_more(self, index: int, mode: LayerMode) -> int:
        """What a layer's backward takes beside all saved tensors."""
        more = self._layer_work(index, mode).more
        self._more[self.kinds[index], mode] = more
        return more

    def _layer_work(self, index: int, mode: LayerMode) -> Work:
        """The larger of the two halves of a layer's backward."""
        flow, layer, trains = self.flow, self.sizes.layers[index], not self.sizes.adapters
        mlp = mlp_work(flow, layer, mode, self.mlp_tile, trains=trains, reduces=self.gathers)
        gone = gone_before_attention(flow, layer, mode, tiled=self.tiled)
        halves = Work("attention", attention_work(flow, layer, mode), gone), Work("MLP", mlp, 0)
        return max(halves, key=lambda half: half.more)


def _late(away: list[int]) -> list[int]:
    """The last ones to set out never leave: they are still here when backward wants them."""
    return list(islice((index for index in range(len(away) - 1, -1, -1) if away[index]), STAGED))


def _placed(name: str, size: int, formula: str, on_host: bool) -> Term:
    return Term(name, 0 if on_host else size, size if on_host else 0, formula)


def total(pieces: list[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)
