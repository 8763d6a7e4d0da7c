"""What `ithaca plan` leaves behind: a run.yaml that `ithaca train` takes, the change to a plain script, a page to review."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ithaca.config.schema import (
    DataSettings,
    LaunchSettings,
    LoraSettings,
    MemorySettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RopeSettings,
    RunSettings,
    SourceSettings,
    StageSettings,
    dump_run,
)
from ithaca.constants import GIB
from ithaca.errors import ConfigError
from ithaca.planning.model.known_models import KnownModel
from ithaca.planning.search.best_mesh import Option
from ithaca.planning.search.request import HOST_HEADROOM, Wanted
from ithaca.planning.terms.traffic import Machine

STEPS = 1000
USUAL_HEADROOM = 0.25
# What a line of code has room for on a page of 80 columns.
_LINE = 76


def run_of(
    known: KnownModel, wanted: Wanted, option: Option, *, tokens: int | None, lora_rank: int | None
) -> RunSettings:
    """The run that the plan is of; the documents are the user's to name."""
    recipe, job = option.recipe, option.job
    budget = None if wanted.headroom == USUAL_HEADROOM else wanted.device_budget
    stage = StageSettings(
        length=job.length,
        steps=None if tokens else STEPS,
        tokens=tokens,
        batch=option.rows * option.degrees.dp,
        rope=_rope(known, job.length),
    )
    optimizer = "adamw" if recipe.optimizer == "none" else recipe.optimizer
    return RunSettings(
        output=f"runs/{known.name.rstrip('/').rsplit('/', 1)[-1].removesuffix('.json')}-{job.length}",
        precision=recipe.precision,
        model=ModelSettings(name=_folder(known.name)),
        lora=LoraSettings(rank=lora_rank) if lora_rank else None,
        data=DataSettings(sources=[SourceSettings(path="documents.jsonl")]),
        stages=[stage],
        mesh=MeshSettings(sp=option.degrees.sp, ring=option.degrees.ring, replicas=job.replicas),
        memory=MemorySettings(
            budget=budget,
            host_budget=_host_budget(wanted, option),
            on_host="everything" if recipe.on_host else "nothing",
        ),
        optimizer=OptimizerSettings(name=optimizer),
        launch=LaunchSettings(processes=option.machine.gpus, device="cuda"),
    )


def _host_budget(wanted: Wanted, option: Option) -> int | None:
    """One rank's bytes of the host, where they are not what a run takes by itself."""
    usual = wanted.host_headroom == HOST_HEADROOM
    return None if usual else replace(wanted, machine=option.machine).host_budget


def _folder(name: str) -> str:
    """A run names the model's folder, not the config in it."""
    return str(Path(name).parent) if Path(name).name.endswith(".json") else name


def _rope(known: KnownModel, length: int) -> RopeSettings | None:
    """Positions stretched by YaRN where the model was trained on shorter ones; it replaces a scaling that is there."""
    if not known.positions or not known.original or length <= known.positions:
        return None
    return RopeSettings(kind="yarn", factor=length / known.original, original=known.original)


