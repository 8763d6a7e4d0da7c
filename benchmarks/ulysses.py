"""Ulysses on a GPU: its time around the attention kernel, and its error.

    python -m benchmarks.ulysses results/ulysses.json

pack      packing and unpacking for the exchange, against a plain copy of the same bytes
overhead  `ulysses_attention` at sp=1 against the kernel alone, 32K tokens, forward and backward
nccl      world of one: NCCL joined, the exchange sent through it, and a model trained a few steps
shared    2 and 4 ranks on this one GPU over gloo, every kernel: bf16 error against fp32, beside the error of the
          same attention on one device in bf16
Each part runs in its own process with a time limit, so that one failure does not stop the other parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels import machine
from benchmarks.stamps import mark, save
from ithaca.attention import exchange
from ithaca.attention.kernels import choose
from ithaca.attention.kernels.interface import QKV, AttentionSpec
from ithaca.attention.ulysses import ulysses_attention
from ithaca.heads import split_heads
from ithaca.mesh import init_mesh
from ithaca.sequence.layout import SequenceLayout

DEVICE = "cuda"
LIMIT = 240
SHAPES = [
    (131_072, 1, 32, 8, 128, 8),
    (32_768, 4, 32, 8, 128, 8),
    (131_072, 1, 28, 4, 128, 8),
    (131_072, 1, 32, 8, 64, 4),
]


def gpu_seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The time of one call in a row of `repeats`, the best of three rows, after a warm-up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return min(times)


def pack() -> list[dict[str, Any]]:
    """Bytes read and written a second, as a share of what a contiguous copy of the same size moves."""
    return [_pack_shares(*shape) for shape in SHAPES]


def _pack_shares(length: int, batch: int, heads: int, kv: int, size: int, sp: int) -> dict[str, Any]:
    split = split_heads(heads, kv, sp)
    lanes = [exchange.Lane(split.q, heads, size), *[exchange.Lane(split.kv, kv, size)] * 2]
    tensors = [torch.randn(batch, length, lane.heads, size, device=DEVICE, dtype=torch.bfloat16) for lane in lanes]
    row = {"tokens": length, "batch": batch, "heads": [heads, kv], "head_size": size, "sp": sp}
    ways = {"pack_share": lanes, "unpack_share": lanes[:1], "unpack_gradients_share": lanes}
    for name, travelling in ways.items():
        widths = [sum(lane.width(rank) for lane in travelling) for rank in range(sp)]
        wire = tensors[0].new_empty(length * batch * sum(widths)).normal_()
        copy_s = gpu_seconds(wire.clone)
        if name == "pack_share":
            spent = gpu_seconds(partial(exchange._pack, wire, tensors, travelling, widths))
            row["copy_TB_s"] = 2 * wire.nbytes / copy_s / 1e12
        else:
            # Gradients of kv heads that several ranks send are added.
            shared = [sum(end - start for start, end in lane.ranges) > lane.heads for lane in travelling]
            into = [x.float() if add else x for x, add in zip(tensors, shared, strict=False)]
            spent = gpu_seconds(partial(exchange._unpack, wire, travelling, widths, into, shared))
        row[name] = copy_s / spent
    return row


def overhead(length: int = 32_768) -> dict[str, Any]:
    """Forward and backward of one layer, Llama-3-8B heads, with and without Ulysses around the kernel."""
    mesh = init_mesh(sp=1)
    layout = SequenceLayout.whole_rows(1, length, 1)
    q, k, v = (torch.randn(1, length, n, 128, device=DEVICE, dtype=torch.bfloat16) for n in (32, 8, 8))
    dout = torch.randn_like(q)
    spec = AttentionSpec(scale=128**-0.5)
    kernel = choose("auto", q, v, spec)

    def alone() -> None:
        qkv = QKV(q, k, v)
        out, lse = kernel.forward(qkv, spec)
        kernel.backward(dout, qkv, out, lse, spec)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def through() -> None:
        torch.autograd.grad(ulysses_attention(*leaves, mesh, layout), leaves, dout)

    # Alternating, since a GPU under load changes its clock: a drift then meets both alike.
    pairs = [(gpu_seconds(alone, 5), gpu_seconds(through, 5)) for _ in range(5)]
    kernel_s, ulysses_s = (sorted(column)[2] for column in zip(*pairs, strict=True))
    ratios = sorted(u / a for a, u in pairs)
    return {"kernel": kernel.name, "tokens": length, "kernel_s": kernel_s, "ulysses_s": ulysses_s, "ratio": ratios[2]}


def nccl() -> dict[str, Any]:
    """A world of one over NCCL: the exchange gives back what went in, and a small model learns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import ithaca

    mesh = init_mesh(sp=1)
    x = torch.randn(2, 512, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    lane = exchange.Lane(split_heads(8, 8, 1).q, 8, 64)
    there = exchange.start_to_heads([x], [lane], mesh.sp_group).wait()
    back = exchange.start_to_tokens(there, [lane], mesh.sp_group, [torch.empty_like(x)], [False]).wait()[0]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = ithaca.parallelize(LlamaForCausalLM(config).to(torch.bfloat16), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 512, (1, 8192))
    losses = []
    for _ in range(5):
        loss = ithaca.causal_loss(model, {"input_ids": ids}, mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"backend": dist.get_backend(), "exchange_exact": bool((back == x).all()), "losses": losses}


def shared() -> list[dict[str, Any]]:
    """Runs under torchrun: errors of out, dq, dk, dv over all ranks, for every kernel that takes the case."""
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    mesh = init_mesh(sp=dist.get_world_size(), device="cuda:0")
    rows = []
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("causal", {}, ["cudnn", "flash", "flex", "blockwise"]),
        ("window", {"window": 100}, ["flash", "flex"]),
        ("softcap", {"softcap": 5.0}, ["flex"]),
        ("both directions", {"causal": False}, ["cudnn", "flash", "flex"]),
        ("sinks", {"sinks": True}, ["cudnn", "flash", "flex"]),
        ("documents", {"documents": True}, ["cudnn", "flash", "auto"]),
        ("28/4 heads", {"heads": (28, 4)}, ["cudnn", "flash"]),
        ("9/3 heads", {"heads": (9, 3)}, ["cudnn", "flash"]),
    ]
    for name, options, kernels in cases:
        for kernel in kernels:
            rows.append({"sp": mesh.sp, "case": name, "kernel": kernel} | _shared_errors(mesh, kernel, dict(options)))
    return rows if dist.get_rank() == 0 else []


