"""`ithaca rehearse`: one rank of the whole cluster's job, on the one device here, beside what the plan says of it."""

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
    from ithaca.config.schema import Run
    from ithaca.planning.terms.traffic import Machine

LENGTH, WORLD = "128k", 8


def rehearse(
    words: list[str] = typer.Argument(None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file; settings."),
    model: str = typer.Option("", help="Instead of a run file: a name, a folder or a config.json."),
    length: str = typer.Option("", help="Tokens of a row, 128k or 1M; the run's last stage if left out."),
    world: int | None = typer.Option(
        None, help="Ranks of the whole job; as --gpus or the run says, or 8, if left out."
    ),
    rank: int = typer.Option(0, help="Which of them is rehearsed, from 0."),
    stage: int | None = typer.Option(None, help="Which of the run's stages, from 1; the last if left out."),
    layers: str = typer.Option(
        "auto", help="`all` the layers, `auto`, or a number: few are run, then as many more, and the rest is derived."
    ),
    cap: str = typer.Option("", help="Memory that the device may use: 80GB."),
    gpus: str = typer.Option("", help="The card of the job, if not the one here: H100, 8xH100."),
    link: str | None = typer.Option(None, help="What joins cards of a node: 'NVLink 4', 'PCIe 5'."),
    network: str | None = typer.Option(None, help="What joins nodes: 'InfiniBand NDR', 'Ethernet 100G'."),
    host_memory: str | None = typer.Option(None, help="Host memory of one node: 1T, 512GB, 960GiB."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write everything to this file."),
) -> None:
    """Run one rank of a job on the one device here; memory and time beside the plan's."""
    say_loading("loading torch and transformers")
    from ithaca.cli.train import split_words
    from ithaca.config.schema import load_run
    from ithaca.errors import ConfigError
    from ithaca.models.files.pretrained import change_config
    from ithaca.report.plan_files import check_report, writing

    file, overrides = split_words(words or [])
    run = load_run(file, [*overrides, *([f"model.name={json.dumps(model)}"] if model else [])])
    ranks = (counted_cards(gpus) or _usual_world(run)) if world is None else world
    if ranks < 1 or not 0 <= rank < ranks:
        raise ConfigError(f"--world {ranks} --rank {rank}: ranks count from 0 to the world less one")
    if stage is not None and not 1 <= stage <= len(run.stages):
        raise ConfigError(f"--stage {stage}: the run has stages 1 to {len(run.stages)}")
    if json_file is not None:
        with writing("--json", json_file):
            json_file.parent.mkdir(parents=True, exist_ok=True)
        check_report(json_file)
    more = _layers(layers)
    limit = _bytes(cap) if cap else None
    config = change_config(read_model_config(run.model.name, run.model.revision), run.model.config)
    if length or (model and file is None):
        run = one_length(run, length or LENGTH, ranks, config)
    from ithaca.rehearse.rehearsal import Asked
    from ithaca.rehearse.rehearsal import rehearse as run_rank
    from ithaca.rehearse.rehearse_page import as_json, page

    machine = _machine(gpus, ranks, host_memory, link, network)
    asked = Asked(
        run,
        config,
        machine,
        rank=rank,
        stage=len(run.stages) - 1 if stage is None else stage - 1,
        layers=more,
        cap=limit,
        typed=partial(_typed, gpus, machine.device.name, world is not None),
    )
    # Not before the checks above: a mistake in the settings is one line.
    if world is None and not counted_cards(gpus):
        typer.echo(f"ithaca: the job has {ranks} ranks, {_why_so_many(run)}: --world sets another number", err=True)
    result = run_rank(asked, lambda text: typer.echo(f"ithaca: {text}", err=True))
    from ithaca.launch.terminal import print_page

    print_page(page(asked, result))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(asked, result), indent=1) + "\n", encoding="utf-8")


def _usual_world(run: Run) -> int:
    """The run's processes; where a sequence is split over more, as over several nodes, so many."""
    here = run.launch.processes if isinstance(run.launch.processes, int) else WORLD
    return max([here, *(degree for degree in (run.mesh.sp, run.stages[-1].sp) if isinstance(degree, int))])


def _why_so_many(run: Run) -> str:
    """Return the reason for the number of ranks that `_usual_world` gives."""
    given = isinstance(run.launch.processes, int) or _usual_world(run) > WORLD
    return "by the run's launch.processes and degrees" if given else "as neither --world nor the run says how many"


def counted_cards(card: str) -> int:
    """The cards of `8xH100`; 0 where no number is given."""
    if not card.strip()[:1].isdigit():
        return 0
    machine = read_machine(card, None, None, None, None)
    return machine.gpus * machine.nodes


def _typed(card: str, name: str, by_world: bool, ranks: int) -> str | None:
    """Return the options that ask for another number of ranks; None if so many are no whole nodes."""
    if ranks > CARDS_PER_NODE and ranks % CARDS_PER_NODE:
        return None
    words = [f"--world {ranks}"] if by_world or not counted_cards(card) else []
    cards = f"{ranks}x{name}"
    words += [f"--gpus {shlex.quote(cards)}"] if counted_cards(card) else []
    return " ".join(words)


def _layers(text: str) -> int | None:
    from ithaca.errors import ConfigError

    if text in ("auto", "all"):
        return 0 if text == "auto" else None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--layers {text}: use auto, all, or a number of layers such as 4")
    return int(text)


def _bytes(text: str) -> int:
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


def _machine(card: str, world: int, host_memory: str | None, link: str | None, network: str | None) -> Machine:
    """The job's machine: `world` of the card here (an H100 where there is none), eight a node."""
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
    """The config of a folder, a file, the embedded model, a name of the built-in table, or one on the hub."""
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


def one_length(run: Run, length: str, world: int, config: Any) -> Run:
    """The run with one stage of this length; one row for each sequence group."""
    from ithaca.cli.plan_inputs import read_length
    from ithaca.config.schema import Stage
    from ithaca.training.degrees import StageDegrees

    stage = Stage(length=read_length(length), steps=1, batch=world, sp=run.stages[-1].sp)
    heads = int(config.get_text_config().num_attention_heads)
    groups = world // StageDegrees(run.mesh, [stage], world, heads).sp(0)
    return run.model_copy(update={"stages": [stage.model_copy(update={"batch": groups})]})