@contextmanager
def writing(option: str, file: Path) -> Iterator[None]:
    """A file that cannot be written is the user's mistake, and said with the option that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written ({error.strerror}): name a file") from None


def check_report(file: Path) -> None:
    """Refuse a file for JSON before minutes of work have no place to go to."""
    folder = file.absolute().parent
    if file.is_dir():
        raise ConfigError(f"--json {file} is a folder: name a file")
    if not folder.is_dir():
        raise ConfigError(f"--json {file}: there is no folder {folder}; name one that is there")
    new = not file.exists()
    try:
        # Asked for by name, some folders say yes and mean no.
        file.open("a").close()
    except OSError:
        raise ConfigError(f"--json {file} cannot be written to: name a file in a folder of yours") from None
    if new:
        file.unlink()


def write_run(file: Path, run: RunSettings, machine: Machine) -> bool:
    """Whether it was written: a file that says something else is left alone."""
    text = "# Made by `ithaca plan`. Name your documents under data.sources, then: ithaca train " + file.name + "\n"
    if machine.nodes > 1:
        # A run says what one node starts; how many nodes there are is the launcher's to know.
        text += f"# It is for {machine}. One rank of it: {rehearsal(file, machine)}\n"
    text += dump_run(run)
    if file.exists() and file.read_bytes() != text.encode():
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return True


def script_change(wanted: Wanted, option: Option) -> str:
    """The five lines of a plain PyTorch loop that change, with this plan's settings."""
    recipe, job = option.recipe, option.job
    settings = ["mesh"]
    # PEFT keeps adapters in fp32.
    casts = recipe.precision == "mixed" or wanted.sizes.adapters
    settings += ["compute_dtype=torch.bfloat16"] if casts else []
    settings += ['on_host="everything"'] if recipe.on_host else []
    settings += [f"replicas={job.replicas}"] if job.replicas > 1 else []
    settings += [f'optimizer="{recipe.optimizer}"'] if recipe.optimizer != "adamw" else []
    settings += [f"memory_budget={wanted.device_budget}"] if wanted.headroom != USUAL_HEADROOM else []
    host = _host_budget(wanted, option)
    settings += [f"host_budget={host}"] if host is not None else []
    dtype = "torch.float32" if recipe.precision == "mixed" else "torch.bfloat16"
    call = f"+model = ithaca.parallelize(model, {', '.join(settings)})"
    if len(call) > _LINE:
        call = f"+model = ithaca.parallelize(\n+    model, {', '.join(settings)}\n+)"
    return "\n".join(
        (
            f"+mesh  = ithaca.init_mesh(sp={option.degrees.sp})",
            f" model = AutoModelForCausalLM.from_pretrained(name, dtype={dtype})",
            call,
            "-    loss = model(**batch).loss",
            "+    loss = ithaca.causal_loss(model, batch, mesh)",
            '-model.save_pretrained("out")',
            '+ithaca.save_pretrained(model, "out")',
        )
    )


def rehearsal(file: Path, machine: Machine) -> str:
    """What rehearses one rank of the run on this machine, all of its nodes counted."""
    return f"ithaca rehearse {file} --gpus {machine.device.name} --world {machine.world}"


def launch_line(machine: Machine) -> str:
    nodes = f"--nnodes {machine.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\\n    "
    return f"torchrun {nodes if machine.nodes > 1 else ''}--nproc-per-node {machine.gpus} script.py"


def spec_of(title: str, facts: dict[str, str], option: Option, wanted: Wanted) -> str:
    """One page of Markdown: what is asked, what is chosen, what it takes, and how sure that is."""
    device, host = replace(wanted, machine=option.machine).budgets
    lines = [f"# {title}", "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in facts.items()), ""]
    lines += ["## Memory of one GPU", "", f"Worst at the {option.memory.moment}.", ""]
    lines += ["| term | device, GiB | host, GiB | |", "|---|---:|---:|---|"]
    for term in option.memory.terms:
        sizes = f"{term.device_bytes / GIB:.2f} | {term.host_bytes / GIB:.2f}"
        lines.append(f"| {term.name} | {sizes} | {_cell(term.formula)} |")
    total = f"{option.memory.device_bytes / GIB:.2f} of {device / GIB:.1f} | "
    total += f"{option.memory.host_bytes / GIB:.2f} of {host / GIB:.1f}"
    lines += [f"| all | {total} | headroom {wanted.headroom:.0%} |", "", "## Time of a step", ""]
    lines += ["| term | seconds | share | |", "|---|---:|---:|---|"]
    for part in option.time.terms:
        share = part.seconds / option.time.seconds
        lines.append(f"| {part.name} | {part.seconds:.2f} | {share:.1%} | {_cell(part.meaning)} |")
    lines += [f"| all | {option.time.seconds:.2f} | 100% | |", "", "## In a plain script", ""]
    lines += ["```diff", script_change(wanted, option), "```", "", "```sh", launch_line(option.machine), "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("*", "\\*").replace("|", "\\|")
