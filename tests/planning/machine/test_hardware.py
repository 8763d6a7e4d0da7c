"""Cards are found by what torch calls them, and never by half a word."""

import pytest

from ithaca.constants import GIB
from ithaca.errors import UnsupportedError
from ithaca.planning.machine.hardware import DEVICES, H200, LINKS, find_device, find_link


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("a100-80", "A100-80GB"),
        ("h100", "H100"),
        ("RTX4090", "RTX-4090"),
    ],
)
def test_a_card_is_found(said: str, name: str) -> None:
    assert find_device(said).name == name


def test_every_card_is_found_by_its_own_name_and_has_a_known_link() -> None:
    for device in DEVICES:
        assert find_device(device.name) is device
        assert find_link(device.link).name == device.link


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ("A100", "A100-40GB, A100-80GB"),
        ("H20", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090"),
        ("toaster", "MI300X"),
    ],
)
def test_another_card_is_refused_with_the_nearest(said: str, near: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        find_device(said)
    assert near in str(raised.value)
    assert said in str(raised.value)


def test_measured_figures_are_marked() -> None:
    assert [device.name for device in DEVICES if device.measured] == ["H200"]
    assert not any(link.measured for link in LINKS)
    assert 139 * GIB < H200.memory < 140 * GIB
    assert H200.attention_speed(128).forward == 606
    assert H200.attention_speed(80).backward == 428
    assert H200.attention_speed(192).backward == 523


def test_links() -> None:
    assert find_link("nvlink4").speed == 450
    with pytest.raises(UnsupportedError, match="InfiniBand NDR"):
        find_link("InfiniBand NDDR")
