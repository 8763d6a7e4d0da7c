"""Jobs that plans are compared on: seeded random ones, and those of the rehearsals."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ithaca.planning.machine.hardware import DEVICES
from ithaca.planning.memory_plan import Decisions, Job
from ithaca.planning.model.known_models import find_model, known_names
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.traffic import Machine
from tests.planning.machines import machine

REHEARSALS = Path(__file__).parents[3] / "benchmarks/results/rehearsals.json"


class DrawnJob(NamedTuple):
    """One job with the budgets and the machine that it is planned for."""

    sizes: ModelSizes
    job: Job
    device_budget: int
    host_budget: int
    decided: Decisions
    machine: Machine


@cache
def _known(name: str) -> ModelSizes:
    known = find_model(name)
    assert known is not None
    return known.sizes


def _made_up(draw: random.Random) -> ModelSizes:
    """Return the sizes of a model that nobody has published: odd head counts, windows, experts."""
    kv_heads, head_size = draw.choice((1, 2, 4, 8)), draw.choice((64, 96, 128, 256))
    heads, layers = kv_heads * draw.choice((1, 2, 4, 6, 8)), draw.randint(2, 100)
    hidden = draw.choice((512, 1536, 2560, 4096, 6144))
    config: dict[str, Any] = {
        "model_type": draw.choice(("llama", "qwen3", "mistral", "gemma2", "mixtral", "phi", "starcoder2")),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": int(hidden * draw.choice((2, 2.75, 4))),
        "vocab_size": draw.choice((32_000, 128_256, 262_144)),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if draw.random() < 0.3:
        every = draw.choice((2, 4, 6))
        config |= {
            "sliding_window": draw.choice((512, 4096)),
            "layer_types": ["sliding_attention" if i % every else "full_attention" for i in range(layers)],
        }
    if config["model_type"] == "mixtral":
        config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    return ModelSizes.from_config(config)


def _decided(draw: random.Random, count: int) -> Decisions:
    if draw.random() < 0.85:
        return Decisions()
    return draw.choice(
        (
            Decisions(offload=False),
            Decisions(offload=True),
            Decisions(layers="save"),
            Decisions(layers="recompute"),
            Decisions(layers=("save",) * (count // 2) + ("recompute",) * (count - count // 2)),
            Decisions(mlp_tile=8192),
            Decisions(offload=(True,) * (count // 2) + (False,) * (count - count // 2)),
        )
    )


def random_job(seed: int) -> DrawnJob:
    """Return the job of a seed: 4K to 4M tokens on one card to some nodes, from tight to loose budgets."""
    draw = random.Random(seed)
    sizes = _known(draw.choice(known_names())) if draw.random() < 0.7 else _made_up(draw)
    if draw.random() < 0.2:
        sizes = sizes.with_lora(draw.choice((8, 64)))
    card = draw.choice(DEVICES)
    gpus, nodes = draw.choice((1, 2, 4, 8, 8)), draw.choice((1, 1, 1, 2, 4, 16))
    while sizes.total * 8 > card.memory * gpus * nodes and nodes < 32:
        nodes *= 2
    sp = draw.choice([n for n in (1, 2, 4, 8, 16, 32, 64) if n <= sizes.heads and n <= gpus * nodes])
    dp = gpus * nodes // sp
    optimizer = draw.choice(("adamw", "adamw", "adamw8bit", "bf16_sr", "none"))
    width = 2 if optimizer in ("bf16_sr", "none") else draw.choice((2, 4, 4))
    # A model that is large for its cards is often kept on the host, and has a large one: else few jobs fit.
    large = sizes.total * 2 * width + sizes.trainable * 2 * width > card.memory * gpus * nodes // 2
    on_host = draw.random() < (0.8 if large else 0.2)
    weights = (
        "none" if gpus * nodes == 1 and not on_host else draw.choice(("shard", "shard", "shard", "shard", "replicate"))
    )
    # From a fifth of the memory to ten times as much for what layers save.
    length = 10 ** draw.uniform(-0.7, 1.0) * card.memory * sp / (4 * len(sizes.layers) * sizes.hidden)
    length = min(max(int(length), 4 * 1024), 4 * 1024 * 1024)
    job = Job(
        length=length,
        batch=draw.choice((1, 1, 1, 1, 1, 1, 4)),
        sp=sp,
        dp=dp,
        weights=weights,
        replicas=draw.choice((1, 1, 1, nodes)) if weights == "shard" else 1,
        weight_bytes=width,
        gradient_bytes=4 if sizes.adapters else width,
        adapter_bytes=draw.choice((2, 4)) if sizes.adapters else 2,
        optimizer=optimizer,
        accumulate=draw.random() < 0.3,
        fused=draw.random() < 0.8,
        loss_in_place=draw.random() < 0.5,
        whole_logits=draw.random() < 0.05,
        weights_on_host=on_host,
        gradients_on_host=on_host,
        optimizer_on_host=on_host,
    )
    device = int(draw.uniform(0.4, 1.0) * card.memory)
    host = int(draw.choice((1.0, 4.0, 16.0) if on_host else (0.0, 0.1, 0.3, 1.0, 1.0)) * card.host_memory)
    return DrawnJob(sizes, job, device, host, _decided(draw, len(sizes.layers)), machine(card.name, gpus, nodes))


@cache
def rehearsed_jobs() -> list[DrawnJob]:
    """Return the jobs that were rehearsed on a card, with the budgets they had then."""
    found = []
    for cell in json.loads(REHEARSALS.read_text())["cells"]:
        if cell["outcome"] != "done":
            continue
        said, on = cell["predicted"], cell["machine"]
        name = cell["model"]
        if name == "experts":
            from benchmarks.rehearsal_plan import sizes_of

            sizes = sizes_of(name)
        else:
            sizes = _known(name)
        device, host = said["budgets"]
        found.append(
            DrawnJob(
                sizes, Job(**said["job"]), device, host, Decisions(), machine(on["device"], on["gpus"], on["nodes"])
            )
        )
    return found