def _shared_errors(mesh: Any, kernel: str, options: dict[str, Any]) -> dict[str, Any]:
    heads, kv = options.pop("heads", (8, 2))
    length, size = 1536, 128
    layout = SequenceLayout.whole_rows(2, length, mesh.sp)
    if options.pop("documents", False):
        numbers = torch.repeat_interleave(torch.arange(5), torch.tensor([700, 1, 300, 35, 500])).expand(2, -1)
        layout = SequenceLayout.packed(numbers, mesh.sp, length - 1)
    sinks = torch.linspace(-1, 3, heads, device=DEVICE) if options.pop("sinks", False) else None
    generator = torch.Generator("cuda").manual_seed(1)
    whole = [
        torch.randn(2, length, n, size, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for n in (heads, kv, kv, heads)
    ]
    exact = _dense([x.float() for x in whole], layout, sinks, **options)
    plain = _dense(whole, layout, sinks, **options)
    piece = layout.shard(mesh.sp_rank)
    leaves = [x[:, piece].clone().requires_grad_() for x in whole[:3]]
    out = ulysses_attention(*leaves, mesh, layout, sinks_H=sinks, kernel=kernel, **options)
    out.backward(whole[3][:, piece])
    got = [out.detach(), *(leaf.grad for leaf in leaves)]
    ratios = {}
    for key, mine, ref, single in zip(("out", "dq", "dk", "dv"), got, exact, plain, strict=True):
        sums = torch.stack([_square(mine.float() - ref[:, piece]), _square(single[:, piece].float() - ref[:, piece])])
        host = sums.cpu()
        dist.all_reduce(host)
        ratios[key] = float((host[0] / host[1]).sqrt())
    return {"ratios": ratios, "worst": max(ratios.values()), "passed": max(ratios.values()) <= 1.5}


def _square(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _dense(
    tensors: list[Tensor], layout: SequenceLayout, sinks: Tensor | None, causal: bool = True, window: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """Plain attention on one device: products in the tensors' dtype, softmax in fp32."""
    q, k, v = (x.transpose(1, 2).clone().requires_grad_() for x in tensors[:3])
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(_hidden(layout, causal, window, q.device), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None, None].expand_as(lse))
    out = (scores - lse).exp().to(q.dtype) @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


def _hidden(layout: SequenceLayout, causal: bool, window: int | None, device: torch.device) -> Tensor:
    n = torch.arange(layout.length, device=device)
    far = n[:, None] - n[None, :]
    mask = far < 0 if causal else torch.zeros_like(far, dtype=torch.bool)
    if window is not None:
        mask |= far.abs() >= window
    ends = torch.tensor([end for _, end in layout.documents[0]], device=device)
    document = torch.bucketize(n, ends, right=True)
    return mask | (document[:, None] != document[None, :])


PARTS: dict[str, Callable[[], Any]] = {"pack": pack, "overhead": overhead, "nccl": nccl, "shared": shared}


def run_part(name: str, ranks: int = 1) -> Any:
    """The part's result, or what went wrong, from a process (or several) of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launch, "-m", "benchmarks.ulysses", file.name, "--part", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT} s"}
        text = Path(file.name).read_text()
        return json.loads(text) if done.returncode == 0 and text else {"error": done.stderr[-3000:]}


def lines(result: dict[str, Any]) -> list[str]:
    table = [f"{row}" for row in result["pack"]] if isinstance(result["pack"], list) else [f"pack {result['pack']}"]
    table += [f"overhead {result['overhead']}", f"nccl {result['nccl']}"]
    for name in ("shared_2", "shared_4"):
        rows = result[name]
        if isinstance(rows, list):
            table += [f"sp={r['sp']} {r['case']:16} {r['kernel']:10} worst ratio {r['worst']:.2f}" for r in rows]
        else:
            table.append(f"{name} {rows['error']}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part = PARTS[arguments.part]()
        if int(os.environ.get("RANK", "0")) == 0:
            arguments.file.write_text(json.dumps(part))
        return 0
    result = {"machine": machine(), **{name: run_part(name) for name in ("pack", "overhead", "nccl")}}
    result |= {f"shared_{ranks}": run_part("shared", ranks) for ranks in (2, 4)}
    mark(result, "ulysses")
    save(arguments.file, result)
    print("\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
