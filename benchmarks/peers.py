"""The systems compared by `benchmarks.step`, and one cell of its table measured in this process.

    python -m benchmarks.peers cell.json result.json [--packages DIR]

transformers  SDPA as torch chooses it, gradient checkpointing
liger         the same with Liger's RoPE, RMSNorm, SwiGLU and fused head + loss
alst-fa2      DeepSpeed ALST at sp=1: Liger without SwiGLU, `TiledMLP` with ceil(tokens / hidden) tiles, checkpointed
              layer inputs offloaded, FlashAttention-2 through SDPA
alst-cudnn    the same with SDPA held to cuDNN
...-fa4       transformers, liger and ALST with transformers' attn_implementation="flash_attention_4"
ithaca        `init_mesh(sp=1)`, `parallelize(model, mesh, memory_budget=...)`, `causal_loss`
floor         see `benchmarks.floor`
All build the same model from one seed and learn the same ids, so loss and gradient norm must agree between them.

ALST's settings. offload: "deepspeed" is the asynchronous one that DeepSpeed ships (`offload_activations`; it keeps what
it brought back on the device until the backward pass ends); "recipe" is what ALST's recipes patch into torch: a
plain copy to the host, and back when the layer is recomputed, written here in a few lines. loss: "liger", or
"tiled" for DeepSpeed's `TiledFusedLogitsLoss`. At sp=1 no engine is launched: ZeRO would have nothing to shard.

Where nothing can be installed, peers travel in a folder (--packages; it comes last in the path, so that what is
installed wins over what is carried):
    DS_BUILD_OPS=0 pip install --no-deps --target DIR deepspeed==0.19.8 liger-kernel hjson py-cpuinfo einops
    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels \
        pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection typing-extensions msgpack psutil
    for wheel in wheels/*.whl; do unzip -qo $wheel -d DIR; done
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.documents import positions
from benchmarks.floor import SHAPES, Shape, build_model, floor, step_flops, synchronize
from benchmarks.kernels import machine

# Whole ids [1, S] on the host -> the loss; gradients are left in .grad.
Step = Callable[[Tensor], Tensor]
Settings = dict[str, Any]
GIB = 2**30
ALST = {"offload": "deepspeed", "loss": "liger"}
BACKENDS = {"alst-fa2": SDPBackend.FLASH_ATTENTION, "alst-cudnn": SDPBackend.CUDNN_ATTENTION}
# With FlashAttention-4 in transformers' attention: the peers as they are with Ithaca's fastest kernel.
FA4 = {"transformers-fa4": "transformers", "liger-fa4": "liger", "alst-fa4": "alst-cudnn"}
SYSTEMS = ("transformers", "liger", "alst-fa2", "alst-cudnn", *FA4, "ithaca", "floor")
PACKAGES = ("transformers", "deepspeed", "liger-kernel", "flash-attn-4")


def make_step(system: str, model: Any, settings: Settings) -> Step:
    """Return a function that runs one step of `system`; changes the model."""
    if system in FA4:
        model.set_attn_implementation("flash_attention_4")
        system = FA4[system]
    if system == "ithaca":
        return ithaca_step(model, settings)
    if system == "transformers":
        return checkpointed_step(model)
    if system == "liger":
        apply_liger(model, swiglu=True)
        return checkpointed_step(model)
    return alst_step(model, settings, BACKENDS[system])


def ithaca_step(model: nn.Module, settings: Settings) -> Step:
    import ithaca
    from ithaca.models.support import base_model, decoder_layers

    mesh = ithaca.init_mesh(sp=1)
    # A step has no optimizer here, so none is left room for.
    memory = settings.get("memory")
    if isinstance(memory, dict):
        memory = one_mode(memory, len(decoder_layers(base_model(model))))
    given: Settings = {"memory": memory, "optimizer": "none"} | {n: settings[n] for n in ("kernel",) if n in settings}
    if settings.get("budget_gib") is not None:
        given["memory_budget"] = int(settings["budget_gib"] * GIB)
    ithaca.parallelize(model, mesh, **given)

    def step(ids: Tensor) -> Tensor:
        batch = {"input_ids": ids}
        if "documents" in settings:
            batch["position_ids"] = positions(settings["documents"], ids.shape[1])
        loss = ithaca.causal_loss(model, batch, mesh)
        loss.backward()
        return loss.detach()

    return step


def one_mode(asked: Settings, layers: int) -> Any:
    """A plan with one mode for all layers: {"mode": "save", "offload": true, "mlp_tile": 4096, "loss_tile": 4096}."""
    import ithaca

    mode, offload = (asked["mode"],) * layers, (bool(asked.get("offload")),) * layers
    sizes = {name: asked[name] for name in ("mlp_tile", "loss_tile", "head_groups") if name in asked}
    return ithaca.MemoryPlan(mode, offload, **sizes)


def ithaca_figures(model: nn.Module) -> dict[str, Any]:
    """Return the plan in force and the bytes that it pinned outside torch's allocator."""
    from ithaca.models.binding_state import binding_of

    installed: Any = binding_of(model).memory
    if installed is None:
        return {}
    pinned = 0 if installed.store is None else installed.store.pinned
    return {"plan": installed.planner.plan.summary(), "pinned_gib": pinned / GIB}


