"""`ithaca rehearse`: one rank of a cluster's job on this machine's device; its memory and time beside the plan's."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ithaca.cli.plan_inputs import read_machine
from ithaca.constants import CARDS_PER_NODE
from ithaca.launch.terminal import say_loading

if TYPE_CHECKING:
    from ithaca.config.schema import RunSettings
    from ithaca.planning.terms.traffic import Machine

DEFAULT_LENGTH, DEFAULT_WORLD = "128k", 8


def rehearse(
    words: list[str] = typer.Argument(
        None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file, and settings that override it."
    ),
    model: str = typer.Option("", help="Instead of a run file: a name, a folder or a config.json."),
    length: str = typer.Option(
        "", help="Tokens of a row, such as 128k or 1M; those of the run's last stage if left out."
    ),
    world: int | None = typer.Option(None, help="Ranks of the whole job; from --gpus or the run, or 8, if left out."),
    rank: int = typer.Option(0, help="Rank to rehearse, from 0."),
    stage: int | None = typer.Option(None, help="Stage of the run, from 1; the last if left out."),
    layers: str = typer.Option(
        "auto",
        help="Layers to run: `auto`, `all`, or a number by which later runs exceed the first; the rest is derived.",
    ),
    cap: str = typer.Option("", help="Limit on the device's memory, such as 80GB."),
    gpus: str = typer.Option("", help="GPUs of the job, such as H100 or 8xH100; this machine's if left out."),
    link: str | None = typer.Option(None, help="Link between the GPUs of a node, such as 'NVLink 4' or 'PCIe 5'."),
    network: str | None = typer.Option(
        None, help="Network between nodes, such as 'InfiniBand NDR' or 'Ethernet 100G'."
    ),
    host_memory: str | None = typer.Option(None, help="Host memory of one node, such as 1T or 960GiB."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the results to this JSON file."),
) -> None:
    """Run one rank of a job on this machine's device; compare memory and time with the plan's."""
    say_loading("loading torch and transformers")
    from ithaca.cli.run_words import split_words
    from ithaca.config.schema import load_run
    from ithaca.models.files.pretrained import change_config
    from ithaca.report.plan_files import check_report, writing

    file, overrides = split_words(words)
    run = load_run(file, [*overrides, *([f"model.name={json.dumps(model)}"] if model else [])])
    ranks = (counted_cards(gpus) or _default_world(run)) if world is None else world
    _check_numbers(ranks, rank, stage, run)
    if json_file is not None:
        with writing("--json", json_file):
            json_file.parent.mkdir(parents=True, exist_ok=True)
        check_report(json_file)
    layer_count = _read_layers(layers)
    limit = _read_cap(cap) if cap else None
    config = change_config(read_model_config(run.model.name, run.model.revision), run.model.config)
    if length or (model and file is None):
        run = with_one_stage(run, length or DEFAULT_LENGTH, ranks, config)
    from ithaca.rehearse.prediction import RehearsalRequest
    from ithaca.rehearse.rehearsal import rehearse as run_rank
    from ithaca.rehearse.rehearse_page import as_json, page

    machine = _read_job_machine(gpus, ranks, host_memory, link, network)
    request = RehearsalRequest(
        run,
        config,
        machine,
        rank=rank,
        stage=len(run.stages) - 1 if stage is None else stage - 1,
        layers=layer_count,
        cap=limit,
        typed=partial(_options_for, gpus, machine.device.name, world is not None),
    )
    # After the checks above, so that a mistake in the settings prints one line.
    if world is None and not counted_cards(gpus):
        typer.echo(
            f"ithaca: the job has {ranks} ranks, {_reason_for_world(run)}: --world sets another number", err=True
        )
    result = run_rank(request, lambda text: typer.echo(f"ithaca: {text}", err=True))
    from ithaca.launch.terminal import print_page

    print_page(page(request, result))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(request, result), indent=1) + "\n", encoding="utf-8")


def _check_numbers(world: int, rank: int, stage: int | None, run: RunSettings) -> None:
    from ithaca.errors import ConfigError

    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"--world {world} --rank {rank}: ranks count from 0 to the world less one")
    if stage is not None and not 1 <= stage <= len(run.stages):
        raise ConfigError(f"--stage {stage}: the run has stages 1 to {len(run.stages)}")


def _default_world(run: RunSettings) -> int:
    """Return the run's processes, or its sequence-parallel degree if that is larger, as over several nodes."""
    here = run.launch.processes if isinstance(run.launch.processes, int) else DEFAULT_WORLD
    return max([here, *(degree for degree in (run.mesh.sp, run.stages[-1].sp) if isinstance(degree, int))])


