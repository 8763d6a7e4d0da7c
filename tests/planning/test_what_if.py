"""What a refusal proposes fits, and what more would give is what a plan for more gives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.hardware import find_device
from ithaca.planning.mesh_search import Wanted, best_options, longest_of_all
from ithaca.planning.what_if import fits_any, gains, machine_for, refusal, show_gpus, show_length
from tests.planning.machines import machine
from tests.planning.models import B1, B8, K

SHORT = Wanted(B8, machine("A100-80GB", gpus=2, host=60))


def test_every_change_a_refusal_names_fits() -> None:
    length = 400 * K
    assert best_options(SHORT, length) == []
    error = refusal(SHORT, length)
    assert isinstance(error, MemoryPlanError)
    message = str(error)
    assert "409,600 tokens do not fit 2xA100-80GB" in message
    host = int(re.findall(r"--host-memory (\d+)GB a node", message)[0])
    assert fits_any(replace(SHORT, machine=replace(SHORT.machine, host_memory=host * 10**9)), length)
    less = replace(SHORT.machine, host_memory=(host - 64) * 10**9)
    assert not fits_any(replace(SHORT, machine=less), length)
    gpus, nodes = re.findall(r"--gpus (\d+)xA100-80GB(?: --nodes (\d+))?", message)[0]
    more = machine("A100-80GB", int(gpus), int(nodes or 1), host=60)
    assert best_options(replace(SHORT, machine=more), length)
    shorter = int(re.findall(r"--length (\d+)k", message)[0]) * K
    assert fits_any(SHORT, shorter)
    assert not fits_any(SHORT, shorter + K)


def test_the_term_to_blame_is_named() -> None:
    assert "'optimizer state', 59.8 GiB" in str(refusal(Wanted(B8, machine("RTX-4090", gpus=1, host=64)), 8 * K))
    assert "'saved on the device'" in str(refusal(Wanted(B8, machine(host=1)), 8 * 1024 * K))


def test_adapters_and_larger_cards_are_proposed() -> None:
    message = str(refusal(Wanted(B8, machine("RTX-4090", gpus=1, host=64)), 8 * K))
    assert "--tune lora" in message
    card = re.findall(r"--gpus 1x([\w-]+)$", message)[0]
    assert find_device(card).memory > find_device("RTX-4090").memory


def test_what_was_asked_for_is_blamed_first() -> None:
    wanted = Wanted(B8, machine(), sp=1, optimizer="adamw", on_host=False)
    message = str(refusal(wanted, 1024 * K))
    assert "leave --sp and --batch to the plan" in message
    assert "more than" not in message
    ranks = Wanted(B8, machine(nodes=4, host=1))
    assert "More than 32 ranks, one a head, need a ring" in str(refusal(ranks, 2**27))


def test_cuts_that_cannot_be() -> None:
    error = refusal(Wanted(B8, machine(), sp=3), K)
    assert isinstance(error, MeshError)
    assert "sp=3 over 8 GPUs and 32 heads" in str(error)
    assert "1, 2, 4, 8" in str(error)
    assert "batch=3" in str(refusal(Wanted(B8, machine(), sp=1, batch=3), K))


def test_gains_are_what_a_plan_for_more_gives() -> None:
    wanted = Wanted(B1, machine(gpus=2, host=100))
    found = dict(gains(wanted))
    now = longest_of_all(wanted)
    assert now is not None
    assert found["twice the GPUs"] > 1.3 * now[0]
    third = longest_of_all(replace(wanted, machine=replace(wanted.machine, gpus=3)))
    assert third is not None
    assert found["one more GPU on the same host"] == third[0]
    richer = longest_of_all(replace(wanted, machine=replace(wanted.machine, host_memory=400 * 10**9)))
    assert richer is not None
    assert found["twice the host memory"] == richer[0]
    assert "one more node" in dict(gains(Wanted(B1, machine(nodes=2))))


def test_a_speed_that_is_wanted_finds_its_cards() -> None:
    wanted = Wanted(B8, machine(gpus=4))
    now = best_options(wanted, 64 * K)[0]
    target = 3 * now.time.tokens_per_second
    found = machine_for(wanted, now, target)
    assert found is not None
    assert best_options(replace(wanted, machine=found), 64 * K)[0].time.tokens_per_second >= target
    assert 8 < found.world <= 16
    assert machine_for(wanted, now, 1e12) is None


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(1024, "1k"), (2**20, "1M"), (3 * 2**19, "1.5M"), (2352 * K, "2352k"), (1000, "1000"), (2**27, "128M")],
)
def test_lengths_are_written_as_they_are_read(tokens: int, text: str) -> None:
    assert show_length(tokens) == text


def test_machines_are_written_as_they_are_read() -> None:
    assert show_gpus(machine(nodes=2)) == "--gpus 8xH100 --nodes 2"
    assert show_gpus(machine("A100-40GB", gpus=1)) == "--gpus 1xA100-40GB"
