"""The one model of memory: bytes of a step on one rank, term by term, at the moment when the step takes most.

Memory has a peak, not a sum: while backward goes down the layers, saved tensors go and gradients come. The terms are
those of the worst of these moments:

    loss                    everything saved + the loss tile
    backward of layer i     saved in layers 0..i + work of the layer + gradients of layers i+1.. + unreduced gradients
                            (the larger of its halves: attention, or the MLP)
    optimizer step          every gradient

Weights and optimizer state stand beside each of them. Device and host bytes of a term stand side by side.

    memory_of(sizes, job, plan).device_bytes

Invariant: the terms of `ModesMemory.memory` add up to `ModesMemory.device_bytes`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, compress
from operator import add, mul, sub
from typing import NamedTuple

from ithaca.errors import MemoryPlanError
from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan, layers_from_roots
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import (
    FP32,
    Allocation,
    TensorBytes,
    attention_work,
    freed_before_attention,
    mlp_work,
    saved,
    sum_bytes,
)
from ithaca.planning.terms.cost import optimizer_bytes
from ithaca.planning.terms.loss_work import loss_work
from ithaca.planning.terms.step_memory import GAPS, StepMemory, Term

# Share of all activations that the caching allocator holds in gaps.
SLACK = 0.04
# Decoder layers whose weights are gathered at once: the current one and the next; one more while inputs are rebuilt.
GATHERED, GATHERED_REBUILDING = 2, 3
# Layers whose saved tensors may still be on their way to the host when the next layer starts.
STAGED = 2
# Pinned memory is pooled and comes in pages of this size.
PAGE = 2 * 2**20
POSITIONS = "B*L*(2*D*c + 3*8)"


def memory_of(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> StepMemory:
    """Return one rank's memory under `plan`."""
    if len(plan.layers) != len(sizes.layers):
        raise MemoryPlanError(f"a plan of {len(plan.layers)} layers for a model of {len(sizes.layers)}")
    model = MemoryModel(sizes, job, plan.mlp_tile, plan.loss_tile, plan.head_groups)
    return ModesMemory(model, plan.layers).memory(plan.offload)


def standing_terms(sizes: ModelSizes, job: Job, *, rebuilds: bool = False) -> list[Term]:
    """Return the terms of the whole step: weights and optimizer state, on the device or on the host."""
    total, trainable = sizes.total, sizes.trainable
    weights = total * job.weight_bytes // job.shards
    state = int(trainable * optimizer_bytes(job)) // job.shards
    over = f" / {job.shards} ranks" if job.shards > 1 else ""
    terms = [_on_one_side("weights", weights, f"{total:,} * {job.weight_bytes}{over}", job.weights_on_host)]
    if job.gathers:
        layers = GATHERED_REBUILDING if rebuilds else GATHERED
        gathered = (layers * sizes.largest_layer + sizes.root) * job.compute_bytes
        terms.append(Term("gathered weights", gathered, 0, f"({layers} layers + embedding + head) * c"))
    formula = f"{trainable:,} * {optimizer_bytes(job):.4g}{over}"
    terms.append(_on_one_side("optimizer state", state, formula, job.optimizer_on_host))
    return [term for term in terms if term.device_bytes or term.host_bytes]


def _on_one_side(name: str, size: int, formula: str, on_host: bool) -> Term:
    return Term(name, 0 if on_host else size, size if on_host else 0, formula)


class Work(NamedTuple):
    """One half of a layer's backward: what it allocates, and how much of the layer's saved tensors is freed by then."""

    half: str
    allocations: list[Allocation]
    freed: int

    @property
    def net(self) -> int:
        return sum_bytes(self.allocations) - self.freed


class LayerMemory(NamedTuple):
    """Bytes of one layer in one mode: `saved` for backward, the same `pinned` in whole pages of the host, and `work`, the
    most that its backward allocates beside all saved tensors."""

    saved: int
    pinned: int
    work: int


