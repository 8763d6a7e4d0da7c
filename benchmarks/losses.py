"""Head and cross-entropy, forward and backward, in every maintained implementation installed here: time, memory, error.

    python -m benchmarks.losses results/losses.json --packages DIR

ithaca     `memory.loss.head_loss`, 4,096 tokens a tile, through Liger's kernel of a tile
compiled   the same through what the compiler makes of a tile, as it is without Liger
eager      the same without the compiler
liger      LigerFusedLinearCrossEntropyFunction; the weight's gradient is summed over its chunks in bf16
liger-fp32 the same, summed in fp32 as Ithaca does
torch      torch.nn.functional.linear_cross_entropy in chunks, where this torch has it
whole      logits of all tokens and torch's cross_entropy

Hidden states and the head's weight in bf16, both wanting gradients; sizes of Llama-3 1B and 8B, and a large vocabulary
with few values; on a CPU, which is for trying the program, a small one in fp32. Memory is the peak beside what is given
and what is asked for. Errors are of 4,096 tokens against the same in fp32, relative to the largest value; those of
Ithaca's also with softcap, label smoothing and z-loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.floor import seconds, synchronize
from benchmarks.kernels import machine
from benchmarks.stamps import mark, save
from ithaca.memory import liger as tile
from ithaca.memory.head_loss import LossSpec, head_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
# Name: (tokens, hidden size, vocabulary).
SHAPES = {"1B": (32_768, 2048, 128_256), "8B": (32_768, 4096, 128_256), "Gemma-1B": (32_768, 1152, 262_144)}
ON_CPU = {"small": (8192, 256, 32_000)}
# How the table calls them.
LONG = {
    "ithaca": "Ithaca, a tile by Liger's kernel",
    "compiled": "Ithaca, a tile compiled",
    "eager": "Ithaca, a tile uncompiled",
    "liger": "Liger, weight's gradient summed in bf16",
    "liger-fp32": "Liger, summed in fp32",
    "torch": "torch's linear_cross_entropy",
    "whole": "all logits at once",
}
TRIED = 4096
TILE = 4096
PLAIN = LossSpec()
# Takes (hidden states, the head's weight, targets) and gives the summed loss.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SPECS = {
    "plain": PLAIN,
    "softcap": LossSpec(softcap=30.0),
    "smoothing": LossSpec(smoothing=0.1),
    "z": LossSpec(z=1e-3),
    "all": LossSpec(softcap=30.0, smoothing=0.1, z=1e-3),
}


def ithaca(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, *, fuse: bool, spec: LossSpec = PLAIN) -> Tensor:
    return head_loss(hidden_TC[None], weight_VC, None, targets_T[None], TILE, spec, fuse=fuse)[0]


def compiled(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor) -> Tensor:
    with patch.object(tile, "tile_kernel", lambda: None):
        return ithaca(hidden_TC, weight_VC, targets_T, fuse=True)


def liger(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, *, sums: torch.dtype | None = None) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # Input, weight, target, then: bias, class weights, ignored, z, smoothing, reduction, softcap, return z, sums' dtype.
    given = LigerFusedLinearCrossEntropyFunction.apply(
        hidden_TC, weight_VC, targets_T, None, None, -100, 0.0, 0.0, "sum", None, False, sums
    )
    loss: Tensor = given[0] if isinstance(given, tuple) else given
    return loss


def chunked(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor) -> Tensor:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return F.linear_cross_entropy(hidden_TC, weight_VC, targets_T, reduction="sum", options=LinearCrossEntropyOptions())


def whole(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, *, spec: LossSpec = PLAIN) -> Tensor:
    logits_TV = F.linear(hidden_TC, weight_VC).float()
    if spec.softcap is not None:
        logits_TV = spec.softcap * torch.tanh(logits_TV / spec.softcap)
    total = F.cross_entropy(logits_TV, targets_T, reduction="sum", label_smoothing=spec.smoothing)
    return total + spec.z * logits_TV.logsumexp(-1).square().sum() if spec.z else total


def systems() -> dict[str, Loss]:
    """Return the implementations of the loss that are installed here."""
    found: dict[str, Loss] = {}
    if tile.tile_kernel() is not None:
        found = {"ithaca": partial(ithaca, fuse=True), "liger": liger, "liger-fp32": partial(liger, sums=torch.float32)}
    else:
        print("liger: not installed, or not a version whose kernel is known here")
    found |= {"compiled": compiled, "eager": partial(ithaca, fuse=False)}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = chunked
    else:
        print(f"torch: {torch.__version__} has no linear_cross_entropy")
    return found | {"whole": whole}


def inputs(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden, vocabulary = shape
    draw = torch.Generator(DEVICE).manual_seed(0)
    x_TC = torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE, generator=draw)
    weight_VC = torch.randn(vocabulary, hidden, device=DEVICE, dtype=DTYPE, generator=draw) * 0.02
    return x_TC, weight_VC, torch.randint(0, vocabulary, (tokens,), device=DEVICE, generator=draw)


def gradients(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in given[:2]]
    mean = loss(leaves[0], leaves[1], given[2]) / len(given[2])
    dx, dw = torch.autograd.grad(mean, leaves)
    return {"loss": mean.detach(), "hidden": dx, "weight": dw}


def measured(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    call = partial(gradients, loss, given)
    call()
    synchronize(DEVICE)
    found: dict[str, float] = {}
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        synchronize(DEVICE)
        asked = sum(x.nbytes for x in given[:2])
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - before - asked) / 2**30
    return found | {"seconds": seconds(call, DEVICE)}


def errors(loss: Loss, given: tuple[Tensor, Tensor, Tensor], spec: LossSpec = PLAIN) -> dict[str, float]:
    few = given[0][:TRIED], given[1], given[2][:TRIED]
    got = gradients(loss, few)
    exact = gradients(partial(whole, spec=spec), (few[0].float(), few[1].float(), few[2]))
    return {name: float((got[name].float() - exact[name]).abs().max() / exact[name].abs().max()) for name in exact}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    parser.add_argument("--packages", type=Path, help="a folder with Liger")
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(str(arguments.packages))
    about = machine() if DEVICE.type == "cuda" else {"device": "CPU", "torch": torch.__version__}
    if find_spec("liger_kernel"):
        about["liger-kernel"] = metadata.version("liger-kernel")
    result: dict[str, Any] = {"machine": about, "tile": TILE, "rows": []}
    for name, shape in (SHAPES if DEVICE.type == "cuda" else ON_CPU).items():
        given = inputs(shape)
        for system, loss in systems().items():
            row: dict[str, Any] = {"system": system, "shape": name, "tokens": len(given[0])}
            try:
                row |= measured(loss, given) | {"errors": errors(loss, given)}
            except torch.OutOfMemoryError:
                row["outcome"] = "out of memory"
            result["rows"].append(row)
            mark(result, "losses")
            save(arguments.file, result)
            print(told(row), flush=True)
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    result["specs"] = {name: errors(partial(ithaca, fuse=True, spec=spec), given, spec) for name, spec in SPECS.items()}
    mark(result, "losses")
    save(arguments.file, result)
    print("\n".join(f"{name}: off by {_shown(found)}" for name, found in result["specs"].items()))
    print(table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """Time, memory and the weight's gradient's largest error, one line an implementation."""
    rows = result["rows"]
    shapes, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("shape", "system"))
    lines = ["| | " + " | ".join(shapes) + " | weight's gradient off by |", "|---" * (len(shapes) + 2) + "|"]
    for name in names:
        own = {row["shape"]: row for row in rows if row["system"] == name and "outcome" not in row}
        cells = [
            f"{own[shape]['seconds'] * 1e3:.0f} ms, {own[shape].get('peak_gib', 0):.2f} GiB"
            if shape in own
            else "ran out"
            for shape in shapes
        ]
        worst = max((row["errors"]["weight"] for row in own.values()), default=0.0)
        lines.append(f"| {LONG[name]} | " + " | ".join(cells) + f" | {worst:.2%} |")
    return "\n".join(lines)


def told(row: dict[str, Any]) -> str:
    head = f"{row['shape']}, {row['tokens']:,} tokens, {row['system']}: "
    if "outcome" in row:
        return head + str(row["outcome"])
    memory = f", {row['peak_gib']:.2f} GiB" if "peak_gib" in row else ""
    return f"{head}{row['seconds'] * 1e3:.0f} ms{memory}; off by {_shown(row['errors'])}"


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in found.items())


if __name__ == "__main__":
    raise SystemExit(main())
