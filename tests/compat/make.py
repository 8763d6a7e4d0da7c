"""Make the files in tests/compat/files: what users hold after training with an earlier version of Ithaca.

The files there were made at commit 9ed481b, with Python 3.11.7, torch 2.13.0+cpu and transformers as `made.json` says:

    git worktree add OLD 9ed481b
    PYTHONPATH=OLD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/bin/python tests/compat/make.py [PART ...]

It takes about ten minutes on two cores. Run again it makes files of the same kind, stopped at other steps.

- `work.tar.xz`: a working folder with a model, documents, run files, prepared caches, runs that were stopped by SIGTERM
  (as the names of their run files say), one that ended, and its export.
- `trainer.tar.xz`: what `script.py` left of a `Trainer` on two ranks, `training_args.bin` and a checkpoint among it;
  more such arguments; the state that `loop.py` saved.
- `made.json`: versions, and for every stopped run the losses that the earlier version got when it went on;
  `trainer.json`: losses of the Trainer from the start, and from its checkpoint on; those of the loop.
- `reports/`: JSON of `plan`, `rehearse`, `verify`, `models` and `doctor`, and a calibration.
- `settings/`: run files beside the settings that they were read to.
- `names.json`: public names with their parameters. `options.json`: options of every verb. `statuses.json`: commands and
  the status that each ended with.

Every path in them is relative, so the files hold nothing of the machine they were made on.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

COMMIT = "9ed481b"
HERE = "{here}"
FILES = Path(__file__).resolve().parent / "files"
# Part of a cache's name: files of documents get this time before anything reads them.
WRITTEN = 1_700_000_000
WORDS = ["sea", "ship", "wind", "oar", "isle", "home", "wine-dark", "king", "loom", "bow"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% if message['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
_STAGE = {"length": 64, "steps": 20, "batch": 2, "lr": 3.0e-3, "warmup": 2}
_BASE: dict[str, Any] = {
    "model": {"name": "model"},
    "data": {"sources": ["texts"], "cache": "cache"},
    "stages": [_STAGE],
    "checkpoints": {"save_every": 4, "keep": 1},
    "launch": {"device": "cpu", "processes": 1},
}
# Runs that are stopped on their way. The names say what is special about their checkpoints.
STOPPED: dict[str, dict[str, Any]] = {
    "stages": {
        "data": {"sources": ["texts", {"path": "rows.jsonl", "kind": "text"}], "cache": "cache"},
        "validation": {"share": 0.2, "every": 6, "rows": 2},
        "stages": [
            _STAGE,
            {"length": 128, "steps": 6, "batch": 2, "lr": 1.0e-3, "rope": {"kind": "yarn", "factor": 2}},
        ],
    },
    "ranks": {
        "precision": "mixed",
        "data": {"sources": ["texts"], "cache": "cache", "rows": "joined"},
        "optimizer": {"weight_decay": 0.1},
        "mesh": {"sp": 2},
        "launch": {"device": "cpu", "processes": 2},
    },
    "adamw8bit": {
        "model": {"name": "wide", "tokenizer": "model", "weights": "random"},
        "optimizer": {"name": "adamw8bit"},
    },
    "bf16_sr": {"precision": "bf16", "optimizer": {"name": "bf16_sr"}},
    "lora": {"lora": {"rank": 4, "dropout": 0.1}},
    "stream": {"data": {"sources": ["rows.jsonl"], "streaming": True}},
}
ENDED = {"stages": [{**_STAGE, "steps": 4}]}
CHATS = {"data": {"sources": [{"path": "chats.jsonl", "kind": "chat"}], "cache": "cache"}}
# Run files as a user types them, each setting of the file somewhere among them.
SETTINGS = {
    "embedded": "{}\n",
    "short": "output: runs/short\nmodel: {name: model}\nstages: [{length: 4k, steps: 10}]\n",
    "every": """\
output: runs/every
seed: 17
precision: bf16
model: {name: some/model, revision: v2, tokenizer: other/tokenizer, weights: pretrained, kernel: cpu}
lora: {rank: 8, alpha: 16, dropout: 0.05, targets: [q_proj, v_proj]}
data:
  sources:
  - books/
  - {path: chats.jsonl, kind: chat, column: talk, format: jsonl}
  - {path: rows.parquet, kind: tokens, labels: targets}
  - {path: some/dataset, format: hub, subset: en, split: validation}
  - {path: code, format: code, include: ["*.py", "*.c"]}
  rows: joined
  learn: all
  chat_template: template.jinja
  streaming: true
  bad_share: 0.02
  cache: cache
  workers: 3