def _reason_for_world(run: RunSettings) -> str:
    """Return the reason for the number of ranks that `_default_world` gives."""
    given = isinstance(run.launch.processes, int) or _default_world(run) > DEFAULT_WORLD
    return "by the run's launch.processes and degrees" if given else "as neither --world nor the run says how many"


def counted_cards(card: str) -> int:
    """Return the number in `8xH100`; 0 if there is none."""
    if not card.strip()[:1].isdigit():
        return 0
    machine = read_machine(card, None, None, None, None)
    return machine.gpus * machine.nodes


def _options_for(card: str, name: str, by_world: bool, ranks: int) -> str | None:
    """Return the options that ask for another number of ranks; None if that number is no whole nodes."""
    if ranks > CARDS_PER_NODE and ranks % CARDS_PER_NODE:
        return None
    words = [f"--world {ranks}"] if by_world or not counted_cards(card) else []
    cards = f"{ranks}x{name}"
    words += [f"--gpus {shlex.quote(cards)}"] if counted_cards(card) else []
    return " ".join(words)


def _read_layers(text: str) -> int | None:
    """Return the number of layers to run: 0 for `auto`, None for `all`."""
    from ithaca.errors import ConfigError

    if text in ("auto", "all"):
        return 0 if text == "auto" else None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--layers {text}: use auto, all, or a number of layers such as 4")
    return int(text)


def _read_cap(text: str) -> int:
    from ithaca.errors import ConfigError
    from ithaca.quantities import parse_bytes

    if text.strip().isdigit():
        raise ConfigError(f"--cap {text}: write a unit, such as {text.strip()}GB")
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--cap: {error}") from None
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"--cap {text}: an amount of memory such as 80GB is needed")
    return size


def _read_job_machine(card: str, world: int, host_memory: str | None, link: str | None, network: str | None) -> Machine:
    """Return the job's machine: `world` GPUs like the one here (H100 if there is none), eight a node."""
    import torch

    from ithaca.errors import ConfigError

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    nodes = max(1, world // CARDS_PER_NODE)
    if world > CARDS_PER_NODE and world % CARDS_PER_NODE:
        raise ConfigError(f"--world {world}: more than {CARDS_PER_NODE} ranks are whole nodes of {CARDS_PER_NODE}")
    machine = read_machine(card or here, None, host_memory, link, network)
    asked = machine.gpus * machine.nodes
    if counted_cards(card) and asked != world:
        raise ConfigError(f"--gpus {card} with --world {world}: leave the number of cards away, or use --world {asked}")
    return read_machine(f"{world // nodes}x{machine.device.name}", nodes, host_memory, link, network)


def read_model_config(name: str, revision: str | None) -> Any:
    """Return the config of a folder, a file, the embedded model, a model of the built-in table, or one on the hub."""
    from ithaca.errors import ConfigError
    from ithaca.launch.scratch import scratch_folder
    from ithaca.models.files.embedded import build_embedded
    from ithaca.models.files.pretrained import CONFIG, find_folder, known_model, read_config

    path = Path(name).expanduser()
    if name == "embedded":
        with scratch_folder() as folder:
            return read_config(build_embedded(Path(folder) / name))
    if path.suffix == ".json" and path.name != CONFIG:
        raise ConfigError(f"{name}: name a model's folder, or the {CONFIG} in it")
    if path.is_dir() or path.suffix == ".json":
        return read_config(path if path.is_dir() else path.parent)
    return known_model(name) or read_config(find_folder(name, revision))


def with_one_stage(run: RunSettings, length: str, world: int, config: Any) -> RunSettings:
    """Return the run with one stage of this length, of one row for each sequence group."""
    from ithaca.cli.plan_inputs import read_length
    from ithaca.config.schema import StageSettings
    from ithaca.training.degrees import StageDegrees

    stage = StageSettings(length=read_length(length), steps=1, batch=world, sp=run.stages[-1].sp)
    heads = int(config.get_text_config().num_attention_heads)
    groups = world // StageDegrees(run.mesh, [stage], world, heads).sp(0)
    return run.model_copy(update={"stages": [stage.model_copy(update={"batch": groups})]})
