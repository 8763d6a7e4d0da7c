"""Sampled rows of attention, forward and backward, and the loss, against fp32, at the lengths we claim.

    python -m benchmarks.exact results/exact.json --cells 8B:32K,8B:128K,8B:512K,1B:1M

Attention runs as in a step: all heads of the model in bf16, in head groups. For the last key-value head and the query
heads that share it, sampled rows of out and dq, and of dk and dv, are compared with the formulas written out in fp32;
beside them stand the errors of FlashAttention as torch ships it, on those heads alone. The loss is head and
cross-entropy over all tokens, in tiles, with sampled rows of its gradient, against the same in fp32. An error is the
largest difference over the largest value.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.floor import SHAPES, Shape
from benchmarks.peers import about
from benchmarks.stamps import save
from benchmarks.step import ALLOCATOR, load, parse_cells, record, show_length
from ithaca.attention.kernels import KERNELS, QKV
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.attention.ulysses import UlyssesPlan, planned_attention
from ithaca.heads import split_heads
from ithaca.memory.head_loss import LossSpec, head_loss
from ithaca.mesh import init_mesh
from ithaca.sequence.layout import SequenceLayout

ROWS = 64
# Scores are formed for this many pairs at once.
PAIRS = 2**28
LOSS_TILE = 4096


def reference_rows(
    q_SD: Tensor, k_SD: Tensor, v_SD: Tensor, dout_SD: Tensor, rows: Tensor, scale: float
) -> list[Tensor]:
    """out and dq of the queries `rows` of one head, causal, in fp32."""
    q, dout = q_SD[rows].float(), dout_SD[rows].float()
    scores = (q @ k_SD.float().t()) * scale
    later = torch.arange(len(k_SD), device=q.device)[None] > rows[:, None]
    weights = scores.masked_fill_(later, float("-inf")).softmax(-1)
    out = weights @ v_SD.float()
    dscores = weights * (dout @ v_SD.float().t() - (dout * out).sum(-1, keepdim=True))
    return [out, (dscores @ k_SD.float()) * scale]


def reference_columns(
    q_SD: Tensor, k_SD: Tensor, v_SD: Tensor, dout_SD: Tensor, columns: Tensor, scale: float
) -> list[Tensor]:
    """dk and dv of the keys `columns`, in order, that one query head gives them, in fp32: every query that sees one of
    them is visited once."""
    length = len(q_SD)
    k, v = k_SD.float(), v_SD.float()
    dk, dv = torch.zeros_like(k[columns]), torch.zeros_like(v[columns])
    start = int(columns[0])
    while start < length:
        # The most rows whose scores, over the keys up to the last of them, are PAIRS.
        most = int((math.sqrt(start * start + 4 * PAIRS) - start) / 2)
        rows = slice(start, min(start + max(1, most), length))
        q, dout = q_SD[rows].float(), dout_SD[rows].float()
        scores = (q @ k[: rows.stop].t()).mul_(scale)
        own = scores[:, start:]
        own.masked_fill_(torch.ones_like(own, dtype=torch.bool).triu_(1), float("-inf"))
        weights = scores.softmax(-1)
        delta = (dout * (weights @ v[: rows.stop])).sum(-1, keepdim=True)
        seen = int((columns < rows.stop).sum())
        chosen = weights[:, columns[:seen]]
        dv[:seen] += chosen.t() @ dout
        dk[:seen] += (chosen * (dout @ v[columns[:seen]].t() - delta)).t() @ q * scale
        start = rows.stop
    return [dk, dv]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


NAMES = ("out", "dq", "dk", "dv")


def reference(heads: list[Tensor], sampled: Tensor, scale: float) -> list[Tensor]:
    """out and dq `[h, r, D]`, dk and dv `[1, r, D]` of the sampled rows of query heads that share one key-value head."""
    q_ShD, k_SD, v_SD, dout_ShD = heads
    rows, sums = [], []
    for head in range(q_ShD.shape[1]):
        one = (q_ShD[:, head], k_SD, v_SD, dout_ShD[:, head])
        rows.append(reference_rows(*one, sampled, scale))
        sums.append(reference_columns(*one, sampled, scale))
    return [torch.stack([r[i] for r in rows]) for i in (0, 1)] + [sum(c[i] for c in sums)[None] for i in (0, 1)]


def attention_errors(
    shape: Shape, length: int, groups: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Errors of out, dq, dk, dv on sampled rows, ours and FlashAttention's."""
    generator = torch.Generator(device).manual_seed(5)
    q, k, v, dout = (
        torch.randn(1, length, n, shape.head_size, device=device, dtype=dtype, generator=generator)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    spec = AttentionSpec(shape.head_size**-0.5)
    split = split_heads(shape.heads, shape.kv_heads, 1)
    group = init_mesh(sp=1, device=device.type).sp_group
    plan = UlyssesPlan(
        SequenceLayout.whole_rows(1, length, 1), spec, split, min(groups, split.max_head_groups), "auto", 0, group
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = planned_attention(leaves[0], leaves[1], leaves[2], None, plan, None)
    grads = torch.autograd.grad(out, leaves, dout)
    own, last = slice(-(shape.heads // shape.kv_heads), None), slice(-1, None)
    cut = [x.detach()[:, :, heads].contiguous() for x, heads in ((q, own), (k, last), (v, last), (dout, own))]
    ours = [x.detach()[:, :, heads].clone() for x, heads in zip((out, *grads), (own, own, last, last), strict=True)]
    del q, k, v, dout, out, grads, leaves
    sampled = torch.randperm(length, generator=generator, device=device)[:ROWS].sort().values
    wanted = reference([cut[0][0], cut[1][0, :, 0], cut[2][0, :, 0], cut[3][0]], sampled, spec.scale)
    found = {"groups": plan.groups, "error": _errors(ours, wanted, sampled)}
    flash = KERNELS["flash"]
    if flash.refusal(cut[0], cut[2], spec) is None:
        qkv = QKV(*cut[:3])
        out, lse = flash.forward(qkv, spec)
        grads = flash.backward(cut[3], qkv, out, lse, spec)
        found["flash_error"] = _errors([out, *grads], wanted, sampled)
    return found


def _errors(got_1ShD: list[Tensor], wanted: list[Tensor], sampled: Tensor) -> dict[str, float]:
    pairs = zip(NAMES, got_1ShD, wanted, strict=True)
    return {name: error(got[0, sampled].transpose(0, 1), want) for name, got, want in pairs}


def loss_errors(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The summed loss over `length` tokens and sampled rows of its gradient."""
    generator = torch.Generator(device).manual_seed(6)
    hidden, weight = (
        torch.randn(n, shape.hidden, device=device, dtype=dtype, generator=generator) for n in (length, shape.vocab)
    )
    weight = (weight * shape.hidden**-0.5).requires_grad_(False)
    targets = torch.randint(0, shape.vocab, (length,), device=device, generator=generator)
    leaf = hidden[None].requires_grad_()
    total, _ = head_loss(leaf, weight, None, targets[None], LOSS_TILE, LossSpec(), fuse=device.type == "cuda")
    [grad] = torch.autograd.grad(total, leaf)
    exact, sampled = (
        torch.zeros((), dtype=torch.float64, device=device),
        torch.arange(0, length, max(1, length // ROWS)),
    )
    for start in range(0, length, LOSS_TILE):
        logits = hidden[start : start + LOSS_TILE].float() @ weight.float().t()
        exact += functional.cross_entropy(logits, targets[start : start + LOSS_TILE], reduction="sum").double()
    rows = hidden[sampled].float() @ weight.float().t()
    dlogits = rows.softmax(-1) - functional.one_hot(targets[sampled], shape.vocab)
    return {
        "loss": abs(float(total.detach()) / float(exact) - 1),
        "dhidden": error(grad[0, sampled], dlogits @ weight.float()),
    }


def measure(model: str, length: int, groups: int, device: torch.device) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, started = SHAPES[model], time.perf_counter()
    found = attention_errors(shape, length, groups, device, dtype)
    found["loss_error"] = loss_errors(shape, length, device, dtype)
    return found | {"outcome": "done", "seconds": time.perf_counter() - started, "machine": about(device)}


def line(cell: dict[str, Any]) -> str:
    parts = [f"{cell['model']}, {show_length(cell['length'])}, {cell['groups']} head groups:"]
    for name, value in cell["error"].items():
        beside = f" (flash {cell['flash_error'][name]:.1e})" if "flash_error" in cell else ""
        parts.append(f"{name} {value:.1e}{beside},")
    return " ".join([*parts, *(f"{name} {value:.1e}" for name, value in cell["loss_error"].items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--cells", default="", help="model:length, separated by commas")
    parser.add_argument("--groups", type=int, default=4, help="head groups, at most one a key-value head")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(ALLOCATOR)
    result = load(arguments.file)
    for model, length in parse_cells(arguments.cells):
        cell = {"system": "ithaca", "model": model, "length": length, "settings": {}}
        record(result, "exact", cell, measure(model, length, arguments.groups, torch.device(arguments.device)))
        save(arguments.file, result)
    print("\n".join(line(cell) for cell in result["cells"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
