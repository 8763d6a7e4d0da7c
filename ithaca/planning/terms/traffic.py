"""Traffic between ranks in a step, in bytes and in seconds: exchanges, the ring, weights and gradients.

Bytes are those of the rank with the largest share; `tests/attention/test_exchange.py` counts the exchange's on the wire.
Seconds take each link at `LINK_SHARE` of its data sheet. sp is the innermost axis, so a sequence group fills a
node before it reaches into the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ithaca.planning.machine.hardware import Device, Link
from ithaca.planning.memory_plan import Job, LayerMode
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import FP32

# Share of a link's speed that large collectives usually reach; not measured here.
LINK_SHARE = 0.8
# Seconds to start one collective, whatever its size.
COLLECTIVE_S = 30e-6
_INSTANT = Link("none", 1e12, between_nodes=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster of `nodes` nodes with `gpus` cards each; `host_memory` of one node, in bytes.

    `link` joins cards of a node, `network` joins nodes. `usual_host`: host memory was not given, so nodes of other or of
    more cards have the usual amount for those cards.
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
    def with_free_links(self) -> Machine:
        """The machine with links that take no time, to separate computing from traffic."""
        return replace(self, link=_INSTANT, network=_INSTANT)

    def with_cards(self, gpus: int, nodes: int, device: Device | None = None) -> Machine:
        """Return a machine with another number or kind of cards; host memory that was given stays."""
        device = device or self.device
        host = gpus * device.host_memory if self.usual_host else self.host_memory
        return replace(self, device=device, gpus=gpus, nodes=nodes, host_memory=host)

    def __str__(self) -> str:
        cards = f"{self.gpus}x{self.device.name}"
        return cards if self.nodes == 1 else f"{self.nodes} nodes of {cards}"


@dataclass(frozen=True, slots=True)
class ExchangeTraffic:
    """Bytes that one rank sends in a layer's exchanges: before and after attention, forward and backward."""

    forward_in: int
    forward_out: int
    backward_in: int
    backward_out: int

    @property
    def total(self) -> int:
        return self.forward_in + self.forward_out + self.backward_in + self.backward_out


def exchanged(sizes: ModelSizes, job: Job, mode: LayerMode, groups: int) -> ExchangeTraffic:
    """Return the bytes of one layer's exchanges under `mode`."""
    if job.sp == 1:
        return ExchangeTraffic(0, 0, 0, 0)
    key, value, c = sizes.key_size, sizes.value_size, job.compute_bytes
    elsewhere = job.tokens * c * (job.sp - 1) // job.sp
    qkv = elsewhere * (sizes.heads * key + sizes.split(job.sp).kv_copies * (key + value))
    out = elsewhere * sizes.heads * value
    again = (0, 0) if mode != "recompute" else (qkv, out)
    # Backward exchanges q, k, v again unless they were kept by heads, as they arrived.
    back = out if mode == "keep" and groups == 1 else qkv + 2 * out
    return ExchangeTraffic(qkv, out, back + again[0], qkv + again[1])


def exchange_s(machine: Machine, job: Job, sent: int) -> float:
    """Return the seconds of one all-to-all over the Ulysses ranks in which a rank sends `sent` bytes."""
    if job.sp == 1 or not sent:
        return 0.0
    remote_share = max(0, job.sp - machine.gpus) / (job.sp - 1)
    return COLLECTIVE_S + max(
        sent * (1 - remote_share) / _speed(machine.link), sent * remote_share / _speed(machine.network)
    )


def ring_s(sizes: ModelSizes, job: Job, machine: Machine) -> tuple[float, float]:
    """Return the seconds on the wire of one layer's ring: k, v forward, and with fp32 gradients backward."""
    if job.ring == 1:
        return 0.0, 0.0
    _, kv_heads = sizes.split(job.sp).max_local_heads
    block = job.tokens_during_attention * kv_heads * (sizes.key_size + sizes.value_size)
    inside = job.sp * job.ring <= machine.gpus
    speed = _speed(machine.link if inside else machine.network)
    turns = job.ring - 1
    forward = turns * (block * job.compute_bytes / speed + COLLECTIVE_S)
    return forward, turns * (block * (job.compute_bytes + FP32) / speed + COLLECTIVE_S)


def gather_s(machine: Machine, job: Job, size: int) -> float:
    """Return the seconds of an all-gather of `size` bytes over a copy's ranks; a reduce-scatter takes as long."""
    shards = job.shards
    if shards == 1:
        return 0.0
    inside = size * (shards - 1) / shards / _speed(machine.link)
    nodes = -(-shards // machine.gpus)
    between = size * (nodes - 1) / nodes / (min(shards, machine.gpus) * _speed(machine.network))
    return COLLECTIVE_S + max(inside, between)


def copies_s(machine: Machine, job: Job, size: int) -> float:
    """Return the seconds of an all-reduce over the copies of the weights of one rank's shard of `size` bytes."""
    copies = job.world // job.shards
    if copies == 1:
        return 0.0
    inside = job.world <= machine.gpus
    speed = _speed(machine.link if inside else machine.network)
    return COLLECTIVE_S + 2 * (copies - 1) / copies * size / job.shards / speed


def _speed(link: Link) -> float:
    """Return the bytes a second that collectives reach on a link."""
    return LINK_SHARE * link.speed * 1e9
