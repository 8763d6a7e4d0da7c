"""The cards and links a plan can be made for.

Figures with `measured=True` were measured with this library's own kernels; all others are from data sheets, with
the shares of the peak that an H200 reaches applied to them. Speeds are TFLOP/s of dense bf16, and GB/s (1e9).
Invariant: a name matches a card by whole words, so that a GH200 is never taken for an H200.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from ithaca.constants import GIB
from ithaca.errors import UnsupportedError

# What an H200 reaches of its data sheet's 989 TFLOP/s in matrix products and of its 4,800 GB/s in plain copies.
MATMUL_SHARE, COPY_SHARE = 0.70, 0.887


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """TFLOP/s of causal attention at one head size and, sustained, at one length: long calls meet the power limit."""

    head_size: int
    length: int
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Device:
    """One card. `memory` is what its driver reports, in bytes; `host_copy` is one way, both ways run at once.

    `bandwidth`: bytes that a plain copy in device memory reads and writes. `host_memory`: bytes of host memory that a
    machine usually has for each such card.
    """

    name: str
    words: frozenset[str]
    memory: int
    peak: float
    matmul: float
    attention: tuple[AttentionSpeed, ...]
    bandwidth: float
    host_copy: float
    link: str
    host_memory: int
    measured: bool

    def attention_speed(self, head_size: int, length: int = 65_536) -> AttentionSpeed:
        """Return the speed at the nearest measured head size, interpolated between the measured lengths."""
        size = min((speed.head_size for speed in self.attention), key=lambda each: abs(each - head_size))
        points = sorted((s for s in self.attention if s.head_size == size), key=lambda speed: speed.length)
        length = min(max(length, points[0].length), points[-1].length)
        for low, high in pairwise(points):
            if low.length <= length <= high.length:
                share = math.log(length / low.length) / math.log(high.length / low.length)
                forward = low.forward + share * (high.forward - low.forward)
                backward = low.backward + share * (high.backward - low.backward)
                return AttentionSpeed(size, length, forward, backward)
        return points[0]


@dataclass(frozen=True, slots=True)
class Link:
    """A link between cards: GB/s of one card in one direction."""

    name: str
    speed: float
    between_nodes: bool
    measured: bool = False


H200 = Device(
    name="H200",
    words=frozenset({"h200"}),
    memory=int(139.8 * GIB),
    peak=989.0,
    matmul=690.0,
    attention=(
        AttentionSpeed(64, 65_536, 458.0, 428.0),
        AttentionSpeed(64, 262_144, 441.0, 410.0),
        AttentionSpeed(128, 32_768, 605.0, 540.0),
        AttentionSpeed(128, 65_536, 606.0, 523.0),
        AttentionSpeed(128, 131_072, 547.0, 529.0),
        AttentionSpeed(128, 262_144, 521.0, 535.0),
        AttentionSpeed(128, 1_048_576, 503.0, 531.0),
    ),
    bandwidth=4260.0,
    host_copy=55.0,
    link="NVLink 4",
    host_memory=200 * 10**9,
    measured=True,
)


def _sheet(
    name: str, words: str, gib: float, peak: float, bandwidth: float, host_copy: float, link: str, host: int = 200
) -> Device:
    share = peak / H200.peak
    return Device(
        name=name,
        words=frozenset(words.split()),
        memory=int(gib * GIB),
        peak=peak,
        matmul=peak * MATMUL_SHARE,
        attention=tuple(
            AttentionSpeed(s.head_size, s.length, share * s.forward, share * s.backward) for s in H200.attention
        ),
        bandwidth=bandwidth * COPY_SHARE,
        host_copy=host_copy,
        link=link,
        host_memory=host * 10**9,
        measured=False,
    )


DEVICES = (
    _sheet("A100-40GB", "a100 40", 39.4, 312.0, 1555.0, 25.0, "NVLink 3", host=100),
    _sheet("A100-80GB", "a100 80", 79.2, 312.0, 2039.0, 25.0, "NVLink 3"),
    _sheet("H100", "h100", 79.1, 989.0, 3350.0, 55.0, "NVLink 4"),
    _sheet("H100-PCIe", "h100 pcie", 79.1, 756.0, 2000.0, 55.0, "PCIe 5"),
    _sheet("H100-NVL", "h100 nvl", 93.1, 835.0, 3900.0, 55.0, "NVLink 4"),
    H200,
    _sheet("B200", "b200", 178.4, 2250.0, 8000.0, 55.0, "NVLink 5"),
    _sheet("L40S", "l40s", 44.4, 362.0, 864.0, 25.0, "PCIe 4", host=100),
    _sheet("RTX-4090", "4090", 23.6, 165.0, 1008.0, 25.0, "PCIe 4", host=64),
    _sheet("RTX-5090", "5090", 31.4, 209.0, 1792.0, 55.0, "PCIe 5", host=64),
    _sheet("MI300X", "mi300x", 191.5, 1307.0, 5300.0, 55.0, "Infinity Fabric"),
)
LINKS = (
    Link("NVLink 3", 300.0, between_nodes=False),
    Link("NVLink 4", 450.0, between_nodes=False),
    Link("NVLink 5", 900.0, between_nodes=False),
    Link("Infinity Fabric", 448.0, between_nodes=False),
    Link("PCIe 4", 25.0, between_nodes=False),
    Link("PCIe 5", 50.0, between_nodes=False),
    Link("InfiniBand HDR", 25.0, between_nodes=True),
    Link("InfiniBand NDR", 50.0, between_nodes=True),
    Link("InfiniBand XDR", 100.0, between_nodes=True),
    Link("Ethernet 10G", 1.25, between_nodes=True),
    Link("Ethernet 25G", 3.125, between_nodes=True),
    Link("Ethernet 100G", 12.5, between_nodes=True),
    Link("Ethernet 400G", 50.0, between_nodes=True),
)
# A slice of a card, or a card of that name with other memory and clocks.
_NOT_THE_CARD = frozenset({"mig", "laptop", "mobile"})


def find_device(name: str, devices: Sequence[Device] = DEVICES) -> Device:
    """Return the card called `name`: a name of the table, or of `torch.cuda.get_device_name()`."""
    words = words_of(name)
    found = [device for device in devices if device.words <= words]
    if not found or words & _NOT_THE_CARD:
        near = ", ".join(_nearest(name, words, devices))
        raise UnsupportedError(f"no card {name!r} in the table: nearest are {near}")
    # The most words win: "H100 PCIe" over "H100".
    return max(found, key=lambda device: len(device.words))


def find_link(name: str) -> Link:
    """Return the link called `name`, in any case and with any spaces."""
    plain = {_plain(link.name): link for link in LINKS}
    if _plain(name) not in plain:
        near = get_close_matches(_plain(name), plain, n=3, cutoff=0.3) or list(plain)
        raise UnsupportedError(
            f"no link {name!r} in the table: nearest are {', '.join(plain[key].name for key in near)}"
        )
    return plain[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def words_of(name: str) -> frozenset[str]:
    """Return the lower-case words of a card's name, sizes without their unit."""
    # "80GB", "80G" and "80" are all written, and so is "RTX4090".
    words = re.findall(r"rtx(?=\d)|[a-z0-9]+", name.lower())
    return frozenset(re.sub(r"^(\d+)gi?b?$", r"\1", word) for word in words)


def _nearest(name: str, words: frozenset[str], devices: Sequence[Device]) -> list[str]:
    shared = [device.name for device in devices if device.words & words]
    plain = {_plain(device.name): device.name for device in devices}
    close = [plain[key] for key in get_close_matches(_plain(name), plain, n=3, cutoff=0.4)]
    return shared or close or [device.name for device in devices]
