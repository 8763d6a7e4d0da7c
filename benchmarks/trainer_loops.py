"""The systems of `benchmarks.trainer_peer`: one loop each over the same rows, run in this process or on every rank.

plain            transformers as it comes (SDPA) in one process with two threads
trainer          Hugging Face's Trainer over the same, in one process with two threads
ithaca           `init_mesh(sp=2)`, `parallelize`, `causal_loss`: two ranks over gloo with one thread each
ithaca-trainer   Trainer with `UlyssesConfig(sp_size=2)`, on the same two ranks
fp64             `plain` with every cast to fp32 made one to fp64: what all of them round
deepspeed        `UlyssesSPAttentionHF`, `UlyssesSPDataLoaderAdapter`, ZeRO-3 and the loss of its tutorial, likewise

All build one small fp32 Llama from one seed and learn the same rows, a row a step, with fused AdamW: forward, backward,
clipping and optimizer. A third of a row's labels is -100, so that shards have unequal numbers of targets.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.verify.fp64 import compute_in_fp64

MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False,
}  # fmt: skip
RATE = 1e-3
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


def plain(clip: float, dtype: torch.dtype = torch.float32) -> Step:
    model = build().to(dtype)
    optimizer = adamw(model)
    return lambda batch, norm: _updated(model, optimizer, model(**batch).loss, norm)


def ithaca_step(clip: float, **settings: Any) -> Step:
    import ithaca

    mesh = ithaca.init_mesh(sp=2)
    model = ithaca.parallelize(build(), mesh, **settings)
    optimizer = adamw(model)
    return lambda batch, norm: _updated(model, optimizer, ithaca.causal_loss(model, batch, mesh), norm)


def deepspeed_step(clip: float) -> Step:
    """Return a step of DeepSpeed, set up as in its tutorial."""
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
    yield from UlyssesSPDataLoaderAdapter(own, rank, group, size, torch.device("cpu"))


LOOPS: dict[str, Callable[[float], Step]] = {
    "plain": plain,
    "fp64": partial(plain, dtype=torch.float64),
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


def part(system: str, length: int, clip: float, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Run the steps of one process, or of one rank of two; rows are drawn from `seed`."""
    rows = [row(seed * 1_000_003 + index, length) for index in range(steps)]
    if system in TRAINERS:
        return trainer_loop(system, rows, clip)
    with compute_in_fp64() if system == "fp64" else nullcontext():
        return loop(system, rows, clip)
