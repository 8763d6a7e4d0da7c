"""The verb `plan`: memory, speed and settings of a run before it starts. No GPU and no torch; an answer within a second."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ithaca.config.schema import RunSettings
    from ithaca.planning.model.known_models import KnownModel
    from ithaca.planning.search.best_mesh import Compared, Option
    from ithaca.planning.search.request import PlanRequest

LORA_RANK = 16
NO_FILE = "-"


def plan(
    model: str = typer.Option("", help="A name, a folder or a config.json: Qwen/Qwen3-8B, llama-3.1-8b, ./my-model."),
    length: str = typer.Option("128k", help="Tokens of a row, 128k or 1M; `max` for the longest that fits."),
    gpus: str = typer.Option("8xH100", help="Cards of one node: 8xH100, 4xA100-80GB, RTX-4090."),
    nodes: int | None = typer.Option(None, help="How many such nodes."),
    host_memory: str | None = typer.Option(None, help="Host memory of one node: 1T, 512GB, 960GiB."),
    tune: str = typer.Option("full", help="full or lora."),
    lora_rank: int | None = typer.Option(None, help=f"Rank of the adapters with --tune lora, {LORA_RANK} if left out."),
    batch: int | None = typer.Option(None, help="Rows a step over all sequence groups; one for each if left out."),
    sp: int | None = typer.Option(None, help="GPUs that share one row; the best if left out."),
    optimizer: str | None = typer.Option(
        None, help="adamw, adamw8bit or bf16_sr; the most exact that fits if left out."
    ),
    precision: str | None = typer.Option(None, help="mixed (fp32 weights, bf16 computing) or bf16."),
    headroom: float = typer.Option(0.25, help="Share of device memory left free; of host memory at least 0.25."),
    host_headroom: float | None = typer.Option(None, help="Share of host memory left free; --headroom's if left out."),
    target_tok_s: float | None = typer.Option(None, help="Prints how many of these GPUs reach this throughput."),
    tokens: str | None = typer.Option(None, help="Tokens to train on, 2B: hours and GPU-hours."),
    price: float | None = typer.Option(None, help="Price of a GPU-hour: the cost."),
    link: str | None = typer.Option(None, help="What joins cards of a node: 'NVLink 4', 'PCIe 5'."),
    network: str | None = typer.Option(None, help="What joins nodes: 'InfiniBand NDR', 'Ethernet 100G'."),
    compare: bool = typer.Option(
        False, help="Table every mesh (dp x sp) of the GPUs: longest length, speed, exchanges."
    ),
    spec: Path | None = typer.Option(None, help="Write a one-page summary in Markdown to this file."),
    write: str = typer.Option("run.yaml", help="File the run is written to, for `ithaca train`; `-` for none."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, and write nothing."),
    calibrate: bool = typer.Option(False, help="Measure this machine's GPU once; its own figures count from then on."),
) -> None:
    """Predict memory, speed and settings of a run without a GPU; write run.yaml to train with."""
    if calibrate:
        _calibrate()
    if not model:
        if calibrate:
            return
        from ithaca.errors import ConfigError

        raise ConfigError("--model is missing: name the model to plan for, such as --model Qwen/Qwen3-8B")
    from ithaca.cli.plan_inputs import read_machine, read_model, read_tokens
    from ithaca.planning.search.request import LEAST_HEADROOM, PlanRequest

    known = read_model(model)
    rank = _rank(_one_of("--tune", tune, ("full", "lora")), lora_rank)
    sizes = known.sizes if rank is None else known.sizes.with_lora(rank)
    request = PlanRequest(
        sizes,
        read_machine(gpus, nodes, host_memory, link, network),
        headroom=_share("--headroom", headroom),
        host_left=None if host_headroom is None else _share("--host-headroom", host_headroom, LEAST_HEADROOM),
        batch=_positive("--batch", batch),
        sp=_positive("--sp", sp),
        optimizer=_one_of("--optimizer", optimizer, ("adamw", "adamw8bit", "bf16_sr")),
        precision=_one_of("--precision", precision, ("mixed", "bf16")),
    )
    _together(request)
    from ithaca.report.plan_files import run_of

    total = None if tokens is None else read_tokens(tokens)
    _amounts(price, target_tok_s, tokens)
    option = _chosen(request, length, known)
    run = run_of(known, request, option, tokens=total, lora_rank=rank)
    facts = _facts(request, option, known, run, total, price, target_tok_s)
    reach = [(label, min(tokens, known.longest_row or tokens)) for label, tokens in _reach(request, option)]
    rows = _compared(request, option) if compare else None
    if as_json:
        typer.echo(json.dumps(_as_json(request, option, known, reach, facts, rows), indent=1))
        return
    _show(request, option, facts, reach, rows)
    _write(request, option, run, facts, spec, write)


def _rank(tune: str | None, given: int | None) -> int | None:
    """Return the rank of the adapters; None if there are none."""
    if tune == "lora":
        return _positive("--lora-rank", given) or LORA_RANK
    if given is not None:
        from ithaca.errors import ConfigError

        raise ConfigError(f"--lora-rank {given} is of adapters: add --tune lora")
    return None


def _facts(
    request: PlanRequest,
    option: Option,
    known: KnownModel,
    run: RunSettings,
    tokens: int | None,
    price: float | None,
    target: float | None,
) -> dict[str, str]:
    """Return the plan in a few lines, with its cautions."""
    from ithaca.report.plan_page import cost_of, facts_of

    facts = facts_of(request, option, known.name)
    facts |= {} if tokens is None else {"cost": cost_of(request, option, tokens, price)}
    facts |= {} if target is None else {"target": _target(request, option, target)}
    return facts | _cautions(known, run)


def _reach(request: PlanRequest, option: Option) -> list[tuple[str, int]]:
    """Return the longest rows: on this mesh, with any settings, and with a little more of one thing."""
    from ithaca.planning.search.advice import gains
    from ithaca.planning.search.best_mesh import longest_on_mesh
    from ithaca.planning.search.longest import Longest, longest_length, longest_of_all
    from ithaca.planning.search.meshes import SubMesh
    from ithaca.planning.search.phrases import show_used
    from ithaca.planning.search.request import recipes

    used = replace(request, machine=option.machine)
    here = longest_on_mesh(used, option.recipe, option.degrees, option.job.length)
    best = longest_of_all(request)
    if best is None or best.length < here:
        best = Longest(here, SubMesh(used, option.degrees), option.recipe)
    takes = f"{best.mesh.degrees}{show_used(request.machine, best.mesh.request.machine)}, {best.recipe}"
    known = [("longest that fits on this mesh", here), (f"longest with any settings: {takes}", best.length)]
    exact = next(recipes(request))[0]
    if exact.numerics != best.recipe.numerics:
        # The user judges whether the length is worth less exact numerics.
        length = longest_length(replace(request, optimizer=exact.optimizer, precision=exact.precision))
        known += [(f"longest with {exact.numerics}: --optimizer {exact.optimizer}", length)] if length else []
    return [*known, *gains(request, best.length)]


def _compared(request: PlanRequest, option: Option) -> list[Compared]:
    from ithaca.planning.search.best_mesh import compare

    return compare(request, option)


def _chosen(request: PlanRequest, length: str, known: KnownModel) -> Option:
    from ithaca.cli.plan_inputs import read_length
    from ithaca.errors import ConfigError
    from ithaca.planning.search.advice import refusal
    from ithaca.planning.search.best_mesh import best_options
    from ithaca.planning.search.longest import longest_of_all

    if length.strip().lower() == "max":
        best = longest_of_all(request)
        if best is None:
            raise refusal(request, 1024)
        tokens = min(best.length, known.longest_row or best.length)
    else:
        tokens = read_length(length)
    if known.longest_row is not None and tokens > known.longest_row:
        raise ConfigError(
            f"--length {length}: {known.kind} has learned positions up to {known.longest_row:,}, which no rope stretches: use "
            f"--length {known.longest_row}"
        )
    options = best_options(request, tokens)
    if not options:
        raise refusal(request, tokens)
    return options[0]


def _show(
    request: PlanRequest,
    option: Option,
    facts: dict[str, str],
    reach: list[tuple[str, int]],
    rows: list[Compared] | None,
) -> None:
    from ithaca.launch.terminal import print_page
    from ithaca.report.plan_page import comparison, page, verdict

    more: list[Table | str] = [] if rows is None else ["", comparison(option, rows), verdict(request, option, rows)]
    print_page(page(facts, request, option, reach), *more)


def _write(
    request: PlanRequest, option: Option, run: RunSettings, facts: dict[str, str], spec: Path | None, write: str
) -> None:
    from ithaca.report.plan_files import rehearsal, spec_of, write_run, writing

    if spec is not None:
        title = f"{run.model.name} at {option.job.length:,} tokens on {request.machine}"
        with writing("--spec", spec):
            spec.parent.mkdir(parents=True, exist_ok=True)
            spec.write_text(spec_of(title, facts, option, request), encoding="utf-8")
        typer.echo(f"\n{spec}: the summary")
    if write == NO_FILE:
        return
    with writing("--write", Path(write)):
        written = write_run(Path(write), run, option.machine)
    if written:
        typer.echo(f"\n{write}: the run; name your documents in it, then: ithaca train {write}")
        if option.machine.nodes > 1:
            typer.echo(f"one rank of it, on one GPU or none: {rehearsal(Path(write), option.machine)}")
    else:
        typer.echo(f"\n{write} says something else and was left alone: --write another.yaml")


def _target(request: PlanRequest, option: Option, target: float) -> str:
    from ithaca.planning.search.advice import machine_for
    from ithaca.planning.search.phrases import show_gpus

    if option.time.tokens_per_second >= target:
        return f"{target:,.0f} tokens/s: reached"
    found = machine_for(request, option, target)
    if found is None:
        return f"{target:,.0f} tokens/s: not reached by any number of these cards that was tried"
    machine, without = found
    return f"{target:,.0f} tokens/s: {show_gpus(machine, request.machine)}{without} would do"


def _cautions(known: KnownModel, run: RunSettings) -> dict[str, str]:
    """Return warnings about a run: exactness of the architecture, jumps of context length."""
    from ithaca.planning.model.architectures import verdicts
    from ithaca.training.schedule import advise_between

    found = verdicts().get(known.kind)
    cautions = dict(known.cautions)
    if found is None or found["verdict"] != "exact":
        reason = "not among the measured architectures" if found is None else found["reason"]
        cautions["exactness"] = f"{known.kind or 'this architecture'}: {reason}; see `ithaca models`"
    if warnings := advise_between(known.positions or 0, run.stages):
        cautions["stages"] = "; ".join(warnings)
    return cautions


def _as_json(
    request: PlanRequest,
    option: Option,
    known: KnownModel,
    reach: list[tuple[str, int]],
    facts: dict[str, str],
    rows: list[Compared] | None,
) -> dict[str, Any]:
    machine = request.machine
    host_budget = replace(request, machine=option.machine).host_budget
    compared = {} if rows is None else {"comparison": [_row_as_json(row) for row in rows]}
    return {
        "model": known.name,
        "parameters": request.sizes.total,
        "length": option.job.length,
        "machine": {"device": machine.device.name, "gpus": machine.gpus, "nodes": machine.nodes}
        | {"host_memory": machine.host_memory, "measured": machine.device.measured},
        "used": {"gpus": option.machine.gpus, "nodes": option.machine.nodes},
        "degrees": option.degrees._asdict(),
        "replicas": option.job.replicas,
        "recipe": asdict(option.recipe),
        "plan": asdict(option.plan),
        "memory": {"moment": option.memory.moment, "terms": [asdict(term) for term in option.memory.terms]}
        | {"device_bytes": option.memory.device_bytes, "host_bytes": option.memory.host_bytes}
        | {"device_budget": request.device_budget, "host_budget": host_budget},
        "time": {"seconds": option.time.seconds, "terms": [asdict(term) for term in option.time.terms]}
        | {"tokens_per_second": option.time.tokens_per_second, "exchange_share": option.time.exchange_share}
        | {"utilisation": option.time.utilisation(machine.device.peak)},
        "reach": dict(reach),
        "facts": facts,
    } | compared


def _row_as_json(row: Compared) -> dict[str, Any]:
    """Return one mesh of `--compare`; figures at the requested length are null where it does not fit."""
    option = row.option
    return {
        "degrees": row.degrees._asdict(),
        "longest": row.longest,
        "chosen": row.chosen,
        "built": row.degrees.ring == 1,
        "seconds": None if option is None else option.time.seconds,
        "tokens_per_second": None if option is None else option.time.tokens_per_second,
        "exchange_share": None if option is None else option.time.exchange_share,
        "device_bytes": None if option is None else option.memory.device_bytes,
    }


def _calibrate() -> None:
    from ithaca.cli.plan_inputs import calibration_file
    from ithaca.machine.calibrate import this_card
    from ithaca.planning.machine.calibrated import write_measured

    measured = this_card()
    write_measured(calibration_file(), measured)
    typer.echo(f"{calibration_file()}: {measured.name}, matrix products {measured.matmul:.0f} TFLOP/s")


def _one_of(option: str, given: Any, allowed: tuple[str, ...]) -> Any:
    from ithaca.errors import ConfigError

    if given is not None and given not in allowed:
        raise ConfigError(f"{option} {given}: choose one of {', '.join(allowed)}")
    return given


def _positive(option: str, given: int | None) -> int | None:
    from ithaca.errors import ConfigError

    if given is not None and given < 1:
        raise ConfigError(f"{option} {given}: at least 1 is needed")
    return given


def _amounts(price: float | None, target: float | None, tokens: str | None) -> None:
    from ithaca.errors import ConfigError

    for option, given in (("--price", price), ("--target-tok-s", target)):
        if given is not None and not 0 < given < float("inf"):
            raise ConfigError(f"{option} {given:g}: a number above 0 is needed")
    if price is not None and tokens is None:
        raise ConfigError("--price is for the cost of so many tokens: give --tokens too, such as --tokens 2B")


def _share(option: str, given: float, least: float = 0) -> float:
    from ithaca.errors import ConfigError

    if not least <= given < 1:
        raise ConfigError(
            f"{option} {given:g}: a share of the memory from {least:g} to below 1, such as 0.25, is needed"
        )
    return given


def _together(request: PlanRequest) -> None:
    from ithaca.errors import ConfigError

    if request.optimizer == "bf16_sr" and request.precision == "mixed":
        raise ConfigError("--optimizer bf16_sr rounds bf16 weights: --precision mixed has none; use bf16")
