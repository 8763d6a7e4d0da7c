"""What travels between ranks in a step, in bytes and in seconds: exchanges, the ring, weights and gradients.

Bytes are those of one rank, its largest share; the exchange's are what `tests/attention/test_exchange.py` counts on the
wire. Seconds take each link at `LINK_SHARE` of its data sheet. sp is the innermost axis, so a sequence group fills a
node before it reaches into the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ithaca.planning.machine.hardware import Device, Link
from ithaca.planning.memory_plan import Job, LayerMode
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import FP32

# What large collectives usually reach of a link's speed; not measured here.
LINK_SHARE = 0.8
# Starting one collective, whatever it carries.
COLLECTIVE_S = 30e-6
_INSTANT = Link("none", 1e12, between_nodes=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """`nodes` machines of `gpus` cards each; `host_memory` of one node, in bytes. `link` inside, `network` between.

    `usual_host`: nobody said how much host memory a node has, so a node of other cards or of more has what is usual there.
    """

    device: Device
    gpus: int
    nodes: int
    host_memory: int
    link: Link
    network: Link
    usual_host: bool = False

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def instant(self) -> Machine:
        """The same with links that take no time, to tell computing from what travels."""
        return replace(self, link=_INSTANT, network=_INSTANT)

    def with_cards(self, gpus: int, nodes: int, device: Device | None = None) -> Machine:
        """Another number or kind of cards; host memory that was given stays what a node has."""
        device = device or self.device
        host = gpus * device.host_memory if self.usual_host else self.host_memory
        return replace(self, device=device, gpus=gpus, nodes=nodes, host_memory=host)

    def __str__(self) -> str:
        cards = f"{self.gpus}x{self.device.name}"
        return cards if self.nodes == 1 else f"{self.nodes} nodes of {cards}"


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that one rank sends to others in a layer's exchanges: before and after attention, forward and backward."""

    forward_in: int
    forward_out: int
    backward_in: int
    backward_out: int

    @property
    def total(self) -> int:
        return self.forward_in + self.forward_out + self.backward_in + self.backward_out


def exchanged(sizes: ModelSizes, job: Job, mode: LayerMode, groups: int) -> Wire:
    """One layer's exchanges under `mode`. Backward brings q, k, v again unless they were kept as they arrived."""
    if job.sp == 1:
        return Wire(0, 0, 0, 0)
    key, value, c = sizes.key_size, sizes.value_size, job.compute_bytes
    elsewhere = job.tokens * c * (job.sp - 1) // job.sp
    qkv = elsewhere * (sizes.heads * key + sizes.split(job.sp).kv_copies * (key + value))
    out = elsewhere * sizes.heads * value
    again = (0, 0) if mode != "recompute" else (qkv, out)
    back = out if mode == "keep" and groups == 1 else qkv + 2 * out
    return Wire(qkv, out, back + again[0], qkv + again[1])


def exchange_s(machine: Machine, job: Job, sent: int) -> float:
    """One all-to-all over a sequence group's Ulysses ranks in which a rank sends `sent` bytes to others."""
    if job.sp == 1 or not sent:
        return 0.0
    away = max(0, job.sp - machine.gpus) / (job.sp - 1)
    return COLLECTIVE_S + max(sent * (1 - away) / _speed(machine.link), sent * away / _speed(machine.network))


def ring_s(sizes: ModelSizes, job: Job, machine: Machine) -> tuple[float, float]:
    """Seconds on the wire of one layer's turns, forward (k, v) and backward (k, v and their gradients in fp32)."""
    if job.ring == 1:
        return 0.0, 0.0
    _, kv_heads = sizes.split(job.sp).most
    block = job.whole * kv_heads * (sizes.key_size + sizes.value_size)
    inside = job.sp * job.ring <= machine.gpus
    speed = _speed(machine.link if inside else machine.network)
    turns = job.ring - 1
    forward = turns * (block * job.compute_bytes / speed + COLLECTIVE_S)
    return forward, turns * (block * (job.compute_bytes + FP32) / speed + COLLECTIVE_S)


def gather_s(machine: Machine, job: Job, size: int) -> float:
    """Every rank of a copy of the weights gets all `size` bytes of it; a reduction to shards takes as long."""
    shards = job.shards
    if shards == 1:
        return 0.0
    inside = size * (shards - 1) / shards / _speed(machine.link)
    nodes = -(-shards // machine.gpus)
    between = size * (nodes - 1) / nodes / (min(shards, machine.gpus) * _speed(machine.network))
    return COLLECTIVE_S + max(inside, between)


def copies_s(machine: Machine, job: Job, size: int) -> float:
    """A rank's shard, of `size` bytes over all, summed over the copies of the weights."""
    copies = job.world // job.shards
    if copies == 1:
        return 0.0
    inside = job.world <= machine.gpus
    speed = _speed(machine.link if inside else machine.network)
    return COLLECTIVE_S + 2 * (copies - 1) / copies * size / job.shards / speed


def _speed(link: Link) -> float:
    """Bytes a second."""
    return LINK_SHARE * link.speed * 1e9
