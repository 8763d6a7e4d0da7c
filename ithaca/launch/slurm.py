"""The rank of this process in a Slurm job step, from the environment variables that `srun` sets.

Ranks are numbered node by node, so that neighbouring ranks share a machine however Slurm distributes its tasks.
Functions of a mapping: no process is started, and Slurm's own tools are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ithaca.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a job step: the step's nodes, their numbers of tasks, this task's node and its number on the node."""

    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    node: int
    local: int
    port: int

    @property
    def rank(self) -> int:
        return sum(self.counts[: self.node]) + self.local

    @property
    def world(self) -> int:
        return sum(self.counts)

    def variables(self) -> dict[str, str]:
        """Return the launch variables that torch.distributed reads."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.local,
            "LOCAL_WORLD_SIZE": self.counts[self.node],
            "MASTER_PORT": self.port,
        }
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": self.hosts[0]}

    def only(self, chosen: Sequence[str]) -> Task | None:
        """Return the task as one of a step of the `chosen` nodes alone; None if its node is not chosen."""
        unknown = [host for host in chosen if host not in self.hosts]
        if unknown:
            raise ConfigError(f"--hosts names {', '.join(unknown)}, but this job has {', '.join(self.hosts)}")
        kept = [index for index, host in enumerate(self.hosts) if host in chosen]
        if self.node not in kept:
            return None
        hosts, counts = tuple(self.hosts[i] for i in kept), tuple(self.counts[i] for i in kept)
        return Task(hosts, counts, kept.index(self.node), self.local, self.port)


def read_task(environment: Mapping[str, str]) -> Task | None:
    """Return the task of this process; None outside of `srun`."""
    if "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return None
    if "SLURM_STEP_ID" not in environment:
        # A batch script has SLURM_PROCID too, but runs once for the whole job.
        _check_alone(environment)
        return None
    hosts = expand_hosts(_first(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))
    counts = expand_counts(_first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(hosts) != len(counts):
        raise ConfigError(f"Slurm names {len(hosts)} nodes but tasks for {len(counts)}: start with `srun`, or torchrun")
    job, step = int(environment.get("SLURM_JOB_ID", "0")), environment.get("SLURM_STEP_ID", "0")
    # Below the ports that systems assign themselves; each step of a job has another one.
    port = 10_000 + (job * 61 + (int(step) if step.isdigit() else 0)) % 20_000
    return Task(hosts, counts, int(environment["SLURM_NODEID"]), int(environment["SLURM_LOCALID"]), port)


def _check_alone(environment: Mapping[str, str]) -> None:
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    if nodes > 1:
        raise ConfigError(f"started once in a job of {nodes} nodes: write `srun` before `ithaca` in the batch script")


def _first(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if name in environment:
            return environment[name]
    raise ConfigError(f"Slurm's {names[0]} is not set: start with `srun`, or with torchrun")


def expand_counts(text: str) -> tuple[int, ...]:
    """Return `2(x3),1` as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"Slurm's tasks per node {text!r} cannot be read: start with torchrun instead")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return `gpu[01-03,7],login` as gpu01, gpu02, gpu03, gpu7, login."""
    # Split at commas outside of brackets.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return tuple(host for part in parts for host in _expand(part))


def _expand(pattern: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], _expand(pattern[found.end() :])
    hosts = []
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        hosts += [f"{before}{number:0{len(first)}d}{rest}" for number in numbers for rest in after]
    return hosts