def checkpoint_layers(model: Any) -> None:
    """Switch on transformers' gradient checkpointing, which has another name from 5.23 on."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{name}_checkpointing_enable")
    enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})


def checkpointed_step(model: Any) -> Step:
    checkpoint_layers(model)

    def step(ids: Tensor) -> Tensor:
        ids = ids.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step


def apply_liger(model: nn.Module, *, swiglu: bool) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama as apply

    apply(swiglu=swiglu, model=model)


def alst_step(model: Any, settings: Settings, backend: SDPBackend) -> Step:
    """DeepSpeed ALST's parts put together as its tutorial does; SDPA is left alone on a CPU."""
    settings = ALST | settings
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(tiled_mlp, layer.mlp)
    if settings["loss"] == "liger":
        apply_liger(model, swiglu=False)
    step = checkpointed_step(model) if settings["loss"] == "liger" else tiled_loss_step(model)
    offload: Any = contextlib.nullcontext()
    if settings["offload"] == "recipe":
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = _OffloadedCheckpoint.apply
    else:
        from deepspeed.runtime.activation_checkpointing import offload_activations

        # One object for all steps: its pinned buffers are used again.
        offload = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()

    def whole(ids: Tensor) -> Tensor:
        attention = sdpa_kernel(backend) if model.device.type == "cuda" else contextlib.nullcontext()
        with attention, offload:
            return step(ids)

    return whole


def tiled_mlp(self: Any, x: Tensor) -> Tensor:
    """A LlamaMLP's forward through DeepSpeed's TiledMLP, tiled as its documentation says."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(mlp: Any, part: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(part)) * mlp.up_proj(part))

    weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
    return TiledMLP.apply(forward, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)


def tiled_loss_step(model: Any) -> Step:
    """Head and loss through DeepSpeed's TiledFusedLogitsLoss, in as many tiles as the MLP has."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    checkpoint_layers(model)

    def step(ids: Tensor) -> Tensor:
        ids = ids.to(model.device)
        x = model.model(input_ids=ids).last_hidden_state
        targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
        count = ids.numel() - ids.shape[0]

        def loss_of(head: nn.Module, part: Tensor, wanted: Tensor) -> Tensor:
            return functional.cross_entropy(head(part).float(), wanted, reduction="sum") / count

        tiles = math.ceil(x.shape[1] / x.shape[2])
        # The sum over tiles: its "mean" is one of tile means, wrong where a tile is short.
        head = model.lm_head
        loss = TiledFusedLogitsLoss.apply(loss_of, head, x, targets, None, tiles, [head.weight], "sum")
        loss.backward()
        return loss.detach()

    return step


