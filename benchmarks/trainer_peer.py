"""DeepSpeed's Ulysses beside Ithaca and beside plain PyTorch on the same two cores: how close, and how fast.

    python -m benchmarks.trainer_peer results/trainer_peer.json --packages DIR [--rounds 5]

plain            transformers as it comes (SDPA) in one process with two threads
trainer          Hugging Face's Trainer over the same, in one process with two threads
ithaca           `init_mesh(sp=2)`, `parallelize`, `causal_loss`: two ranks over gloo with one thread each
ithaca-trainer   Trainer with `UlyssesConfig(sp_size=2)`, on the same two ranks
deepspeed        `UlyssesSPAttentionHF`, `UlyssesSPDataLoaderAdapter`, ZeRO-3 and the loss of its tutorial, likewise

All train one small fp32 Llama from one seed on the same rows, a row a step, with fused AdamW: forward, backward, clipping
and optimizer. A third of a row's labels is -100, so that shards have unequal numbers of targets.
Parity: ten steps, losses and gradient norms against `plain`; "one thread" is `plain` again with its sums in another
order, which shows what rounding alone does. Time: the median over all rounds; in a round every system runs once, in
processes of its own, so that what else the machine does meets all alike.

DeepSpeed comes from a folder: DS_BUILD_OPS=0 pip install --no-deps --target DIR deepspeed==0.19.8 hjson msgpack einops \
    ninja py-cpuinfo
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels import command_line
from benchmarks.step import save, show_length

MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False,
}  # fmt: skip
LENGTHS = (1024, 4096)
RATE = 1e-3
STEPS = 10
# Of every parity run: tokens a row and the norm that gradients are clipped to. Norms are above 1, so 0.1 bites.
CASES = ((1024, 1e9), (1024, 0.1), (4096, 0.1))
WARM_UP = 4
TIMED = {1024: 20, 4096: 6}
# What one process may take, in times of `plain`, by length.
ALLOWED = {1024: 1.6, 4096: 1.1}
LIMIT_S = 600
Batch = dict[str, Tensor]
# Takes (a row, the norm to clip to), makes one step and gives its loss and gradient norm.
Step = Callable[[Batch, float], tuple[float, float]]


def row(index: int, length: int) -> Batch:
    """One sequence with something to learn: a random walk over the vocabulary, its first third not learned."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(-3, 4, (length,), generator=generator).cumsum(0).remainder(int(MODEL["vocab_size"]))
    labels = ids.clone()
    labels[: length // 3] = -100
    return {"input_ids": ids[None], "labels": labels[None]}


def build() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL)).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)


def _updated(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float) -> tuple[float, float]:
    loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def plain(clip: float) -> Step:
    model = build()
    optimizer = adamw(model)
    return lambda batch, norm: _updated(model, optimizer, model(**batch).loss, norm)


def ithaca_step(clip: float, **settings: Any) -> Step:
    import ithaca

    mesh = ithaca.init_mesh(sp=2)
    model = ithaca.parallelize(build(), mesh, **settings)
    optimizer = adamw(model)
    return lambda batch, norm: _updated(model, optimizer, ithaca.causal_loss(model, batch, mesh), norm)


def deepspeed_step(clip: float) -> Step:
    """As DeepSpeed's tutorial has it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups
    from torch.distributed.nn import functional as gathers

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1,
        seq_length_is_variable=True,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2,
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, "gradient_clipping": clip,
        "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, mpu=mpu)
    group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()

    def step(shard: Batch, _: float) -> tuple[float, float]:
        targets = shard.pop("shift_labels")
        logits = engine(**shard).logits
        mean = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=engine.module.config.vocab_size
        )
        means = gathers.all_gather(mean, group=group)
        counts = gathers.all_gather((targets != -100).view(-1).sum(), group=group)
        loss = sum(means[rank] * counts[rank] for rank in range(size)) / max(sum(counts), 1)
        engine.backward(loss)
        engine.step()
        return float(loss.detach()), float(engine.get_global_grad_norm())

    return step


def deepspeed_rows(rows: list[Batch]) -> Iterator[Batch]:
    """Its adapter gathers a row from every rank, so rank r reads rows r, r + 2, ...: of an even number, or it hangs."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    rank, size = groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()
    own = [r | {"position_ids": torch.arange(r["input_ids"].shape[1])[None]} for r in rows[rank::size]]
    group = groups._get_sequence_parallel_group()
    yield from UlyssesSPDataLoaderAdapter(own, rank, group, size, torch.device("cpu"))  # type: ignore[arg-type]


LOOPS: dict[str, Callable[[float], Step]] = {
    "plain": plain,
    "ithaca": ithaca_step,
    "ithaca-replicate": partial(ithaca_step, weights="replicate"),
    "deepspeed": deepspeed_step,
}
TRAINERS = ("trainer", "ithaca-trainer")
SYSTEMS = ("plain", "trainer", "ithaca", "ithaca-trainer", "deepspeed")


def loop(system: str, rows: list[Batch], clip: float) -> dict[str, list[float]]:
    """A step for every row: losses, gradient norms, and the seconds from the end of a step to the end of the next."""
    step = LOOPS[system](clip)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "seconds": []}
    last = time.perf_counter()
    for batch in deepspeed_rows(rows) if system == "deepspeed" else rows:
        loss, norm = step(batch, clip)
        now = time.perf_counter()
        for name, value in (("losses", loss), ("norms", norm), ("seconds", now - last)):
            found[name].append(value)
        last = now
    return found


