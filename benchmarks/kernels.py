"""Every attention kernel of this machine against exact attention: forward, every gradient, odd shapes.

    python -m benchmarks.kernels results/kernels.json [--only cudnn flash] [--time 65536]

Inputs are bf16. The reference is dense attention in fp64 on the same, upcast inputs; beside each kernel
stands what one device gives in bf16 without Ithaca: torch's own `scaled_dot_product_attention` where it can
do the case, else plain attention (bf16 products, fp32 softmax). A kernel passes where the error of its output
and of every gradient, as |x - ref| / |ref|, is at most 1.5 times that. A case that
raises is recorded with its message. The JSON carries hardware, versions and the command.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stamps import mark, save
from ithaca.attention.kernels import KERNELS, QKV, AttentionSpec, DocumentOffsets, Kernel

ALLOWED = 1.5
NAMES = ("out", "dq", "dk", "dv")
DOCUMENTS = (1, 700, 3, 129, 1024, 64, 127)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of attention; `documents` makes it a varlen call, `sinks` rescales (out, lse) before backward.

    `compiled`: also run by flex, to which a new form costs seconds.
    """

    name: str
    length: int = 1024
    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    size: int = 128
    value_size: int = 128
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    strided: bool = False
    documents: tuple[int, ...] = ()
    compiled: bool = False

    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.size**-0.5, self.causal, self.window, self.softcap)


