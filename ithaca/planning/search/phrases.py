"""The words in which advice names a change, so that the user can type it as it stands, one vocabulary for each door.

    LIBRARY        arguments of `parallelize`
    TRAINER        arguments of `UlyssesConfig`
    RUN_FILE       settings after `ithaca train run.yaml`; a run's stage and `ithaca rehearse` replace a few of them

Options of `ithaca plan` are written by `advice.py`, with lengths and machines as they are shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ithaca.planning.terms.traffic import Machine


class Phrases(NamedTuple):
    """One phrase for each kind of change; functions are given the amount.

    `host` and `device` are given GiB, `budget` an amount such as `38.5GiB`, `free` the names of decisions that would have
    to be left to the plan. `on_host` is None where state cannot be put on the host, `host` where the host is the device.
    """

    on_host: str | None
    host: Callable[[int], str] | None
    sp: Callable[[int], str]
    length: Callable[[int], str]
    budget: Callable[[str], str]
    device: Callable[[int], str] = "{} GiB of device memory".format
    free: Callable[[Sequence[str]], str] = lambda names: "memory='auto'"


LIBRARY = Phrases(
    "on_host='everything'",
    "parallelize(..., host_budget='{}GiB')".format,
    "sp={}".format,
    "length={:,}".format,
    "parallelize(..., memory_budget='{}')".format,
)
TRAINER = Phrases(
    None,
    "UlyssesConfig(..., host_budget='{}GiB')".format,
    "UlyssesConfig(sp_size={})".format,
    "rows of {:,} tokens".format,
    "UlyssesConfig(..., memory_budget='{}')".format,
    free=lambda names: "UlyssesConfig(memory='auto')",
)
RUN_FILE = Phrases(
    "memory.on_host=everything",
    "memory.host_budget={}GiB".format,
    "mesh.sp={}".format,
    "--length {}".format,
    "memory.budget={}".format,
    free=lambda names: " ".join(f"memory.{name}=null" for name in names),
)


def show_length(tokens: int) -> str:
    """Return a length as it is typed, 512k or 1.5M; the number itself where that would not be exact."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens * 100 % size == 0:
            return f"{tokens / size:g}{unit}"
    return str(tokens)


def show_gpus(machine: Machine, instead: Machine | None = None) -> str:
    """Return a machine as it is typed, `--gpus 8xH100 --nodes 2`; one node is named where it is `instead` of several."""
    nodes = f" --nodes {machine.nodes}" if machine.nodes > 1 or (instead is not None and instead.nodes > 1) else ""
    return f"--gpus {machine.gpus}x{machine.device.name}{nodes}"


def show_used(machine: Machine, used: Machine) -> str:
    """Return the part of a machine's GPUs that a plan uses, ` on 8 of 9 GPUs`; empty if it uses all."""
    if used.world == machine.world:
        return ""
    each = f", {used.gpus} in each of {used.nodes} nodes" if used.nodes > 1 else ""
    return f" on {used.world} of {machine.world} GPUs{each}"
