"""The seconds of a step on one rank, term by term: attention, matrix products, recomputation, and copies and collectives
as far as no work hides them.

Every term is work divided by a speed of the card's table. Nothing is fitted to a step as a whole: the predicted steps of
`benchmarks/results/step.json` are within 10% of the measured ones, and a test holds that.
"""

from __future__ import annotations

from dataclasses import dataclass

from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.flops import ATTENTION_BACKWARD, attention_flops, model_flops, utilisation
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import FP32, TensorBytes, saved
from ithaca.planning.terms.cost import SUMMED_BYTES, last_product, optimizer_bytes
from ithaca.planning.terms.traffic import Machine, copies_s, exchange_s, exchanged, gather_s, ring_s

TERA, GIGA = 1e12, 1e9
# cuDNN has no windows and no wide heads: torch's FlashAttention runs them at this share of cuDNN's speed (H200).
FLASH_FORWARD, FLASH_BACKWARD, WIDEST = 0.57, 0.61, 192
# Norms, activations and sums reach this share of a plain copy's speed (H200, compiled).
ELEMENTWISE_SHARE = 0.75
# Products over experts' shares of the tokens, against one large product (H200, benchmarks/results/experts.json).
EXPERTS_SHARE = 0.85
# Passes over the copies of tokens for their experts: sorting, weighing, putting back (H200, the same file).
ROUTED_FORWARD, ROUTED_BACKWARD = 24, 37
# AdamW on the host is bound by its memory: bytes a second for one rank (16 cores beside an H200, rehearsals.json).
HOST_STEP = 85 * GIGA
# Least seconds in which the host launches a layer whose weights it holds: forward, backward, recompute, and for each
# further head group. Short sequences wait for the host. Fitted to four machines at 8K and 32K (rehearsals.json), whose
# steps at 8K took 0.86 to 1.06 s; the predictions are within 12%.
LAUNCH_FORWARD, LAUNCH_BACKWARD, LAUNCH_AGAIN, LAUNCH_GROUP = 5.5e-3, 7.4e-3, 5.0e-3, 3.0e-3


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One share of a step, in seconds, and its meaning."""

    name: str
    seconds: float
    meaning: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step of the whole job. `tokens`: of all rows. `flops`: the model's own, on all ranks together."""

    terms: tuple[TimeTerm, ...]
    tokens: int
    flops: float
    ranks: int
    wire_s: float

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exchange_share(self) -> float:
        """The share of the step that waits for exchanges and ring."""
        return sum(term.seconds for term in self.terms if term.name in ("exchange", "ring")) / self.seconds

    def utilisation(self, peak: float) -> float:
        """Return the model's own FLOPs over those that the cards, of `peak` TFLOP/s each, could have done meanwhile."""
        return utilisation(self.flops, self.seconds, self.ranks, peak * TERA)


@dataclass(slots=True)
class _Layer:
    """Seconds of one layer: computing, and copies and collectives as far as no computing hides them."""

    attention_forward: float
    attention_backward: float
    products: float
    again: float
    elementwise: float
    exchange: float
    ring: float
    weights: float
    launching: float
    copies: float
    wire: float


