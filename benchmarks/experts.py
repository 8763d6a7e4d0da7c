"""One block of experts alone on a GPU: seconds of its products, and of the routing around them.

    python -m benchmarks.experts results/experts.json

Qwen3-30B-A3B's block in bf16 with transformers' grouped products, forward and backward, at three lengths; then the same
products by themselves over equal shares of the tokens. The plan's figures for experts (`planning/terms/step_time.py`) are of
these.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.floor import seconds
from benchmarks.kernels import machine
from benchmarks.stamps import mark, save
from benchmarks.step import show_length
from ithaca.planning.model.known_models import known_config

MODEL = "Qwen/Qwen3-30B-A3B"
LENGTHS = (16_384, 32_768, 131_072)
DEVICE = torch.device("cuda")


def build() -> tuple[Any, nn.Module]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    known = known_config(MODEL)
    assert known is not None
    config = Qwen3MoeConfig(**known)
    config._experts_implementation = "grouped_mm"
    with DEVICE:
        block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.02)
    return config, block


def block_figures(block: nn.Module, x_BLC: Tensor) -> dict[str, float]:
    """Seconds of a forward without a graph, of a forward and a backward, and their peak beside the block."""
    with torch.no_grad():
        forward = seconds(partial(block, x_BLC), DEVICE)
    x_BLC.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both = seconds(partial(_there_and_back, block, x_BLC), DEVICE)
    return {"forward_s": forward, "both_s": both, "peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9}


def _there_and_back(block: nn.Module, x_BLC: Tensor) -> None:
    given = block(x_BLC)
    out_BLC = given[0] if isinstance(given, tuple) else given
    out_BLC.backward(torch.ones_like(out_BLC))
    for tensor in (x_BLC, *block.parameters()):
        tensor.grad = None


@torch.no_grad()
def product_figures(config: Any, tokens: int) -> dict[str, float]:
    """Seconds of the two grouped products forward, and of their inputs' and weights' gradients."""
    experts, hidden, wide = config.num_experts, config.hidden_size, config.moe_intermediate_size
    rows = tokens * config.num_experts_per_tok
    ends = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32) * (rows // experts)
    found = {"product_s": 0.0, "input_s": 0.0, "weight_s": 0.0}
    for inputs, outputs in ((hidden, 2 * wide), (wide, hidden)):
        x, w, dy = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
            for shape in ((rows, inputs), (experts, inputs, outputs), (rows, outputs))
        )
        for name, left, right in (
            ("product_s", x, w),
            ("input_s", dy, w.transpose(1, 2)),
            ("weight_s", x.t(), dy),
        ):
            found[name] += seconds(partial(torch._grouped_mm, left, right, ends), DEVICE)
    flops = 3 * 2.0 * rows * hidden * 3 * wide
    return found | {"tflops": flops / sum(found.values()) / 1e12}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    config, block = build()
    result: dict[str, Any] = {"machine": machine(), "model": MODEL, "rows": []}
    for tokens in LENGTHS:
        x_BLC = torch.randn(1, tokens, config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        got = {"tokens": tokens} | block_figures(block, x_BLC) | product_figures(config, tokens)
        result["rows"].append(got)
        mark(result, "experts")
        save(arguments.file, result)
        print(
            f"{show_length(tokens)}: forward {got['forward_s'] * 1e3:.1f} ms, with backward {got['both_s'] * 1e3:.1f} ms, "
            f"{got['peak_gb']:.1f} GB; products alone {got['tflops']:.0f} TFLOP/s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
