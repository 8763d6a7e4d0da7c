"""Machines that plans are made for in these tests."""

from ithaca.planning.machine.hardware import find_device, find_link
from ithaca.planning.terms.traffic import Machine


def machine(
    card: str = "H100", gpus: int = 8, nodes: int = 1, host: int = 200, network: str = "InfiniBand NDR"
) -> Machine:
    """`host` is GB for each card."""
    device = find_device(card)
    return Machine(device, gpus, nodes, host * gpus * 10**9, find_link(device.link), find_link(network))