BASE = Case("causal")
BOTH = replace(BASE, compiled=True)
CASES = (
    BOTH,
    replace(BOTH, name="both directions", causal=False),
    replace(BOTH, name="window 100", window=100),
    replace(BASE, name="window 1", window=1),
    replace(BOTH, name="window 129, both", window=129, causal=False),
    replace(BASE, name="window 4096", window=4096),
    replace(BOTH, name="softcap", softcap=5.0),
    replace(BOTH, name="softcap, window", softcap=5.0, window=100),
    replace(BASE, name="sinks", sinks=True),
    replace(BOTH, name="sinks, softcap", sinks=True, softcap=5.0),
    replace(BASE, name="sinks, window", sinks=True, window=128, size=64, value_size=64),
    replace(BASE, name="D 64", size=64, value_size=64),
    replace(BASE, name="D 256", size=256, value_size=256),
    replace(BOTH, name="D 256, softcap", size=256, value_size=256, softcap=50.0),
    replace(BASE, name="D 96", size=96, value_size=96),
    replace(BASE, name="D 80, E 40", size=80, value_size=40),
    replace(BASE, name="D 20", size=20, value_size=20),
    replace(BOTH, name="D 192, E 128", size=192, kv_heads=8),
    replace(BOTH, name="28 / 4 heads", heads=28, kv_heads=4),
    replace(BASE, name="4 / 1 heads", heads=4, kv_heads=1),
    replace(BASE, name="1 head", heads=1, kv_heads=1),
    replace(BOTH, name="S 1", length=1),
    replace(BASE, name="S 2", length=2),
    replace(BOTH, name="S 127", length=127),
    replace(BOTH, name="S 1000", length=1000),
    replace(BOTH, name="S 1000, both", length=1000, causal=False),
    replace(BASE, name="S 4096", length=4096, batch=1, heads=4, kv_heads=1),
    replace(BOTH, name="S 4097", length=4097, batch=1, heads=4, kv_heads=1),
    replace(BOTH, name="strided", strided=True),
    replace(BASE, name="strided, S 1000, B 1", strided=True, length=1000, batch=1),
    replace(BASE, name="documents", documents=DOCUMENTS),
    replace(BASE, name="documents, window", documents=DOCUMENTS, window=100),
    replace(BASE, name="documents, sinks", documents=DOCUMENTS, sinks=True),
    replace(BASE, name="documents, D 192, E 128", documents=DOCUMENTS, size=192, kv_heads=8),
    replace(BASE, name="documents, softcap", documents=DOCUMENTS, softcap=5.0),
)

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(case: Case) -> Tensors:
    """q, k, v, dout, [B, S, ., .]; documents stand end to end in one row, strided ones share a buffer."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, sum(case.documents)) if case.documents else (case.batch, case.length)
    heads = [case.heads, case.kv_heads, case.kv_heads, case.heads]
    sizes = [case.size, case.size, case.value_size, case.value_size]
    if case.strided:
        shared = (shape[1], shape[0], sum(heads), max(sizes))
        buffer = torch.randn(shared, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        q, k, v, dout = (x[..., :size] for x, size in zip(buffer.split(heads, 2), sizes, strict=True))
    else:
        q, k, v, dout = (
            torch.randn(*shape, n, size, generator=generator, device="cuda", dtype=torch.bfloat16)
            for n, size in zip(heads, sizes, strict=True)
        )
    return q, k, v, dout


def sinks_of(case: Case) -> Tensor | None:
    return torch.linspace(-1.0, 6.0, case.heads, device="cuda") if case.sinks else None


def hidden(case: Case, length: int) -> Tensor:
    """Return the mask, [S, S] bool: True where a query may not see a key, other documents included."""
    n = torch.arange(length, device="cuda")
    far = n[:, None] - n[None, :]
    mask = far < 0 if case.causal else torch.zeros_like(far, dtype=torch.bool)
    if case.window is not None:
        mask |= far.abs() >= case.window
    if case.documents:
        document = torch.arange(len(case.documents), device="cuda").repeat_interleave(
            torch.tensor(case.documents, device="cuda")
        )
        mask |= document[:, None] != document[None, :]
    return mask


def dense(case: Case, tensors: Tensors, dtype: torch.dtype, softmax: torch.dtype) -> tuple[Tensor, ...]:
    """out, dq, dk, dv through autograd: products in `dtype`, softmax in `softmax`."""
    q, k, v = (x.detach().to(dtype).transpose(1, 2).clone().requires_grad_() for x in tensors[:3])
    group = case.heads // case.kv_heads
    scores = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)).to(softmax) * case.spec().scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(hidden(case, q.shape[2]), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    sinks = sinks_of(case)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(softmax)[None, :, None, None].expand_as(lse))
    out = (scores - lse).exp().to(dtype) @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype).transpose(1, 2))
    return tuple(x.detach().transpose(1, 2) for x in (out, *grads))


def single_device(case: Case, tensors: Tensors) -> tuple[str, tuple[Tensor, ...]]:
    """Return the bf16 result of this machine without Ithaca, and the name of its implementation."""
    seen = case.window is not None and case.window < case.length
    if seen or case.softcap is not None or case.sinks or case.documents:
        return "plain", dense(case, tensors, torch.bfloat16, torch.float32)
    q, k, v = (x.detach().transpose(1, 2).clone().requires_grad_() for x in tensors[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].transpose(1, 2))
    return "sdpa", tuple(x.detach().transpose(1, 2) for x in (out, *grads))


def rescale(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rescale a kernel's result for sinks; lse is [..., h, S], out [..., S, h, E]."""
    if sinks is None:
        return out, lse
    wider = torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    share = torch.exp(lse - wider).transpose(-1, -2).unsqueeze(-1)
    return (out.float() * share).to(out.dtype), wider