validation: {share: 0, sources: held.jsonl, every: 50, rows: 8}
stages:
- {length: 32k, steps: 500, batch: 8, lr: 2.0e-5, schedule: linear, warmup: 10, final: 0}
- {length: 128k, tokens: 500M, batch: 4, lr: 1.0e-5, rope: {kind: yarn, factor: 4, original: 32k}, sp: 4}
- {length: 1M, steps: 5, rope: {kind: theta, theta: 5.0e+6}}
- {length: 1M, steps: 5, rope: {kind: llama3, factor: 8, low_freq_factor: 2, high_freq_factor: 5}, schedule: constant}
- {length: 1M, tokens: 1B, rope: {kind: linear, factor: 2}}
- {length: 1M, tokens: 1B, rope: {kind: ntk, factor: 2}, warmup: 0.1}
mesh: {sp: 8, ring: 1, replicas: 2}
memory:
  {budget: 60GB, host_budget: 1.5TB, on_host: everything, layers: [keep, save], offload: true, mlp_tile: 4k,
   loss_tile: 2k, head_groups: 2}
optimizer: {name: bf16_sr, betas: [0.8, 0.99], eps: 1.0e-6, weight_decay: 0.1, clip: 0.5}
checkpoints: {save_every: 10, keep: 5, background: false}
metrics: {every: 2, trackers: [tensorboard, wandb], project: mine, apart_every: 4}
limits: {grace: 30, hang: 300, bad_steps: 3}
launch: {processes: 4, device: cuda}
""",
    "other": """\
