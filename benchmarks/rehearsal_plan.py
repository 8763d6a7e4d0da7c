"""Prediction of today's planner for the cells of rehearsals.json, recomputed from the job and the plan that ran.

The measurements stay; the prediction changes with every change of `ithaca/planning`. A cell whose job would be
planned otherwise today is to be run again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.rehearsal_cells import EXPERT_LAYERS, EXPERTS, Cell
from ithaca.cli.plan_inputs import read_machine
from ithaca.planning.machine.hardware import DEVICES, find_device
from ithaca.planning.memory_plan import Job, MemoryPlan
from ithaca.planning.model.known_models import find_model, known_config, read_config
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.choose import choose_plan
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.planning.terms.step_time import step_time


def planned_anew(of: Cell) -> Cell:
    """The cell with what the plan says of it today, and whether today's plan would be the one that ran."""
    if of["outcome"] != "done":
        return of
    said, sizes = of["predicted"], sizes_of(of["model"])
    job, plan = Job(**said["job"]), plan_of(said["plan"])
    memory = memory_of(sizes, job, plan)
    device = sum(term.device_bytes for term in memory.allocated)
    card = of["machine"]
    machine = read_machine(f"{card['gpus']}x{card['device']}", card["nodes"], None, None, None)
    # The table's card, whatever was calibrated on this machine.
    machine = replace(machine, device=find_device(card["device"], DEVICES))
    compute, step = (
        step_time(sizes, job, plan, each, rows=of["rows"]).seconds for each in (machine.with_free_links, machine)
    )
    said = said | {"device_bytes": device, "reserved": memory.device_bytes, "host_bytes": memory.host_bytes}
    anew = of | {
        "predicted": said | {"compute_s": compute, "step_s": step},
        "memory_error": device / of["peak"] - 1,
        "planned_so_today": choose_plan(sizes, job, *said["budgets"]) == plan,
    }
    # Without a GPU there is no time to compare with.
    if of["compute_s"] is not None:
        anew |= {"step_s": of["compute_s"] + step - compute, "time_error": compute / of["compute_s"] - 1}
    return anew


def plan_of(kept: dict[str, Any]) -> MemoryPlan:
    """From JSON, where tuples are lists."""
    return MemoryPlan(**{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})


def sizes_of(model: str) -> ModelSizes:
    known = read_config(model, experts_config()) if model == "experts" else find_model(model)
    assert known is not None, model
    return known.sizes


def experts_config() -> dict[str, Any]:
    """A mixture of experts that fits one card with its optimizer."""
    config = known_config(EXPERTS)
    assert config is not None
    return config | {"num_hidden_layers": EXPERT_LAYERS, "architectures": ["Qwen3MoeForCausalLM"]}
