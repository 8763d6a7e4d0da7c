"""The model of a rehearsal: one rank's shards of some of its layers, with random weights.

    job (RankJob) -> modules on the meta device -> keep_layers -> parallelize -> materialize, fill_weights

Invariant: the model is built, parallelized and put under its plan by the functions that training uses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.config.schema import LoraSettings, OptimizerSettings
from ithaca.mesh import Mesh
from ithaca.models.bound import binding_of
from ithaca.models.files.pretrained import add_adapters, empty_model
from ithaca.models.files.read_weights import local
from ithaca.models.support import base_model, decoder_layers
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.state.weights.placement import OnHost

_DRAWN = 2**22


@dataclass(frozen=True, slots=True)
class RankJob:
    """The work of every rank of the job. `rows`: micro-batches of one sequence group and step.

    `away`: weights, gradients and optimizer state live on the host, or count as such. `fake`: on fake tensors.
    """

    config: Any
    length: int
    rows: int
    weights: torch.dtype
    compute: torch.dtype | None
    optimizer: OptimizerSettings
    on_host: OnHost = "nothing"
    away: bool = False
    replicas: int = 1
    kernel: str = "auto"
    lora: LoraSettings | None = None
    seed: int = 0
    fake: bool = False


def build(job: RankJob, layers: Sequence[int], plan: MemoryPlan, mesh: Mesh) -> nn.Module:
    """Return the rank's parallelized model of some layers, its weights still on the meta device."""
    model: nn.Module = keep_layers(empty_model(job.config, dtype=job.weights), layers)
    if job.lora is not None:
        model = add_adapters(model, job.lora, seed=job.seed)
    return parallelize(
        model,
        mesh,
        replicas=job.replicas,
        on_host=job.on_host,
        kernel=job.kernel,
        memory=plan,
        optimizer=job.optimizer.name,
        compute_dtype=job.compute,
    )


def keep_layers(model: Any, layers: Sequence[int]) -> Any:
    """Cut the model down to these of its layers, in their order, under a config of its own."""
    every = decoder_layers(model)
    if list(layers) == list(range(len(every))):
        return model
    blocks = _layer_list(model, every[0])
    del blocks[:]
    blocks.extend(every[index] for index in layers)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[index] for index in layers]
    text.num_hidden_layers = len(layers)
    for module in model.modules():
        if getattr(module, "config", None) is model.config:
            module.config = config
    for number, index in enumerate(layers):
        for module in every[index].modules():
            if "layer_idx" in module.__dict__:
                module.__dict__["layer_idx"] = number
            if "config" in module.__dict__:
                module.__dict__["config"] = config
    model.config = config
    return model


def _layer_list(model: nn.Module, first: nn.Module) -> nn.ModuleList:
    """Return the list that the model runs its layers from."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is first)


@contextmanager
def running_only(model: nn.Module, layers: Sequence[int]) -> Iterator[None]:
    """Inside, a forward pass runs these of the model's layers and no others."""
    every = decoder_layers(base_model(model))
    blocks, binding = _layer_list(model, every[0]), binding_of(model)
    whole, count = blocks._modules, binding.layers

    def put(modules: Any, layers: int) -> None:
        blocks._modules, binding.layers = modules, layers
        if binding.memory is not None:
            binding.memory.record_modules()

    put({str(number): every[index] for number, index in enumerate(layers)}, len(layers))
    try:
        yield
    finally:
        put(whole, count)


def one_of_each(config: Any, plan: MemoryPlan) -> list[int]:
    """Return one layer of each kind of attention and memory mode: each kind runs compiled code of its own.

    A layer whose input is rebuilt comes with the layers that its input is rebuilt from.
    """
    types = getattr(config, "layer_types", None) or [None] * len(plan.layers)
    kinds = list(zip(types, plan.layers, strict=True))
    first = {kinds.index(kind) for kind in kinds}
    return sorted({index for last in first for index in range(last - plan.chain[last], last + 1)})


def fill_weights(model: nn.Module) -> None:
    """Fill weights with values of a fresh model's size: matrices of small random numbers, vectors around one."""
    # One block over and over: drawing billions of numbers would take minutes.
    block = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02

    @cache
    def drawn(matrix: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        return (block if matrix else 1 + block).to(device, dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            own = local(parameter).view(-1)
            values = drawn(parameter.dim() > 1, own.device, own.dtype)
            for start in range(0, own.numel(), _DRAWN):
                own[start : start + _DRAWN].copy_(values[: own.numel() - start])