class SavedBytes(NamedTuple):
    """Bytes of saved tensors on the device: `resident` and `fetched` from the host in the backward of each layer, and
    `staged` for the host at the loss."""

    resident: list[int]
    fetched: list[int]
    staged: int


class MemoryModel:
    """The memory of one job with given tiles and head groups, before the layers' modes are chosen."""

    def __init__(self, sizes: ModelSizes, job: Job, mlp_tile: int, loss_tile: int, head_groups: int) -> None:
        self.sizes, self.job, self.mlp_tile = sizes, job, mlp_tile
        self.tensors = TensorBytes.of(sizes, job, head_groups)
        self.tiled = mlp_tile < job.tokens
        self.standing = {again: standing_terms(sizes, job, rebuilds=again) for again in (False, True)}
        self.standing_bytes = {
            again: sum(term.device_bytes for term in terms) for again, terms in self.standing.items()
        }
        # Keys and values that later layers read stay until those layers' backward, and so do their gradients.
        self.shared = 2 * sizes.kv_stores * self.tensors.kv
        self.positions = job.tokens * (2 * sizes.key_size * job.compute_bytes + 3 * 8) + self.shared
        self.loss = loss_work(self.tensors, sizes, loss_tile, trains=sizes.head_trainable > 0)
        self.at_loss = sum_bytes(self.loss) + self.positions
        self.gradients_on_host = sizes.trainable * job.gradient_bytes // job.shards if job.gradients_on_host else 0
        self.host_beside_saved = sum(term.host_bytes for term in self.standing[False]) + self.gradients_on_host
        # Layers of equal sizes share a kind: a search over plans asks for few kinds in four modes, thousands of times.
        self._layers: dict[tuple[int, LayerMode], LayerMemory] = {}

    def layers(self, modes: Sequence[LayerMode]) -> list[LayerMemory]:
        """Return the bytes of every layer."""
        try:
            return list(map(self._layers.__getitem__, zip(self.sizes.kinds, modes, strict=True)))
        except KeyError:
            for key in set(zip(self.sizes.kinds, modes, strict=True)) - self._layers.keys():
                self._layers[key] = self._layer(*key)
            return self.layers(modes)

    def _layer(self, kind: int, mode: LayerMode) -> LayerMemory:
        index = self.sizes.kinds.index(kind)
        parts = saved(self.tensors, self.sizes.layers[index], mode, tiled=self.tiled)
        pinned = sum(-(-part // PAGE) * PAGE for part in parts)
        return LayerMemory(sum(parts), pinned, self.larger_half(index, mode).net)

    @cached_property
    def gradients_made(self) -> list[int]:
        """Parameters whose gradients exist before the backward of each layer: the head's and the later layers'."""
        return [*accumulate(self.sizes.layers_trainable[:0:-1], initial=self.sizes.head_trainable)][::-1]

    @cached_property
    def unreduced(self) -> list[int]:
        """Bytes of gradients that FSDP2 holds whole in each layer's backward: the layer's own and the root's in the
        computing dtype, and the fp32 copy of the next layer's, whose reduce-scatter is running."""
        trained, root, c = self.sizes.layers_trainable, self.sizes.head_trainable, self.job.compute_bytes
        if not self.job.gathers:
            return [0] * len(trained)
        return [(own + root) * c + after * FP32 for own, after in zip(trained, (*trained[1:], 0), strict=True)]

    @cached_property
    def beside_activations(self) -> list[int]:
        """Bytes of gradients on the device in the backward of each layer."""
        pairs = zip(self.gradients_made, self.unreduced, strict=True)
        return [self.gradient_bytes(made) + unreduced for made, unreduced in pairs]

    def gradient_bytes(self, made: int) -> int:
        """Return the device bytes of the gradients of `made` parameters."""
        # With gradient accumulation every gradient exists from the step's start.
        count = self.sizes.trainable if self.job.accumulate else made
        return 0 if self.job.gradients_on_host else count * self.job.gradient_bytes // self.job.shards

    def gradients(self, made: int) -> Allocation:
        formula = "every" if self.job.accumulate else f"{made:,} made so far"
        return Allocation("gradients", self.gradient_bytes(made), f"{formula} * {self.job.gradient_bytes}")

    @property
    def every_layer(self) -> list[Allocation]:
        """Tensors that all layers use: positions, and keys and values that several layers share."""
        own = Allocation("positions and ids", self.positions - self.shared, POSITIONS)
        formula = f"2 * {self.sizes.kv_stores} layers * B*L*K*(D+E)*c"
        return [own, Allocation("keys and values that layers share", self.shared, formula)] if self.shared else [own]

    def larger_half(self, index: int, mode: LayerMode) -> Work:
        """Return the half of a layer's backward that takes more memory."""
        tensors, layer, trains = self.tensors, self.sizes.layers[index], not self.sizes.adapters
        mlp = mlp_work(tensors, layer, mode, self.mlp_tile, trains=trains, reduces=self.job.gathers)
        freed = freed_before_attention(tensors, layer, mode, tiled=self.tiled)
        halves = Work("attention", attention_work(tensors, layer, mode), freed), Work("MLP", mlp, 0)
        return max(halves, key=lambda half: half.net)


class ModesMemory:
    """The memory of a step whose layers have given modes, under any choice of layers to offload."""

    def __init__(self, model: MemoryModel, modes: tuple[LayerMode, ...]) -> None:
        self.model, self.modes = model, modes
        self.layers = model.layers(modes)
        self.saved = [layer.saved for layer in self.layers]

    @cached_property
    def from_root(self) -> tuple[int, ...]:
        """The number of layers between each layer and the root its input is rebuilt from."""
        return layers_from_roots(self.modes)

    @cached_property
    def first_fetched(self) -> list[int]:
        """The first layer whose tensors are fetched from the host, in each layer's backward."""
        # A chain is fetched whole for its rebuilding, and the layer before it is prefetched. A kept layer has nothing to
        # fetch, and its backward frees its own tensors before the next layer is prefetched.
        return [
            index + 1 if mode == "keep" else index - behind - 1 if index > behind else 0
            for index, (mode, behind) in enumerate(zip(self.modes, self.from_root, strict=True))
        ]

    @cached_property
    def work(self) -> list[int]:
        """Bytes in the backward of each layer that do not depend on what is offloaded."""
        # Where the root of a chain recomputes, the attention that runs again to rebuild the chain stays for the root's own
        # backward.
        model, modes, x, anchor = self.model, self.modes, self.model.tensors.x, self.model.tensors.anchor
        return [
            layer.work + model.positions + behind * x + (anchor if modes[index - behind] == "recompute" else 0)
            for index, (layer, behind) in enumerate(zip(self.layers, self.from_root, strict=True))
        ]

    def device_bytes(self, offload: Sequence[bool]) -> int:
        """Return the bytes of the device that the step takes at its worst moment."""
        model, saved = self.model, self._saved(offload)
        activations = map(add, map(add, saved.resident, saved.fetched), self.work)
        loss = saved.resident[-1] + saved.staged + model.at_loss
        return model.standing_bytes["rebuild" in self.modes] + max(
            model.gradient_bytes(model.sizes.trainable),
            model.gradient_bytes(0) + loss + int(SLACK * loss),
            *[beside + a + int(SLACK * a) for beside, a in zip(model.beside_activations, activations, strict=True)],
        )

    def host_bytes(self, offload: Sequence[bool]) -> int:
        """Return the bytes of pinned memory that saved tensors take on the host."""
        return sum([layer.pinned for layer in compress(self.layers, offload)])

    def memory(self, offload: Sequence[bool]) -> StepMemory:
        """Return the terms of the moment with the largest total."""
        model, saved = self.model, self._saved(offload)
        activations = map(add, map(add, saved.resident, saved.fetched), self.work)
        totals = [(1 + SLACK) * a + beside for a, beside in zip(activations, model.beside_activations, strict=True)]
        # Of equal layers the last, which backward comes to first.
        worst = len(totals) - 1 - totals[::-1].index(max(totals))
        unreduced = "layer * c + the one after it * 4 + head * c"
        work = model.larger_half(worst, self.modes[worst])
        moments = [
            ("optimizer step", [model.gradients(model.sizes.trainable)], list[Allocation]()),
            (
                "loss",
                [model.gradients(0)],
                [
                    Allocation("saved on the device", saved.resident[-1], "layers not offloaded"),
                    Allocation("staged for the host", saved.staged, "of the last layers, on their way out"),
                    *model.loss,
                    *model.every_layer,
                ],
            ),
            (
                f"{work.half} of layer {worst}, backward",
                [
                    model.gradients(model.gradients_made[worst]),
                    Allocation("unreduced gradients", model.unreduced[worst], unreduced),
                ],
                self._at_layer(worst, saved, work),
            ),
        ]
        moment, gradients, held = max(moments, key=lambda m: sum_bytes(m[1]) + (1 + SLACK) * sum_bytes(m[2]))
        slack = Allocation(GAPS, int(SLACK * sum_bytes(held)), f"{SLACK:.0%} of activations")
        device = [Term(a.name, a.bytes, 0, a.formula) for a in (*gradients, *held, slack) if a.bytes]
        return StepMemory(moment, (*model.standing["rebuild" in self.modes], *device, *self._host_terms(offload)))

    def _saved(self, offload: Sequence[bool]) -> SavedBytes:
        """Return where the saved tensors are in the course of a step that offloads these layers."""
        sent = list(map(mul, self.saved, offload))
        sent_up_to = [*accumulate(sent, initial=0)]
        fetched = list(map(sub, sent_up_to[1:], map(sent_up_to.__getitem__, self.first_fetched)))
        # The layers sent last never leave: their tensors are still on the device when backward needs them.
        late = [*compress(range(len(sent)), offload)][-STAGED:]
        for i in late:
            # Later layers fetch later tensors: from some layer on, backward does not fetch those of layer i.
            start = bisect_right(self.first_fetched, i)
            fetched[start:] = [size + sent[i] for size in fetched[start:]]
        resident = list(map(sub, accumulate(self.saved), sent_up_to[1:]))
        return SavedBytes(resident, fetched, sum(sent[i] for i in late))

    def _at_layer(self, index: int, saved: SavedBytes, work: Work) -> list[Allocation]:
        """Return the activations on the device in the backward of layer `index`."""
        behind, resident = self.from_root[index], saved.resident[index] - work.freed
        again = self.model.tensors.anchor if self.modes[index - behind] == "recompute" else 0
        fetched = "of this layer (and its chain) and of the next one, prefetched"
        return [
            Allocation("saved on the device", resident, "layers not offloaded, those still to come in backward"),
            Allocation("staged for the host", saved.fetched[index], fetched),
            Allocation("rebuilt inputs", behind * self.model.tensors.x, f"{behind} X"),
            Allocation("attention run again", again, "B*L*H*E*c + B*S*h*4"),
            *self.model.every_layer,
            *work.allocations,
        ]

    def _host_terms(self, offload: Sequence[bool]) -> list[Term]:
        """Return the terms on the host beside weights and optimizer state."""
        model = self.model
        formula = f"{model.sizes.trainable:,} * {model.job.gradient_bytes}"
        terms = [
            Term(
                "saved tensors, pinned",
                0,
                self.host_bytes(offload),
                "each saved tensor of an offloaded layer, to 2 MiB",
            ),
            # Gradients on the host are counted whole, whatever the moment.
            Term("gradients", 0, model.gradients_on_host, formula),
        ]
        return [term for term in terms if term.host_bytes]