def trainer_loop(system: str, rows: list[Batch], clip: float) -> dict[str, list[float]]:
    """The same through Trainer, with the one argument or without."""
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ithaca

    ends: list[float] = []

    class Rows(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            yield from ({name: value[0] for name, value in batch.items()} for batch in rows)

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=build(),
            args=TrainingArguments(
                folder, max_steps=len(rows), per_device_train_batch_size=1, learning_rate=RATE, max_grad_norm=clip,
                lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
                use_cpu=True, dataloader_pin_memory=False, optim="adamw_torch_fused",
                parallelism_config=ithaca.UlyssesConfig(sp_size=2) if system == "ithaca-trainer" else None,
            ),
            train_dataset=Rows(),
            callbacks=[Clock()],
        )  # fmt: skip
        started = time.perf_counter()
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    seconds = [end - start for start, end in zip([started, *ends], ends, strict=False)]
    return {"losses": [log["loss"] for log in logs], "norms": [log["grad_norm"] for log in logs], "seconds": seconds}


def part(system: str, length: int, clip: float, steps: int) -> dict[str, list[float]]:
    """What one process does, or every rank of two."""
    rows = [row(index, length) for index in range(steps)]
    return trainer_loop(system, rows, clip) if system in TRAINERS else loop(system, rows, clip)


def run(system: str, length: int, clip: float, steps: int, packages: Path | None, threads: int = 2) -> Any:
    """`part` in processes of its own: one with all threads, or two ranks with one each."""
    alone = system in ("plain", "trainer")
    launch = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads if alone else 1), "GLOO_SOCKET_IFNAME": loopback, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "part.json")
        asked = json.dumps([system, length, clip, steps])
        command = [sys.executable, *launch, "-m", "benchmarks.trainer_peer", str(file), "--part", asked]
        command += ["--packages", str(packages)] if packages else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        if done.returncode or not file.exists():
            raise SystemExit(f"{system}, {length} tokens: status {done.returncode}\n{done.stderr[-4000:]}")
        return json.loads(file.read_text())


def parity(systems: list[str], packages: Path | None) -> list[dict[str, Any]]:
    found = []
    for length, clip in CASES:
        for system in systems:
            got = run(system, length, clip, STEPS, packages)
            found.append({"system": system, "length": length, "clip": clip} | got)
        again = run("plain", length, clip, STEPS, packages, threads=1)
        found.append({"system": "one thread", "length": length, "clip": clip} | again)
    return found


def timed_round(systems: list[str], packages: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    for length in LENGTHS:
        for system in systems:
            got = run(system, length, 1.0, WARM_UP + TIMED[length], packages)
            found.setdefault(system, {})[str(length)] = got["seconds"][WARM_UP:]
    return found


def about(packages: Path | None) -> dict[str, Any]:
    names = ("torch", "transformers", "accelerate", "deepspeed")
    found = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in names if name != "deepspeed" or packages}


def farthest(result: dict[str, Any], system: str, what: str = "losses") -> dict[tuple[int, float], float]:
    """The largest difference from `plain` over the ten steps, by case."""
    by_case = {(run["system"], run["length"], run["clip"]): run[what] for run in result["parity"]}
    return {
        (length, clip): max(abs(a - b) for a, b in zip(got, by_case["plain", length, clip], strict=True))
        for (name, length, clip), got in by_case.items()
        if name == system
    }


def median_s(result: dict[str, Any], system: str, length: int) -> float:
    return statistics.median(s for one in result["rounds"] for s in one[system][str(length)])


def table(result: dict[str, Any]) -> str:
    """Markdown: systems down; the largest difference of ten losses from plain's, and the median step, across."""
    heads = ["", *(f"{show_length(n)}, {_clipped(c)}" for n, c in CASES), *(f"step at {show_length(n)}" for n in LENGTHS)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for system in dict.fromkeys(run["system"] for run in result["parity"]):
        errors = farthest(result, system)
        cells = ["" if system == "plain" else f"{errors[case]:.1e}" for case in CASES]
        for length in LENGTHS:
            if system not in result["rounds"][0]:
                cells.append("")
                continue
            spent = median_s(result, system, length)
            cells.append(f"{spent * 1e3:.0f} ms, {spent / median_s(result, 'plain', length):.2f}x")
        lines.append("| " + " | ".join([system, *cells]) + " |")
    return "\n".join(lines)


def _clipped(clip: float) -> str:
    return f"clipped to {clip:g}" if clip < 1 else "not clipped"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    parser.add_argument("--packages", type=Path, help="a folder with DeepSpeed, which is left out without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas, plain among them")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(str(arguments.packages))
    if arguments.part:
        got = part(*json.loads(arguments.part))
        if int(os.environ.get("RANK", "0")) == 0:
            arguments.file.write_text(json.dumps(got))
        return 0
    systems = [name for name in arguments.systems.split(",") if arguments.packages or name != "deepspeed"]
    result = {"command": command_line(), "about": about(arguments.packages), "model": MODEL, "rounds": []}
    result["parity"] = parity(systems, arguments.packages)
    for _ in range(arguments.rounds):
        result["rounds"].append(timed_round(systems, arguments.packages))
        save(arguments.file, result)
        print(table(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