def run_kernel(kernel: Kernel, case: Case, tensors: Tensors) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    spec, sinks = case.spec(), sinks_of(case)
    if not case.documents:
        qkv = QKV(q, k, v)
        out, lse = rescale(*kernel.forward(qkv, spec), sinks)
        return (out, *kernel.backward(dout, qkv, out, lse, spec))
    offsets = torch.tensor([0, *case.documents], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    qkv = QKV(q[0], k[0], v[0], DocumentOffsets(offsets, max(case.documents)))
    out, lse = rescale(*kernel.forward(qkv, spec), sinks)
    grads = kernel.backward(dout[0], qkv, out, lse, spec)
    return tuple(x[None] for x in (out, *grads))


def errors(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> dict[str, float]:
    """|x - ref| / |ref|; where the reference is nought (dq of a single key) the error of a typical element."""
    found = {}
    for name, x, ref in zip(NAMES, got, wanted, strict=True):
        assert x.shape == ref.shape, (name, x.shape, ref.shape)
        scale = ref.double().norm()
        found[name] = float((x.double() - ref.double()).norm() / (scale if scale > 1e-6 else ref.numel() ** 0.5))
    return found


def measure(
    kernel: Kernel, case: Case, tensors: Tensors, exact: tuple[Tensor, ...], single: dict[str, float]
) -> dict[str, Any]:
    """One row of the result: a refusal, an exception, or the errors and their ratios to one device's."""
    row: dict[str, Any] = {"kernel": kernel.name, "case": case.name}
    refused = kernel.refusal(tensors[0], tensors[2], case.spec())
    if refused is None and case.documents and not kernel.varlen:
        refused = "no varlen form"
    if refused is None and kernel.name == "flex" and not case.compiled:
        refused = "left out: a form more to compile"
    if refused is not None:
        return row | {"refused": refused}
    started = time.perf_counter()
    try:
        found = errors(run_kernel(kernel, case, tensors), exact)
    except Exception as error:  # one broken case must not hide the others
        return row | {"raised": f"{type(error).__name__}: {error}"}
    # Where one device happens to be exact (a single key) a little rounding is still allowed.
    ratios = {name: found[name] / max(single[name], 1e-3) for name in NAMES}
    passed = all(ratio <= ALLOWED for ratio in ratios.values())  # false for NaN
    return row | {"errors": found, "ratios": ratios, "passed": passed, "seconds": time.perf_counter() - started}


def speed(kernel: Kernel, length: int) -> dict[str, Any]:
    """TFLOP/s forward and backward at the shape of one rank: 8 query heads, 2 kv heads, D = 128, causal."""
    case = replace(BASE, name="speed", length=length, batch=1, softcap=5.0 if kernel.name == "flex" else None)
    q, k, v, dout = make_inputs(case)
    qkv = QKV(q, k, v)
    out, lse = kernel.forward(qkv, case.spec())
    calls = (
        lambda: kernel.forward(qkv, case.spec()),
        lambda: kernel.backward(dout, qkv, out, lse, case.spec()),
    )
    flops = 2 * length**2 * case.heads * case.size
    rates = [factor * flops / seconds(call) / 1e12 for call, factor in zip(calls, (1.0, 2.5), strict=True)]
    return {"kernel": kernel.name, "length": length, "forward_tflops": rates[0], "backward_tflops": rates[1]}


def seconds(call: Any, repeats: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": metadata.version("triton"),
        "command": command_line(),
    }


def command_line() -> str:
    """Return the command as a reader would type it, without this machine's folders."""
    module = Path(sys.argv[0]).with_suffix("").name
    return shlex.join(
        ["python", "-m", f"benchmarks.{module}", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """One line a case, one column a kernel: the worst ratio, `-` for a refusal, `!` for an exception."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    cells = {(row["case"], row["kernel"]): cell(row) for row in rows}
    lines = [f"{'worst error ratio':26}" + "".join(f"{name:>14}" for name in kernels)]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines.append(f"{case:26}" + "".join(f"{cells[case, name]:>14}" for name in kernels))
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "-"
    if "raised" in row:
        return "!"
    return f"{max(row['ratios'].values()):.2f}" + ("" if row["passed"] else " FAIL")


def check(kernels: list[Kernel]) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        tensors = make_inputs(case)
        exact = dense(case, tensors, torch.float64, torch.float64)
        way, values = single_device(case, tensors)
        single = errors(values, exact)
        rows += [measure(kernel, case, tensors, exact, single) | {"single_device": {way: single}} for kernel in kernels]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="these kernels only")
    parser.add_argument("--time", type=int, metavar="S", help="also measure speed at this length")
    arguments = parser.parse_args()
    kernels = [KERNELS[name] for name in arguments.only]
    result: dict[str, Any] = {"machine": machine(), "allowed_ratio": ALLOWED, "cases": [asdict(c) for c in CASES]}
    result["rows"] = rows = check(kernels)
    ran = [k for k in kernels if any(row["kernel"] == k.name and "ratios" in row for row in rows)]
    if arguments.time:
        result["speed"] = [speed(kernel, arguments.time) for kernel in ran if kernel.name != "blockwise"]
    mark(result, "kernels")
    save(arguments.file, result)
    for row in rows:
        if "raised" in row:
            print(f"! {row['kernel']}, {row['case']}: {row['raised']}")
    print(table(rows))
    for row in result.get("speed", []):
        print(
            f"{row['kernel']:>14} S {row['length']}: {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f} TFLOP/s"
        )
    return int(any("raised" in row or row.get("passed") is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