output: runs/other
precision: mixed
model: {name: other/model, weights: random}
data: {sources: texts/*.txt}
stages: [{length: 2048, steps: 3, lr: 1.0e-3}]
memory: {plan: none}
optimizer: {name: adamw8bit, clip: 0, in_backward: true}
metrics: {trackers: [trackio]}
launch: {device: cpu}
""",
}
# A command's words, and whether its status is made in a few seconds. "{}" is a name of no file.
COMMANDS: tuple[tuple[str, bool], ...] = (
    ("--version", True),
    ("--help", True),
    ("sail", True),
    ("models qwen3", True),
    ("models qwen9", True),
    ("plan --model llama-3.1-8b --length 128k --gpus 8xH100 --json", True),
    ("plan --length 128k", True),
    ("plan --model llama-3.1-8b --length 128k --gpus 8xZ80", True),
    ("plan --model llama-3.1-70b --length 4M --gpus 1xL40S --json", True),
    ("plan --model llama-3.1-8b --length far --gpus 8xH100", True),
    ("plan --model model --length 128 --gpus 1xH100 --optimizer adam", True),
    ("train ended.yaml --show", True),
    ("train nowhere.yaml", True),
    ("train ended.yaml stages.0.lenght=64", True),
    ("train ended.yaml stages.0.length=-1 --show", True),
    ("train ended.yaml optimizer.name=sgd", True),
    ("train ended.yaml mesh.ring=2", False),
    ("train ended.yaml data.sources=nowhere output=runs/new", False),
    ("train ended.yaml model.name=nowhere output=runs/new", False),
    ("train ended.yaml seed=5", False),
    ("train ended.yaml", False),
    ("prepare ended.yaml", False),
    ("prepare ended.yaml --show 1", False),
    ("prepare nowhere.yaml", True),
    ("prepare ended.yaml data.sources=nowhere", False),
    ("export runs/ended --to again", False),
    ("export runs/nowhere --to exported", True),
    ("export runs/ended --step 3 --to exported", True),
    ("verify --model llama --sp 1", True),
    ("verify --model llama --device tpu", True),
    ("verify --model llama --sp 64", False),
    ("verify --model qwen9", False),
    ("verify --model llama --layers 0", True),
    ("rehearse --model llama-3.2-1b --length 8k --world 2 --rank 2", True),
    ("rehearse ended.yaml --stage 2", True),
    ("doctor --help", True),
    ("export --help", True),
)
REPORTS = {
    "plan": "plan --model llama-3.1-8b --length 128k --gpus 8xH100 --tokens 2B --price 2.5 --json",
    "plan_compare": "plan --model llama-3.2-1b --length max --gpus 4xA100-80GB --compare --json",
    "plan_lora": "plan --model gpt-oss-20b --length 64k --gpus 8xH200 --tune lora --target-tok-s 50000 --json",
    "plan_machine": "plan --model qwen3-8b --length 256k --gpus 8xH100 --nodes 2 --host-memory 2T --json",
    "models": "models --json",
    "doctor": "doctor --json",
}
WRITTEN_REPORTS = {
    "rehearse": "rehearse --model model --length 128 --world 2 --gpus H100",
    "verify": "verify --model llama",
}


def ithaca(words: str, *, folder: Path, timeout: float = 600.0, **env: str) -> subprocess.CompletedProcess[str]:
    """`ithaca WORDS` in a folder, by the package on PYTHONPATH."""
    command = [sys.executable, "-m", "ithaca.cli", *words.split()]
    given = {**os.environ, "XDG_CACHE_HOME": str(folder / "home"), "COLUMNS": "140", **env}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=timeout)


def make_model(folder: Path) -> None:
    """Two layers of width 32 over 60 words, and beside them a model with wider weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:-"]
    words = ["<unk>", "<s>", "</s>", *WORDS, "user", "assistant", *letters]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    sizes: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # A config alone. Moments of fewer than 4,096 numbers are never in 8 bits.
    LlamaConfig(**sizes | {"intermediate_size": 128, "num_hidden_layers": 1}).save_pretrained(folder.with_name("wide"))


def make_documents(folder: Path) -> None:
    draw = random.Random(3)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(8, 90)))

    (folder / "texts").mkdir()
    for number in range(24):
        (folder / "texts" / f"{number:02d}.txt").write_text(text(), encoding="utf-8")
    rows = "".join(json.dumps({"text": text()}) + "\n" for _ in range(40))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    turns = [[{"role": "user", "content": text()}, {"role": "assistant", "content": text()}] for _ in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns), "utf-8")
    for file in (folder / "rows.jsonl", folder / "chats.jsonl", *(folder / "texts").iterdir()):
        os.utime(file, (WRITTEN, WRITTEN))


def make_run_files(folder: Path) -> None:
    for name, settings in {**STOPPED, "ended": ENDED, "chats": CHATS}.items():
        run = {"output": f"runs/{name}", **_BASE, **settings}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(run, indent=1) + "\n")


def steps_in(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "runs" / name / "metrics.jsonl"
    with contextlib.suppress(OSError, ValueError):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [line for line in lines if line["kind"] == "step"]
    return []


def stop_run(folder: Path, name: str) -> int:
    """Start a run and end it by SIGTERM after five steps or more; gives its status."""
    for _ in range(5):
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)
        command = [sys.executable, "-m", "ithaca.cli", "train", f"{name}.yaml"]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None and len(steps_in(folder, name)) < 5:
            time.sleep(0.0005)
        run.send_signal(signal.SIGTERM)
        status = run.wait(timeout=120)
        if 5 <= len(steps_in(folder, name)) < 18:
            return status
    raise SystemExit(f"{name} was not stopped in time ({status}): give it more steps")


def work(folder: Path) -> dict[str, Any]:
    """The working folder with all its runs; gives what the earlier version got as it went on."""
    make_model(folder / "model")
    make_documents(folder)
    make_run_files(folder)
    assert ithaca("prepare chats.yaml", folder=folder).returncode == 0
    assert ithaca("train ended.yaml", folder=folder).returncode == 0
    assert ithaca("export runs/ended --to again", folder=folder).returncode == 0
    found: dict[str, Any] = {"ended": {"losses": [line["loss"] for line in steps_in(folder, "ended")]}}
    found |= {name: stop_and_go_on(folder, name) for name in STOPPED}
    for png in (*folder.rglob("loss.png"),):
        png.unlink()
    return found


def stop_and_go_on(folder: Path, name: str) -> dict[str, Any]:
    """Leave a stopped run in the folder; gives what the same command got of it in a copy."""
    status = stop_run(folder, name)
    before = len(steps_in(folder, name))
    with tempfile.TemporaryDirectory() as other:
        shutil.copytree(folder, other, dirs_exist_ok=True)
        went_on = ithaca(f"train {name}.yaml", folder=Path(other))
        assert went_on.returncode == 0, went_on.stderr
        losses = [line["loss"] for line in steps_in(Path(other), name)]
        weights = read_weights(Path(other) / "runs" / name / "export")
    print(name, before, len(losses), status, flush=True)
    return {"status": status, "steps": before, "losses": losses, "weights": weights}


def read_weights(folder: Path) -> dict[str, list[float]]:
    """Sum and sum of squares of every exported tensor, in fp64."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = [float(tensor.double().sum()), float(tensor.double().square().sum())]
    return found


def run_script(folder: Path, name: str, *words: str, **environment: str) -> list[float]:
    """Run a script of this folder on two ranks; gives the losses that it wrote."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(FILES.parent / name), *words]
    ranks = [
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment, **common, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    ended = [rank.wait(timeout=300) for rank in ranks]
    assert ended == [0, 0], ended
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    (folder / "losses.json").unlink()
    return losses


def save_arguments(folder: Path) -> None:
    """`training_args.bin` with a plan made by hand, and as TRL makes it of a TrainingArguments."""
    import torch
    from transformers import TrainingArguments
    from trl import SFTConfig

    import ithaca as package

    plan = package.MemoryPlan(("save", "recompute"), (False, True), 1024, 512)
    config = package.UlyssesConfig(memory=plan, host_budget="1GB")
    given = TrainingArguments("trainer", report_to=[], use_cpu=True, parallelism_config=config)
    torch.save(given, folder / "plan.bin")
    said = {name: value for name, value in given.to_dict().items() if not name.startswith("_n_gpu")}
    torch.save(SFTConfig(**said), folder / "sft.bin")


def reports(folder: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name, words in REPORTS.items():
        (to / f"{name}.json").write_text(ithaca(words, folder=folder).stdout)
    doctor = [{**row, "found": ""} for row in json.loads((to / "doctor.json").read_text())]
    (to / "doctor.json").write_text(json.dumps(doctor, indent=1) + "\n")
    for name, words in WRITTEN_REPORTS.items():
        done = ithaca(f"{words} --json report.json", folder=folder)
        assert done.returncode == 0, done.stderr
        shutil.move(folder / "report.json", to / f"{name}.json")
    from ithaca.planning.calibrated import Measured, write_measured
    from ithaca.planning.hardware import AttentionSpeed

    speeds = (AttentionSpeed(128, 32_768, 500.0, 400.0), AttentionSpeed(64, 32_768, 400.0, 300.0))
    # The figures are made up: there is no card here. What writes them is what `plan --calibrate` calls.
    measured = Measured("NVIDIA H100 80GB HBM3", 85 * 10**9, 600.0, speeds, 2900.0, 50.0, "2.11.0")
    write_measured(to / "calibration.json", measured)
    home = folder / "home" / "ithaca"
    home.mkdir(parents=True)
    shutil.copy(to / "calibration.json", home)
    (to / "plan_measured.json").write_text(ithaca(REPORTS["plan"], folder=folder).stdout)
    shutil.rmtree(folder / "home")


def settings(folder: Path, to: Path) -> None:
    import yaml

    to.mkdir(exist_ok=True)
    for name, text in SETTINGS.items():
        (to / f"{name}.yaml").write_text(text)
        shown = ithaca(f"train {to / name}.yaml --show", folder=folder)
        assert shown.returncode == 0, shown.stderr
        (to / f"{name}.json").write_text(json.dumps(yaml.safe_load(shown.stdout), indent=1) + "\n")
    planned = ithaca("plan --model model --length 128 --gpus 2xH100 --write planned.yaml", folder=folder)
    assert planned.returncode == 0, planned.stderr
    words = "train planned.yaml data.sources=texts --show"
    shutil.copy(folder / "planned.yaml", to / "planned.yaml")
    (to / "planned.json").write_text(json.dumps(yaml.safe_load(ithaca(words, folder=folder).stdout), indent=1) + "\n")
    (folder / "planned.yaml").unlink()


def statuses(folder: Path) -> list[dict[str, Any]]:
    """Each command in a copy of the folder: some write."""
    found = []
    for words, quick in COMMANDS:
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(folder, other, dirs_exist_ok=True)
            status = ithaca(words, folder=Path(other)).returncode
        found.append({"words": words, "status": status, "quick": quick})
        print(status, words, flush=True)
    return found


def names() -> dict[str, Any]:
    """Public names: parameters of what is called, bases and public attributes of classes."""
    import ithaca as package

    found = {}
    for name in sorted(package.__all__):
        value = getattr(package, name)
        entry: dict[str, Any] = {"kind": type(value).__name__}
        if inspect.isclass(value):
            entry |= {
                "bases": [base.__name__ for base in value.__mro__[1:]],
                "attributes": sorted(one for one in dir(value) if not one.startswith("_")),
            }
        if callable(value):
            with contextlib.suppress(ValueError):
                entry["parameters"] = [
                    [one.name, one.kind.name, repr(one.default) if one.default is not one.empty else None]
                    for one in inspect.signature(value).parameters.values()
                ]
        found[name] = entry
    return found


def options(folder: Path) -> dict[str, list[str]]:
    found = {}
    for verb in ("models", "plan", "rehearse", "verify", "prepare", "train", "export", "doctor"):
        page = ithaca(f"{verb} --help", folder=folder, COLUMNS="200").stdout
        found[verb] = sorted(set(re.findall(r"--[a-z][a-z-]+", page)))
    return found


def pack(folder: Path, archive: Path) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = int(entry.mtime)
        return entry

    with tarfile.open(archive, "w:xz", preset=9) as opened:
        for path in sorted(folder.iterdir()):
            opened.add(path, path.name, filter=plain)


def hide_places(folder: Path) -> None:
    """Checkpoints name the folder of their model: HERE stands for what is above it, and the tests put theirs there."""
    for file in folder.rglob("facts.json"):
        file.write_text(file.read_text().replace(str(folder), HERE))


def check_clean(folder: Path) -> None:
    """No file holds a path or the name of this machine."""
    words = {str(Path.home()), tempfile.gettempdir(), socket.gethostname(), str(FILES.parent.parent.parent), sys.prefix}
    for file in folder.rglob("*"):
        if file.is_file():
            held = file.read_bytes()
            told = [word for word in words if len(word) > 3 and word.encode() in held]
            assert not told, f"{file} holds {told}"


def make_runs(folder: Path) -> None:
    import torch
    import transformers

    made = {
        "commit": COMMIT,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "runs": work(folder),
    }
    shutil.rmtree(folder / "home")
    hide_places(folder)
    check_clean(folder)
    pack(folder, FILES / "work.tar.xz")
    write("made", made)


def make_trainer(folder: Path) -> None:
    make_model(folder / "model")
    first, again = run_script(folder, "script.py"), run_script(folder, "script.py", "trainer/checkpoint-3")
    for file in folder.glob("trainer/checkpoint-[!3]*"):
        shutil.rmtree(file)
    loop = run_script(folder, "loop.py")
    save_arguments(folder)
    write("trainer", {"first": first, "again": again, "loop": loop})
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "wide")
    check_clean(folder)
    pack(folder, FILES / "trainer.tar.xz")


def make_settings(folder: Path) -> None:
    make_model(folder / "model")
    (folder / "texts").mkdir()
    settings(folder, FILES / "settings")


def make_reports(folder: Path) -> None:
    make_model(folder / "model")
    reports(folder, FILES / "reports")


def make_names(folder: Path) -> None:
    write("names", names())
    write("options", options(folder))


def make_statuses(folder: Path) -> None:
    """After `runs`: in copies of the folder that it left."""
    with tarfile.open(FILES / "work.tar.xz") as opened:
        opened.extractall(folder, filter="data")
    put_places(folder)
    write("statuses", statuses(folder))


def put_places(folder: Path) -> None:
    """Undo `hide_places` for a folder where the files lie now, and sum the changed files anew."""
    for file in folder.rglob("facts.json"):
        file.write_text(file.read_text().replace(HERE, str(folder)))
        manifest = file.with_name("manifest.json")
        said = json.loads(manifest.read_text())
        said["files"][file.name] = {"crc32": zlib.crc32(file.read_bytes()), "size": file.stat().st_size}
        manifest.write_text(json.dumps(said))


PARTS = {
    "runs": make_runs,
    "trainer": make_trainer,
    "settings": make_settings,
    "reports": make_reports,
    "names": make_names,
    "statuses": make_statuses,
}


def main() -> None:
    import ithaca as package

    root = Path(package.__file__).parent.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert head.startswith(COMMIT), f"{root} is at {head.strip()}: put a checkout of {COMMIT} on PYTHONPATH"
    FILES.mkdir(exist_ok=True)
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "work")
            folder.mkdir()
            PARTS[part](folder)
    check_clean(FILES)


def write(name: str, value: Any) -> None:
    (FILES / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