def step_time(sizes: ModelSizes, job: Job, plan: MemoryPlan, machine: Machine, *, rows: int = 1) -> StepTime:
    """Return the time of a step under `plan`; each sequence group takes `rows` rows, `job.batch` at a time."""
    step = _Step(sizes, job, plan, machine)
    known: dict[tuple[LayerSizes, LayerMode, bool], _Layer] = {}
    layers = []
    for key in zip(sizes.layers, plan.layers, plan.offload, strict=True):
        if key not in known:
            known[key] = step.layer(*key)
        layers.append(known[key])
    head_products, head_bytes = step.head()
    passes = -(-rows // job.batch)
    over = [
        ("attention, forward", sum(x.attention_forward for x in layers), "causal, on the card's fastest kernel"),
        ("attention, backward", sum(x.attention_backward for x in layers), "2.5 times the forward's work"),
        ("matrix products", sum(x.products for x in layers) + head_products, "projections, MLP, head: both ways"),
        ("run again", sum(x.again for x in layers), "forward work that backward repeats"),
        ("element-wise", sum(x.elementwise for x in layers) + head_bytes, "norms, activations, loss, sums over tiles"),
        ("exchange", sum(x.exchange for x in layers), "all-to-alls that no attention hides"),
        ("ring", sum(x.ring for x in layers), "turns that outlast their attention"),
        ("weights", sum(x.weights for x in layers) + step.root_weights(), "gathers and reductions that show"),
        ("launching", sum(x.launching for x in layers), "the device waits for its host, which fetches weights"),
        ("host copies", sum(x.copies for x in layers), "saved tensors' way out and back, where it shows"),
    ]
    terms = [TimeTerm(name, passes * seconds, meaning) for name, seconds, meaning in over]
    terms.append(TimeTerm("optimizer", step.optimizer(), f"{job.optimizer}, one step"))
    every = passes * job.batch * job.dp
    return StepTime(
        terms=tuple(term for term in terms if term.seconds > 0),
        tokens=every * job.length,
        flops=model_flops(sizes, {job.length: every}, every * job.length),
        ranks=job.sp * job.ring * job.dp,
        wire_s=passes * sum(x.wire for x in layers),
    )


class _Step:
    """Speeds and bytes that all layers of a step share."""

    def __init__(self, sizes: ModelSizes, job: Job, plan: MemoryPlan, machine: Machine) -> None:
        self.sizes, self.job, self.plan, self.machine = sizes, job, plan, machine
        self.tensors = TensorBytes.of(sizes, job, plan.head_groups)
        self.tiles = -(-job.tokens // plan.mlp_tile)
        self.matmul = machine.device.matmul * TERA
        self.touch = ELEMENTWISE_SHARE * machine.device.bandwidth * GIGA
        self.copy = machine.device.host_copy * GIGA

    def layer(self, layer: LayerSizes, mode: LayerMode, offloaded: bool) -> _Layer:
        forward, backward = self._attention(layer)
        product = self._product(layer)
        weight_passes = 1 if self.sizes.adapters else 2
        again = self._again(layer, mode, product, forward)
        first, second = self._elementwise(layer, mode)
        exchange, ring, wire = self._wires(mode, forward, backward)
        computing = forward + product + first, backward + weight_passes * product + again + second
        moving = self._weights(layer, mode)
        busy = [max(pair) for pair in zip(computing, moving, strict=True)]
        return _Layer(
            attention_forward=forward,
            attention_backward=backward,
            products=(1 + weight_passes) * product,
            again=again,
            elementwise=first + second,
            exchange=exchange,
            ring=ring,
            weights=sum(busy) - sum(computing),
            launching=sum(max(0.0, least - s) for least, s in zip(self._launching(mode), busy, strict=True)),
            copies=self._copies(layer, mode, *computing) if offloaded else 0.0,
            wire=wire,
        )

    def _attention(self, layer: LayerSizes) -> tuple[float, float]:
        size = max(self.sizes.key_size, self.sizes.value_size)
        speed = self.machine.device.attention_speed(size, self.job.length)
        flash = (layer.window is not None and layer.window < self.job.length) or size > WIDEST
        shares = (FLASH_FORWARD, FLASH_BACKWARD) if flash else (1.0, 1.0)
        flops = attention_flops(self.sizes, layer, self.job)
        return (
            flops / (shares[0] * speed.forward * TERA),
            ATTENTION_BACKWARD * flops / (shares[1] * speed.backward * TERA),
        )

    def _product(self, layer: LayerSizes) -> float:
        """Return the seconds of one forward of the layer's matrix products."""
        mlp = 2 * layer.active * self.job.tokens / (EXPERTS_SHARE if layer.experts else 1.0)
        return (2 * layer.attention * self.job.tokens + mlp) / self.matmul

    def _again(self, layer: LayerSizes, mode: LayerMode, product: float, attention: float) -> float:
        left_out = 2 * last_product(layer, self.job) * self.job.tokens / self.matmul
        if mode == "keep":
            share = layer.active / (layer.attention + layer.active)
            return product * share - left_out if self.tiles > 1 or layer.experts else 0.0
        return (2 if mode == "rebuild" else 1) * product + (attention if mode == "recompute" else 0.0) - left_out

    def _elementwise(self, layer: LayerSizes, mode: LayerMode) -> tuple[float, float]:
        """Return the seconds of element-wise work, forward and backward, repeated work included."""
        c, tokens = self.job.compute_bytes, self.job.tokens
        x, wide = self.sizes.hidden * c, layer.width * c
        rotary = 2 * (self.sizes.heads + self.sizes.kv_heads) * self.sizes.key_size * c
        normed = layer.normed * c
        copies = layer.experts_per_token * x
        mlp = (3 if layer.gated else 2) * wide + ROUTED_FORWARD * copies
        # Two norms, two sums into the residual, norms of q and k, rotary embeddings, the activation.
        forward = 10 * x + 2 * normed + rotary + mlp
        # Norms' gradients and the residual's, sums over the three and two products of one input, the activation's.
        backward = 19 * x + 3 * normed + rotary + (6 if layer.gated else 4) * wide + ROUTED_BACKWARD * copies
        again = {"keep": 0, "save": forward, "rebuild": 2 * forward, "recompute": forward}[mode]
        if mode == "keep" and layer.experts:
            again = mlp
        summed = self.tiles * layer.mlp * SUMMED_BYTES if self.tiles > 1 and not self.sizes.adapters else 0
        packed = 2 * exchanged(self.sizes, self.job, mode, self.tensors.groups).total
        first = tokens * forward + packed / 3
        return first / self.touch, (tokens * (backward + again) + summed + 2 * packed / 3) / self.touch

    def _wires(self, mode: LayerMode, forward: float, backward: float) -> tuple[float, float, float]:
        """Return the unhidden seconds of a layer's exchanges and of its ring, and the exchanges' whole time on the wire."""
        job, groups = self.job, self.tensors.groups
        wire = exchanged(self.sizes, job, mode, groups)
        shown = whole = 0.0
        for there, back, attention in (
            (wire.forward_in, wire.forward_out, forward),
            (wire.backward_in, wire.backward_out, backward),
        ):
            total = exchange_s(self.machine, job, there) + exchange_s(self.machine, job, back)
            whole += total
            # The first group's way there and the last one's back have nothing beside them.
            shown += total / groups + max(0.0, total * (groups - 1) / groups - attention)
        ring = [
            max(0.0, on - beside)
            for on, beside in zip(ring_s(self.sizes, job, self.machine), (forward, backward), strict=True)
        ]
        return shown, sum(ring), whole

    def _weights(self, layer: LayerSizes, mode: LayerMode) -> tuple[float, float]:
        """Return the seconds to gather a layer's weights and reduce its gradients, beside forward and beside backward."""
        # The next layer's collectives run beside this layer's work. Rebuilding gathers a third time.
        if not self.job.gathers:
            return 0.0, 0.0
        gather, reduce = self._moved(layer.parameters)
        return gather, gather * (2 if mode == "rebuild" else 1) + reduce

    def _moved(self, parameters: int) -> tuple[float, float]:
        """Return the seconds to gather so many weights, and to reduce their gradients in fp32, host copies included."""
        job = self.job
        trained = 0 if self.sizes.adapters else parameters
        gather = gather_s(self.machine, job, parameters * job.compute_bytes)
        gather += parameters * job.weight_bytes / job.shards / self.copy if job.weights_on_host else 0.0
        reduce = gather_s(self.machine, job, trained * FP32) + copies_s(self.machine, job, trained * FP32)
        reduce += trained * job.gradient_bytes / job.shards / self.copy if job.gradients_on_host else 0.0
        return gather, reduce

    def _launching(self, mode: LayerMode) -> tuple[float, float]:
        """Return the least seconds to launch a layer's two passes where its weights come from the host."""
        if not (self.job.gathers and self.job.weights_on_host):
            return 0.0, 0.0
        again = {"keep": 0, "save": 1, "rebuild": 2, "recompute": 1}[mode]
        groups = (self.plan.head_groups - 1) * LAUNCH_GROUP
        return LAUNCH_FORWARD + groups, LAUNCH_BACKWARD + groups + again * LAUNCH_AGAIN

    def _copies(self, layer: LayerSizes, mode: LayerMode, forward: float, backward: float) -> float:
        moved = sum(saved(self.tensors, layer, mode, tiled=self.tiles > 1)) / self.copy
        return max(0.0, moved - forward) + max(0.0, moved - backward)

    def root_weights(self) -> float:
        """Return the seconds of collectives that nothing hides: the first gathers and the last reduction."""
        root = self.sizes.root_parameters
        if not self.job.gathers:
            return 0.0
        gather, _ = self._moved(root + self.sizes.layers[0].parameters)
        _, reduce = self._moved(root)
        return 2 * gather + reduce

    def head(self) -> tuple[float, float]:
        """Return the seconds of the head's matrix products and of the loss's element-wise work, both ways."""
        job, sizes = self.job, self.sizes
        passes = 2 if sizes.adapters else 3
        tiles = -(-job.tokens // self.plan.loss_tile)
        # Products are added to the sum as they are made: it alone is read and written.
        summed = 0 if sizes.adapters else tiles * sizes.embedding * 2 * FP32
        touched = 3 * job.tokens * sizes.vocabulary * job.compute_bytes + summed
        return passes * 2 * sizes.embedding * job.tokens / self.matmul, touched / self.touch

    def optimizer(self) -> float:
        """Return the seconds of the optimizer step, which memory bandwidth bounds."""
        job = self.job
        if job.optimizer == "none":
            return 0.0
        # Weights and moments are read and written, gradients read; a second time for their norm.
        each = 4 * job.gradient_bytes + 2 * optimizer_bytes(job)
        return self.sizes.trainable / job.shards * each / (HOST_STEP if job.optimizer_on_host else self.touch)
