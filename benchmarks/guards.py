"""Attention kernels beyond the sizes of everyday calls: very many elements, repeatable gradients, sinks.

    python -m benchmarks.guards results/guards.json [--only cudnn flash flash_attn_4] [--elements 2.1e9 2.3e9]

elements     one call of so many elements of q, in rows, in one long row and in documents: the last tokens (of a kernel
             without windows the last head) are compared with a small call of the same kernel
repeatable   the backward pass as usual and repeatable: ms of each, and whether six runs are bit-identical
sinks        rescaling around the kernel beside the kernel's own sinks: ms and GiB of forward and backward, and errors

Each trial runs in a process of its own: a kernel that reads beyond its memory ends its process. A kernel's
`most_elements` is lifted for its trial.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import machine
from benchmarks.stamps import mark, save
from ithaca.attention.kernels import KERNELS, QKV, AttentionSpec, DocumentOffsets, Kernel
from ithaca.attention.local import LocalAttention
from ithaca.heads import HeadRange
from ithaca.sequence.layout import SequenceLayout

NAMES = ("flash_attn_4", "cudnn", "flash")
FORMS = ("rows", "row", "documents")
ELEMENTS = (9.0e8, 2.1e9, 2.28e9)
SIZE, WINDOW, TAIL = 128, 512, 2048
# Head sizes and windows of the repeatable backward.
REPEATED = ((128, 128, None), (64, 64, 128), (256, 256, None), (256, 256, 1024), (192, 128, None))
Row = dict[str, Any]


def drawn(
    device: torch.device, batch: int, length: int, heads: int, kv_heads: int, sizes: tuple[int, int]
) -> list[Tensor]:
    size, value_size = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    return [torch.randn(batch, length, h, d, device=device, dtype=dtype) for h, d in shapes]


def off(got: Tensor, wanted: Tensor) -> float:
    """Return |got - wanted| / |wanted|."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9))


def both(kernel: Kernel, qkv: QKV, dout: Tensor, spec: AttentionSpec) -> list[Tensor]:
    out, lse = kernel.forward(qkv, spec)
    return [out, *kernel.backward(dout, qkv, out, lse, spec)]


