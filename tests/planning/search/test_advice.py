"""What a refusal proposes fits, and what more would give is what a plan for more gives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.machine.hardware import find_device
from ithaca.planning.search.advice import gains, machine_for, refusal
from ithaca.planning.search.best_mesh import best_options
from ithaca.planning.search.longest import fits_any, longest_length
from ithaca.planning.search.phrases import show_gpus, show_length, show_used
from ithaca.planning.search.request import PlanRequest
from tests.planning.machines import machine
from tests.planning.models import B1, B8, K

SHORT = PlanRequest(B8, machine("A100-80GB", gpus=2, host=60))


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
    # Host memory that was given stays what a node has.
    assert f"--gpus {gpus}xA100-80GB, 120 GB of host memory a node as now" in message
    more = replace(machine("A100-80GB", int(gpus), int(nodes or 1)), host_memory=SHORT.machine.host_memory)
    assert best_options(replace(SHORT, machine=more), length)
    shorter = int(re.findall(r"--length (\d+)k", message)[0]) * K
    assert fits_any(SHORT, shorter)
    assert not fits_any(SHORT, shorter + K)


def test_the_term_to_blame_is_named() -> None:
    assert "'optimizer state', 59.8 GiB" in str(refusal(PlanRequest(B8, machine("RTX-4090", gpus=1, host=64)), 8 * K))
    assert "'saved on the device'" in str(refusal(PlanRequest(B8, machine(host=1)), 8 * 1024 * K))


def test_adapters_and_larger_cards_are_proposed() -> None:
    message = str(refusal(PlanRequest(B8, machine("RTX-4090", gpus=1, host=64)), 8 * K))
    assert "--tune lora" in message
    card = re.findall(r"--gpus 1x([\w-]+)$", message)[0]
    assert find_device(card).memory > find_device("RTX-4090").memory


def test_what_was_asked_for_is_blamed_first() -> None:
    request = PlanRequest(B8, machine(), sp=1, optimizer="adamw", on_host=False)
    message = str(refusal(request, 1024 * K))
    assert "leave --sp to the plan" in message
    assert "more than" not in message
    ranks = PlanRequest(B8, machine(nodes=4, host=1))
    assert "More than 32 ranks, one a head, need a ring" in str(refusal(ranks, 2**27))


def test_cuts_that_cannot_be() -> None:
    error = refusal(PlanRequest(B8, machine(), sp=3), K)
    assert isinstance(error, MeshError)
    assert "sp=3 over 8 GPUs and 32 heads" in str(error)
    assert "1, 2, 4, 8" in str(error)
    assert "batch=3" in str(refusal(PlanRequest(B8, machine(), sp=1, batch=3), K))


def test_gains_are_what_a_plan_for_more_gives() -> None:
    request = PlanRequest(B1, replace(machine(gpus=2, host=200), usual_host=True))
    now = longest_length(request)
    found = dict(gains(request, now))
    assert found["twice the GPUs"] == longest_length(PlanRequest(B1, machine(gpus=4, host=200))) > 1.3 * now
    third = longest_length(replace(request, machine=replace(request.machine, gpus=3)))
    assert found["one more GPU on the same host"] == third >= now
    richer = longest_length(replace(request, machine=replace(request.machine, host_memory=800 * 10**9)))
    assert found["twice the host memory"] == richer
    assert "one more node" in dict(gains(PlanRequest(B1, machine(nodes=2)), K))


def test_gains_keep_what_was_given() -> None:
    request = PlanRequest(B1, machine(gpus=2, host=100), sp=2, batch=1)
    now = longest_length(request)
    found = dict(gains(request, now))
    # Two ranks a row are all that was asked for, whatever there is of them.
    assert found["one more GPU on the same host"] == found["twice the GPUs on the same host"] == now
    assert found["twice the host memory"] == longest_length(replace(request, machine=machine(gpus=2, host=200)))


def test_more_cards_keep_what_was_asked_for_or_say_so() -> None:
    wide = PlanRequest(B8, machine("A100-80GB", gpus=2, host=200), sp=1)
    assert "--gpus 4xA100-80GB without --sp, 400 GB of host memory a node as now" in str(refusal(wide, 1000 * K))
    rows = PlanRequest(B8, machine("A100-80GB", gpus=2, host=60), batch=2)
    assert "without" not in str(refusal(rows, 400 * K))


def test_a_speed_that_is_wanted_finds_its_cards() -> None:
    request = PlanRequest(B8, machine(gpus=4))
    now = best_options(request, 64 * K)[0]
    target = 3 * now.time.tokens_per_second
    found = machine_for(request, now, target)
    assert found is not None
    assert best_options(replace(request, machine=found[0]), 64 * K)[0].time.tokens_per_second >= target
    assert 8 < found[0].world <= 16
    assert found[1] == ""
    assert machine_for(request, now, 1e12) is None


def test_a_speed_is_reached_with_what_was_asked_for_or_it_is_said() -> None:
    given = PlanRequest(B8, machine(gpus=4), sp=2, batch=2)
    now = best_options(given, 64 * K)[0]
    kept = machine_for(replace(given, batch=None), now, 3 * now.time.tokens_per_second)
    assert kept is not None
    assert kept[1] == ""
    # Two rows are at most two groups.
    freed = machine_for(given, now, 8 * now.time.tokens_per_second)
    assert freed is not None
    assert freed[1] == " without --sp and --batch"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(1024, "1k"), (2**20, "1M"), (3 * 2**19, "1.5M"), (2352 * K, "2352k"), (1000, "1000"), (2**27, "128M")],
)
def test_lengths_are_written_as_they_are_read(tokens: int, text: str) -> None:
    assert show_length(tokens) == text


def test_machines_are_written_as_they_are_read() -> None:
    assert show_gpus(machine(nodes=2)) == "--gpus 8xH100 --nodes 2"
    assert show_gpus(machine("A100-40GB", gpus=1)) == "--gpus 1xA100-40GB"
    # Typed after the two nodes that were asked for, one node must be said.
    assert show_gpus(machine(), machine(gpus=2, nodes=2)) == "--gpus 8xH100 --nodes 1"


def test_idle_cards_are_named() -> None:
    assert show_used(machine(), machine()) == ""
    assert show_used(machine(gpus=9), machine()) == " on 8 of 9 GPUs"
    assert show_used(machine(nodes=5), machine(gpus=7, nodes=4)) == " on 28 of 40 GPUs, 7 in each of 4 nodes"