class _OffloadedCheckpoint(torch.autograd.Function):
    """Return a layer whose input is offloaded to the host in forward and copied back for recompute."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.layer, ctx.device = layer, x.device
        ctx.save_for_backward(x.detach().to("cpu"))
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].to(ctx.device).detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def measure(cell: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Run the cell; `keep` is called after every step, so that a cell stopped in the middle leaves what it had."""
    device, length, shape = torch.device(cell["device"]), cell["length"], SHAPES[cell["model"]]
    shape = replace(shape, layers=cell["settings"].get("layers", shape.layers))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {"machine": about(device), "outcome": "not done"}
    try:
        if cell["system"] == "floor":
            result |= {"outcome": "done"} | floor(shape, length, device, dtype)
            result["model_tflops"] = step_flops(shape, length) / result["seconds"] / 1e12
        else:
            run_steps(cell, build_model(shape, length, device, dtype), shape, result, keep)
    except Exception as error:
        traceback.print_exc()
        result |= {"outcome": outcome_of(error), "error": f"{type(error).__name__}: {error}"[:4000]}
        result |= memory(device)
    keep(result)


def run_steps(
    cell: dict[str, Any], model: nn.Module, shape: Shape, result: dict[str, Any], keep: Callable[[dict[str, Any]], None]
) -> None:
    device = torch.device(cell["device"])
    ids = torch.randint(0, shape.vocab, (1, cell["length"]), generator=torch.Generator().manual_seed(1))
    before = host_gib("VmRSS")
    step = make_step(cell["system"], model, cell["settings"])
    if cell["short"]:
        step(ids[:, : cell["short"]])
    steps: list[float] = []
    for number in range(cell["warmup"] + cell["repeat"]):
        model.zero_grad(set_to_none=True)
        if number == cell["warmup"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        started = time.perf_counter()
        loss = step(ids)
        synchronize(device)
        spent = time.perf_counter() - started
        if number < cell["warmup"]:
            result["warmup_s"] = spent
            continue
        steps.append(spent)
        result |= {"seconds": min(steps), "steps_s": steps, "loss": float(loss)} | memory(device)
        if cell["system"] == "ithaca":
            result |= ithaca_figures(model)
        if "documents" not in cell["settings"]:
            result["model_tflops"] = step_flops(shape, cell["length"]) / min(steps) / 1e12
        result["host_growth_gib"] = host_gib("VmHWM") - before
        keep(result)
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.float32)) for g in gradients(model).values()]
    result["gradient_norm"] = math.hypot(*norms)
    if cell.get("gradients"):
        torch.save(gradients(model), cell["gradients"])
    result["outcome"] = "done"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, whole: in a world of one a DTensor's local part is all of it."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(g, "_local_tensor", g) for name, g in found.items()}


def outcome_of(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return "out of memory"
        error = error.__cause__
    return "failed"


def memory(device: torch.device) -> dict[str, float]:
    """Peaks: device since the last reset, pinned host memory of the process as torch's allocator rounds it."""
    if device.type != "cuda":
        return {}
    peaks = {
        "allocated_gib": torch.cuda.max_memory_allocated(),
        "reserved_gib": torch.cuda.max_memory_reserved(),
        "pinned_gib": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
    }
    return {name: peak / GIB for name, peak in peaks.items()}


def host_gib(name: str) -> float:
    """Return a line of /proc/self/status, which includes pinned memory outside torch's allocator."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024 / GIB


def about(device: torch.device) -> dict[str, Any]:
    found = machine() if device.type == "cuda" else {"device": platform.machine(), "torch": torch.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {name: value for name, value in found.items() if name != "command"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", type=Path, help="JSON: system, model, length, settings, warmup, repeat, short, device")
    parser.add_argument("result", type=Path, help="where the JSON goes")
    parser.add_argument("--packages", type=Path, help="a folder with packages that are not installed")
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(str(arguments.packages.resolve()))

    def keep(result: dict[str, Any]) -> None:
        partial = arguments.result.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.replace(arguments.result)

    measure(json.loads(arguments.cell.read_text()), keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
