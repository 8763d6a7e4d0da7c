"""The floor of one training step: Llama-3 shapes and models, their FLOPs, and the least seconds a step can take.

The floor is the sum of the step's attention calls and matrix products, forward and backward, each timed alone on
random data of the step's shapes, without recompute. Attention runs on the fastest kernel of this machine for the shape.
Work that is linear in its size is timed in part and multiplied: matrix products over at most 32K tokens (8K for the
head), attention beyond 128K tokens with one key-value head and its query heads. A repeat runs for half a second and
gives its mean, so that the card's clock is that of sustained work.

Model FLOPs are `ithaca.planning.model.flops`'s: no credit for recompute.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ithaca.attention.kernels import AUTO, KERNELS, QKV, AttentionSpec
from ithaca.planning.model.flops import model_flops
from ithaca.planning.model.model_sizes import ModelSizes

LINEAR_TOKENS = 32_768
HEAD_TOKENS = 8_192
WHOLE_ATTENTION = 131_072
ENOUGH_S = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; `tied`: the head shares the embedding's weight."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    tied: bool

    def linears(self) -> Counter[tuple[int, int]]:
        """(outputs, inputs) of one layer's matrices, and how often each occurs."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(q, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, q)]
        mlp = [(self.intermediate, self.hidden)] * 2 + [(self.hidden, self.intermediate)]
        return Counter(attention + mlp)

    def linear_weights(self) -> int:
        layer = sum(count * outputs * inputs for (outputs, inputs), count in self.linears().items())
        return self.layers * layer + self.vocab * self.hidden


SHAPES = {
    "1B": Shape(2048, 16, 32, 8, 64, 8192, 128_256, tied=True),
    "3B": Shape(3072, 28, 24, 8, 128, 8192, 128_256, tied=True),
    "8B": Shape(4096, 32, 32, 8, 128, 14_336, 128_256, tied=False),
    # Runs on a CPU in a moment: for trying the program itself.
    "tiny": Shape(32, 2, 4, 2, 8, 64, 128, tied=False),
}


def config_of(shape: Shape, length: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, max_position_embeddings=length, tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, use_cache=False,
    )  # fmt: skip


def build_model(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Llama with random weights, made on the device, in training mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config_of(shape, length), dtype=dtype, attn_implementation="sdpa")
    return model.train()


def step_flops(shape: Shape, length: int) -> float:
    """Forward and backward of one row of `length` tokens."""
    return model_flops(sizes_of(shape), {length: 1}, length)


def sizes_of(shape: Shape) -> ModelSizes:
    """Return the shape in the planner's words."""
    return ModelSizes.from_config(
        {
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
        }
    )


def floor(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of the step's attention and matrix products, with the parts they are the sum of."""
    attention = attention_seconds(shape, length, device, dtype)
    products = {}
    total = sum(attention[way] for way in ("forward_s", "backward_s")) * shape.layers
    for (outputs, inputs), count in shape.linears().items():
        one = product_seconds(outputs, inputs, min(length, LINEAR_TOKENS), length, device, dtype)
        products[f"{inputs}x{outputs}"] = {"per_layer": count} | one
        total += count * shape.layers * sum(one.values())
    head = product_seconds(shape.vocab, shape.hidden, min(length, HEAD_TOKENS), length, device, dtype)
    total += sum(head.values())
    return {"seconds": total, "attention": attention, "products": products | {"head": head}}


def attention_seconds(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One layer's attention on the kernel with the least forward + backward time."""
    parts = shape.kv_heads if length > WHOLE_ATTENTION else 1
    heads, kv = shape.heads // parts, shape.kv_heads // parts
    q, k, v, dout = (
        torch.randn(1, length, n, shape.head_size, device=device, dtype=dtype) for n in (heads, kv, kv, heads)
    )
    spec = AttentionSpec(shape.head_size**-0.5)
    found: list[dict[str, Any]] = []
    # Flex stays out: it compiles a form first, and cuDNN is ahead of it wherever both run.
    for kernel in (KERNELS[name] for name in AUTO if name != "flex"):
        if kernel.refusal(q, v, spec) is not None:
            continue
        qkv = QKV(q, k, v)
        out, lse = kernel.forward(qkv, spec)
        forward = seconds(partial(kernel.forward, qkv, spec), device)
        backward = seconds(partial(kernel.backward, dout, qkv, out, lse, spec), device)
        found.append({"kernel": kernel.name, "forward_s": forward * parts, "backward_s": backward * parts})
        if parts > 1:
            break  # AUTO is fastest first, and a call now takes seconds
    best = min(found, key=lambda row: row["forward_s"] + row["backward_s"])
    return best | {"timed_heads": [heads, kv], "kernels": found}


def product_seconds(
    outputs: int, inputs: int, tokens: int, length: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """y = x w^T, dx = dy w, dw = dy^T x, timed over `tokens` and scaled to `length`."""
    x, w, dy = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    calls: dict[str, Callable[[], Any]] = {
        "forward_s": lambda: x @ w.t(),
        "input_s": lambda: dy @ w,
        "weight_s": lambda: dy.t() @ x,
    }
    return {name: seconds(call, device) * length / tokens for name, call in calls.items()}


def seconds(call: Callable[[], Any], device: torch.device, enough: float = ENOUGH_S) -> float:
    """The mean time of a call, over repeats that fill `enough` seconds, after a warm-up."""
    call()
    once = _timed(call, 1, device)
    return once if once > enough else _timed(call, min(200, math.ceil(enough / max(once, 1e-6))), device)


def _timed(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