def elements(kernel: Kernel, form: str, asked: float, device: torch.device, tail: int = TAIL) -> Row:
    """One call of about `asked` elements of q and of k: the errors of out, dq, dk and dv of its last tokens."""
    kernel.most_elements = 2**62  # type: ignore[misc]
    heads = 16
    if form == "rows":
        # Full attention over short rows.
        length, spec = min(16_384, 8 * tail), AttentionSpec(SIZE**-0.5)
        batch = max(1, round(asked / (length * heads * SIZE)))
    else:
        batch, length = 1, round(asked / (heads * SIZE)) // 8 * 8
        spec = AttentionSpec(SIZE**-0.5, window=None if kernel.name == "cudnn" else min(WINDOW, tail // 4))
    tensors = drawn(device, batch, length, heads, heads, (SIZE, SIZE))
    if form == "documents":
        # The last document is the part that is computed alone.
        ends = [0, tail // 2, length - 3 * tail, length - tail, length]
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        bounds = DocumentOffsets(offsets, max(b - a for a, b in pairwise(ends)))
        q, k, v, dout = (x[0] for x in tensors)
        got = [x[None, -tail:] for x in both(kernel, QKV(q, k, v, bounds), dout, spec)]
        part = [x[:, -tail:] for x in tensors]
        keep = tail
    elif form == "row" and spec.window is None:
        # Without a window the last tokens see all others: the last head is computed alone.
        q, k, v, dout = tensors
        got = [x[:, :, -1:] for x in both(kernel, QKV(q, k, v), dout, spec)]
        part = [x[:, :, -1:].contiguous() for x in tensors]
        keep = length
    else:
        q, k, v, dout = tensors
        # A row's first tokens of the part miss keys, and so do their gradients: only the end is compared.
        keep = 8 * tail if form == "rows" else tail // 2
        got = [x[-1:, -keep:] for x in both(kernel, QKV(q, k, v), dout, spec)]
        part = [x[-1:, -(8 * tail if form == "rows" else tail) :].contiguous() for x in tensors]
    alone = both(kernel, QKV(part[0], part[1], part[2]), part[3], spec)
    errors = [off(x, y[:, -keep:]) for x, y in zip(got, alone, strict=True)]
    return {"elements": float(tensors[0].numel()), "errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))}


def repeatable(kernel: Kernel, number: int, device: torch.device, length: int = 16_384) -> Row:
    size, value_size, window = REPEATED[number]
    q, k, v, dout = drawn(device, 1, length, 16, 4, (size, value_size))
    qkv, spec = QKV(q, k, v), AttentionSpec(size**-0.5, window=window)
    out, lse = kernel.forward(qkv, spec)

    def backward() -> Any:
        return kernel.backward(dout, qkv, out, lse, spec)

    row: Row = {"size": size, "value_size": value_size, "window": window, "usual_ms": milliseconds(backward, device)}
    torch.use_deterministic_algorithms(True)
    if refused := kernel.refusal(q, v, spec):
        return row | {"refused": refused}
    first = backward()
    row["identical"] = all(torch.equal(a, b) for _ in range(6) for a, b in zip(first, backward(), strict=True))
    return row | {"repeatable_ms": milliseconds(backward, device)}


def sinks(kernel: Kernel, number: int, device: torch.device, length: int = 65_536) -> Row:
    """A layer of gpt-oss's shape through `LocalAttention`, with a window and without."""
    window = (128, None)[number]
    q, k, v, dout = drawn(device, 1, length, 64, 8, (64, 64))
    scores = torch.linspace(-1, 3, 64, device=device)
    spec = AttentionSpec(0.125, window=window)
    local = LocalAttention(SequenceLayout.whole_rows(1, length, 1), spec, (HeadRange((0, 64), (0, 8)),), kernel.name)
    row: Row = {"window": window}
    found = []
    for way in (False, True) if kernel.takes_sinks else (False,):
        kernel.takes_sinks = way  # type: ignore[misc]
        out, lse = local.attend(QKV(q, k, v), scores)
        grads, dsinks = local.attend_backward(dout, QKV(q, k, v), out, lse, scores)
        found.append([out, *grads, dsinks])
        name = "own" if way else "around"
        row[f"{name}_forward_ms"] = milliseconds(lambda: local.attend(QKV(q, k, v), scores), device)
        row[f"{name}_backward_ms"] = milliseconds(
            lambda out=out, lse=lse: local.attend_backward(dout, QKV(q, k, v), out, lse, scores), device
        )
    if len(found) == 2:
        row["differences"] = [off(a, b) for a, b in zip(*found, strict=True)]
    return row


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - started) / repeats * 1e3


TRIALS: dict[str, Callable[..., Row]] = {"elements": elements, "repeatable": repeatable, "sinks": sinks}


def wanted(names: list[str], counts: list[float]) -> list[Row]:
    """Return the trials of each kernel, as the process of one gets it."""
    found: list[Row] = []
    for name in names:
        kernel = KERNELS[name]
        forms = [form for form in FORMS if kernel.varlen or form != "documents"]
        found += [{"trial": "elements", "kernel": name, "given": [form, count]} for form in forms for count in counts]
        found += [{"trial": "repeatable", "kernel": name, "given": [number]} for number in range(len(REPEATED))]
        found += [{"trial": "sinks", "kernel": name, "given": [number]} for number in range(2)]
    return found


def run_one(asked: Row, device: str, sizes: Row) -> Row:
    return TRIALS[asked["trial"]](KERNELS[asked["kernel"]], *asked["given"], torch.device(device), **sizes)


def in_process(asked: Row, limit: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "row.json")
        command = [sys.executable, "-m", "benchmarks.guards", str(answer), "--one", json.dumps(asked)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"raised": f"not done after {limit:.0f} s"}
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        said = [line for line in done.stderr.splitlines() if "Error" in line] or [f"status {done.returncode}"]
        return {"raised": said[-1][:300]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON")
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), default=list(NAMES), help="these kernels only")
    parser.add_argument("--elements", nargs="+", type=float, default=list(ELEMENTS), help="elements of q in a call")
    parser.add_argument("--limit", type=float, default=150, help="seconds for a trial")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        arguments.file.write_text(json.dumps(run_one(json.loads(arguments.one), arguments.device, {})))
        return 0
    result: Row = {"machine": machine(), "rows": []}
    for asked in wanted(arguments.only, arguments.elements):
        row = asked | in_process(asked, arguments.limit)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        mark(result, "guards")
        save(arguments.file, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
