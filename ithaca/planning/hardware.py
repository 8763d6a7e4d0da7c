"""The cards and links a plan can be made for.

Figures with `measured=True` were measured with this library's own kernels; all others are from data sheets, with
the shares of the peak that an H200 reaches applied to them. Speeds are TFLOP/s of dense bf16 and GB/s (1e9).
Invariant: a name matches a card by whole words, so that a GH200 is never taken for an H200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from ithaca.errors import UnsupportedError

GIB = 2**30
# What an H200 reaches of its data sheet's 989 TFLOP/s: matrix products; attention forward / backward by head size.
MATMUL_SHARE = 0.78
ATTENTION_SHARES = ((64, 0.46, 0.43), (128, 0.61, 0.53))


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """TFLOP/s of causal attention at one head size."""

    head_size: int
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Device:
    """One card. `memory` is what its driver reports, in bytes; `host_copy` is one way, both ways run at once."""

    name: str
    words: frozenset[str]
    memory: int
    peak: float
    matmul: float
    attention: tuple[AttentionSpeed, ...]
    host_copy: float
    link: str
    measured: bool

    def attention_speed(self, head_size: int) -> AttentionSpeed:
        """The speed at the head size in the table nearest to `head_size`."""
        return min(self.attention, key=lambda speed: abs(speed.head_size - head_size))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins cards: GB/s of one card in one direction."""

    name: str
    speed: float
    between_nodes: bool
    measured: bool = False


def _sheet(name: str, words: str, gib: float, peak: float, host_copy: float, link: str) -> Device:
    speeds = tuple(
        AttentionSpeed(size, peak * forward, peak * backward) for size, forward, backward in ATTENTION_SHARES
    )
    memory = int(gib * GIB)
    return Device(name, frozenset(words.split()), memory, peak, peak * MATMUL_SHARE, speeds, host_copy, link, False)


H200 = Device(
    name="H200",
    words=frozenset({"h200"}),
    memory=int(139.8 * GIB),
    peak=989.0,
    matmul=773.0,
    attention=(AttentionSpeed(64, 458.0, 428.0), AttentionSpeed(128, 606.0, 523.0)),
    host_copy=55.0,
    link="NVLink 4",
    measured=True,
)
DEVICES = (
    _sheet("A100-40GB", "a100 40", 39.4, 312.0, 25.0, "NVLink 3"),
    _sheet("A100-80GB", "a100 80", 79.2, 312.0, 25.0, "NVLink 3"),
    _sheet("H100", "h100", 79.1, 989.0, 55.0, "NVLink 4"),
    _sheet("H100-PCIe", "h100 pcie", 79.1, 756.0, 55.0, "PCIe 5"),
    _sheet("H100-NVL", "h100 nvl", 93.1, 835.0, 55.0, "NVLink 4"),
    H200,
    _sheet("B200", "b200", 178.4, 2250.0, 55.0, "NVLink 5"),
    _sheet("L40S", "l40s", 44.4, 362.0, 25.0, "PCIe 4"),
    _sheet("RTX-4090", "4090", 23.6, 165.0, 25.0, "PCIe 4"),
    _sheet("RTX-5090", "5090", 31.4, 209.0, 55.0, "PCIe 5"),
    _sheet("MI300X", "mi300x", 191.5, 1307.0, 55.0, "Infinity Fabric"),
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


def find_device(name: str) -> Device:
    """The card called `name`: its name here, or what `torch.cuda.get_device_name()` says."""
    words = _words(name)
    found = [device for device in DEVICES if device.words <= words]
    if not found or words & _NOT_THE_CARD:
        raise UnsupportedError(f"no card {name!r} in the table: nearest are {', '.join(_nearest(name, words))}")
    # The most words win: "H100 PCIe" over "H100".
    return max(found, key=lambda device: len(device.words))


def find_link(name: str) -> Link:
    """The link called `name`, whatever its case and spaces."""
    plain = {_plain(link.name): link for link in LINKS}
    if _plain(name) not in plain:
        near = get_close_matches(_plain(name), plain, n=3, cutoff=0.3) or list(plain)
        raise UnsupportedError(
            f"no link {name!r} in the table: nearest are {', '.join(plain[key].name for key in near)}"
        )
    return plain[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> frozenset[str]:
    """Lower-case words; sizes lose their unit, since "80GB", "80G" and "80" are all written."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(re.sub(r"^(\d+)gi?b?$", r"\1", word) for word in words)


def _nearest(name: str, words: frozenset[str]) -> list[str]:
    shared = [device.name for device in DEVICES if device.words & words]
    plain = {_plain(device.name): device.name for device in DEVICES}
    close = [plain[key] for key in get_close_matches(_plain(name), plain, n=3, cutoff=0.4)]
    return shared or close or [device.name for device in DEVICES]
