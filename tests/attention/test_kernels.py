"""The kernels against dense softmax attention, forward and every gradient, on odd shapes in fp64.

What runs on a CPU runs here in full. Of the CUDA kernels, what can be checked without a GPU is: that their
calls fit torch's operators (on meta tensors), the padding of head sizes, flex's block masks and the
arithmetic of its backward, refusals and the choice. `benchmarks/kernels.py` does the rest on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ithaca.attention.kernels import AUTO, KERNELS, choose, flash_family, flex
from ithaca.attention.kernels.blockwise import BlockwiseKernel
from ithaca.attention.kernels.cpu import CpuKernel
from ithaca.attention.kernels.cudnn import CudnnKernel
from ithaca.attention.kernels.flash import FlashKernel
from ithaca.attention.kernels.flash_packages import FlashAttn2Kernel, FlashAttn3Kernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, DocumentOffsets, Gradients, Kernel
from ithaca.errors import UnsupportedError
from tests.attention.reference import naive, naive_grads, visible

# Largest difference in units of the largest element of the reference. fp64: the sums of a few hundred
# terms; the narrow types: their own rounding of results computed in fp32.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}

LENGTHS = (1, 7, 65, pytest.param(300, marks=pytest.mark.slow))
HEADS = ((4, 4), (4, 1), (6, 2))
SIZES = ((16, 16), (24, 16), (8, 8))
SPECS = (
    AttentionSpec(scale=0.3),
    AttentionSpec(scale=0.3, causal=False),
    AttentionSpec(scale=0.3, window=1),
    AttentionSpec(scale=0.3, window=5),
    AttentionSpec(scale=0.3, window=5, causal=False),
    AttentionSpec(scale=0.3, window=1000),
    AttentionSpec(scale=0.3, softcap=2.0),
    AttentionSpec(scale=0.3, softcap=2.0, window=5, causal=False),
)
EXACT: tuple[Kernel, ...] = (CpuKernel(), BlockwiseKernel())


def label(value: object) -> str:
    if isinstance(value, AttentionSpec):
        parts = ["causal" if value.causal else "both"]
        parts += [f"window{value.window}"] * (value.window is not None) + ["capped"] * (value.softcap is not None)
        return "-".join(parts)
    return getattr(value, "name", str(value).replace(" ", ""))


def inputs(
    length: int,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    *,
    strided: bool = False,
    batch: int = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout; strided ones are views of one buffer, with the batch inside the sequence."""
    generator = torch.Generator().manual_seed(length)
    (h, k), (size, value_size) = heads, sizes
    shapes = [(h, size), (k, size), (k, value_size), (h, value_size)]
    if not strided:
        q, kk, v, dout = (torch.randn(batch, length, n, d, generator=generator).to(dtype) for n, d in shapes)
        return q, kk, v, dout
    buffer = torch.randn(length, batch, 2 * h + 2 * k, max(sizes), generator=generator).to(dtype).transpose(0, 1)
    q, kk, v, dout = (x[..., :d] for x, (_, d) in zip(buffer.split([h, k, k, h], 2), shapes, strict=True))
    return q, kk, v, dout


def differences(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    """The largest difference of each pair, in units of the largest element wanted (of 1 where all are small)."""
    assert [x.shape for x in got] == [x.shape for x in wanted]
    pairs = zip(got, wanted, strict=True)
    return [float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1)) for x, y in pairs]


def run(kernel: Kernel, tensors: tuple[Tensor, Tensor, Tensor, Tensor], spec: AttentionSpec) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a kernel."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(QKV(q, k, v), spec)
    return (out, lse, *kernel.backward(dout, QKV(q, k, v), out, lse, spec))


def reference(tensors: tuple[Tensor, Tensor, Tensor, Tensor], spec: AttentionSpec) -> tuple[Tensor, ...]:
    q, k, v, dout = (x.double() for x in tensors)
    return (*naive(q, k, v, spec), *naive_grads(dout, q, k, v, spec))


@pytest.mark.few(10)
@pytest.mark.parametrize("kernel", EXACT, ids=label)
@pytest.mark.parametrize("spec", SPECS, ids=label)
@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_output_and_gradients_equal_dense_attention(kernel: Kernel, spec: AttentionSpec, length: int) -> None:
    for i, (heads, sizes) in enumerate(product(HEADS, SIZES)):
        tensors = inputs(length, heads, sizes, strided=i % 2 == 0)
        found = differences(run(kernel, tensors, spec), reference(tensors, spec))
        assert max(found) < TOLERANCES[torch.float64], (heads, sizes, found)


@pytest.mark.parametrize("kernel", EXACT, ids=label)
@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_kernel_backward_rescaled_output_gives_gradients_with_sinks(kernel: Kernel, spec: AttentionSpec) -> None:
    """Callers rescale (out, lse) by sinks; the gradients are then those of the softmax with sinks."""
    q, k, v, dout = inputs(65, (6, 2))
    sinks = torch.linspace(-1, 2, 6, dtype=torch.float64)
    out, lse = naive(q, k, v, spec, sinks)
    found = differences(kernel.backward(dout, QKV(q, k, v), out, lse, spec), naive_grads(dout, q, k, v, spec, sinks))
    assert max(found) < TOLERANCES[torch.float64], found


@pytest.mark.parametrize("kernel", EXACT, ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4], SPECS[6]], ids=label)
def test_kernel_low_precision_error_is_of_rounding(kernel: Kernel, dtype: torch.dtype, spec: AttentionSpec) -> None:
    tensors = inputs(300, (6, 2), dtype=dtype)
    got = run(kernel, tensors, spec)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype]
    assert max(differences(got, reference(tensors, spec))) < TOLERANCES[dtype]


def test_cpu_backward_strided_lse_equals_contiguous() -> None:
    """torch's kernel gives it by token; what comes back from elsewhere is by head."""
    q, k, v, dout = inputs(65)
    out, lse = CpuKernel().forward(QKV(q, k, v), SPECS[0])
    by_token = lse.transpose(1, 2).contiguous().transpose(1, 2)
    by_head = lse.contiguous()
    assert by_token.stride() != by_head.stride()
    grads = [CpuKernel().backward(dout, QKV(q, k, v), out, x, SPECS[0]) for x in (by_token, by_head)]
    assert max(differences(*grads)) == 0


def test_blockwise_smaller_blocks_give_equal_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.attention.kernels.blockwise.BLOCK_SCORES", 1)
    for spec in SPECS:
        tensors = inputs(65)
        assert max(differences(run(BlockwiseKernel(), tensors, spec), reference(tensors, spec))) < 1e-12, spec


@pytest.mark.parametrize(
    "fault",
    [
        {"window": 6},
        {"window": 4},
        {"causal": False},
        {"scale": 0.31},
        {"softcap": 2.1},
    ],
    ids=str,
)
def test_kernel_comparison_planted_fault_is_detected(fault: dict[str, float]) -> None:
    spec = AttentionSpec(scale=0.3, window=5, softcap=2.0)
    tensors = inputs(65)
    wrong = run(BlockwiseKernel(), tensors, replace(spec, **fault))
    # A tenth of a cap moves dv least; every output and every gradient must still show it.
    assert min(differences(wrong, reference(tensors, spec))) > 1e-6


def test_kernel_comparison_permuted_heads_are_detected() -> None:
    q, k, v, dout = inputs(65, (6, 2))
    wrong = run(CpuKernel(), (q, k.flip(2), v, dout), SPECS[0])
    assert min(differences(wrong, reference((q, k, v, dout), SPECS[0]))) > 1e-3


@pytest.mark.parametrize("kernel", EXACT, ids=label)
def test_kernel_unequal_head_groups_fail_assertion(kernel: Kernel) -> None:
    q, k, v, _ = inputs(7, (5, 2))
    with pytest.raises(AssertionError, match="5 query heads over 2"):
        kernel.forward(QKV(q, k, v), SPECS[0])


@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if not k.varlen], ids=label)
def test_kernel_without_varlen_refuses_bounds(kernel: Kernel) -> None:
    q, k, v, _ = (x[0] for x in inputs(7))
    bounds = DocumentOffsets(torch.tensor([0, 3, 7], dtype=torch.int32), 4)
    with pytest.raises(NotImplementedError, match=f"{kernel.name}.*document by document"):
        kernel.forward(QKV(q, k, v, bounds), SPECS[0])


class PaddedOnCpu(flash_family.FlashFamily):
    """The frame of the FlashAttention kernels around an exact one, which sees padded sizes."""

    name = "padded"

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None

    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        assert qkv.q.shape[-1] == qkv.v.shape[-1]
        assert qkv.q.shape[-1] % 8 == 0
        return BlockwiseKernel().forward(qkv, spec)

    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        assert lse.is_contiguous()
        return BlockwiseKernel().backward(dout, qkv, out, lse, spec)


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (16, 24), (20, 12), (3, 5)], ids=label)
def test_flash_family_padded_head_sizes_equal_dense(sizes: tuple[int, int]) -> None:
    for spec in SPECS:
        tensors = inputs(65, sizes=sizes)
        assert max(differences(run(PaddedOnCpu(), tensors, spec), reference(tensors, spec))) < 1e-12, spec


def test_window_sides_give_keys_on_each_side() -> None:
    assert flash_family.window_sides(AttentionSpec(1.0)) == (-1, -1)
    assert flash_family.window_sides(AttentionSpec(1.0, window=5)) == (4, 0)
    assert flash_family.window_sides(AttentionSpec(1.0, window=1, causal=False)) == (0, 0)


@pytest.mark.parametrize("kernel", [CudnnKernel(), FlashKernel()], ids=label)
def test_aten_calls_on_meta_tensors_are_accepted(kernel: Kernel) -> None:
    """Arguments and shapes, as far as meta tensors show them."""
    q, k, v, dout = (x.to("meta") for x in inputs(64, (6, 2), (24, 16), torch.bfloat16))
    got = run(kernel, (q, k, v, dout), SPECS[0])
    assert [x.shape for x in got] == [dout.shape, (2, 6, 64), q.shape, k.shape, v.shape]


def test_aten_varlen_calls_on_meta_tensors_are_accepted() -> None:
    q, k, v, dout = (x[0].to("meta") for x in inputs(64, (6, 2), (24, 16), torch.bfloat16))
    bounds = DocumentOffsets(torch.tensor([0, 40, 64], dtype=torch.int32, device="meta"), 40)
    qkv = QKV(q, k, v, bounds)
    out, lse = FlashKernel().forward(qkv, SPECS[3])
    grads = FlashKernel().backward(dout, qkv, out, lse, SPECS[3])
    assert [x.shape for x in (out, lse, *grads)] == [dout.shape, (6, 64), q.shape, k.shape, v.shape]


@pytest.mark.parametrize("spec", [s for s in SPECS if s.softcap is None], ids=label)
@pytest.mark.parametrize("length", [1, 128, 300, 513])
@pytest.mark.parametrize("block", [16, 128])
def test_flex_block_kinds_equal_dense_mask(spec: AttentionSpec, length: int, block: int) -> None:
    partial, full = flex._block_kinds(length, block, spec.causal, spec.window, torch.device("cpu"))
    count = -(-length // block)
    seen = torch.zeros(count * block, count * block, dtype=torch.bool)
    seen[:length, :length] = visible(length, spec)
    blocks = seen.unflatten(0, (count, block)).unflatten(2, (count, block)).transpose(1, 2).flatten(2)
    assert torch.equal(partial | full, blocks.any(-1))
    assert torch.equal(full, blocks.all(-1))


def test_flex_block_mask_equals_torchs() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    for spec in (SPECS[0], SPECS[3], SPECS[4]):
        ours = flex._block_mask(300, spec.causal, spec.window, torch.device("cpu"))
        mod = flex._mask_mod(spec.causal, spec.window)
        theirs = create_block_mask(mod, None, None, 300, 300, device="cpu")
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        n, m = torch.arange(300)[:, None], torch.arange(300)
        assert torch.equal(mod(n, n, n, m), visible(300, spec))
        for table in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, table), getattr(theirs, table)), table
        assert ours.shape == theirs.shape
    assert flex._block_mask(300, False, 300, torch.device("cpu")) is None


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 6)], ids=["plain", "sinks"])
def test_flex_backward_given_output_gives_its_gradients(sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic, around a dense forward in place of the compiled one; fp32 as flex itself."""

    def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        out, lse = naive(*(x.transpose(1, 2) for x in (q, k, v)), spec)
        return out.transpose(1, 2), lse

    monkeypatch.setattr(flex, "_attention", dense)
    q, k, v, dout = inputs(65, (6, 2), dtype=torch.float32)
    for spec in SPECS:
        out, lse = naive(q, k, v, spec, sinks)
        got = flex.FlexKernel().backward(dout, QKV(q, k, v), out, lse, spec)
        found = differences(got, naive_grads(dout, q, k, v, spec, sinks))
        assert max(found) < TOLERANCES[torch.float32], (spec, found)


@pytest.mark.parametrize("name", ["cudnn", "flash", "flex"])
def test_gpu_kernel_on_cpu_tensor_refuses(name: str) -> None:
    q, _, v, _ = inputs(64, dtype=torch.bfloat16)
    assert "NVIDIA GPU, got a tensor on cpu" in str(KERNELS[name].refusal(q, v, SPECS[0]))


def test_flash_package_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.attention.kernels.flash_packages.find_spec", lambda name: None)
    q, _, v, _ = inputs(64, dtype=torch.bfloat16)
    assert "pip install flash-attn" in str(FlashAttn2Kernel().refusal(q, v, SPECS[0]))
    assert "flash_attn_3 is not installed" in str(FlashAttn3Kernel().refusal(q, v, SPECS[0]))


def test_auto_kernels_are_tested_and_fast() -> None:
    assert list(KERNELS) == [
        "flash_attn_4",
        "cudnn",
        "flash_attn_3",
        "flash_attn_2",
        "flash",
        "flex",
        "cpu",
        "blockwise",
    ]
    assert {name for name in KERNELS if name not in AUTO} == {"flash_attn_3", "flash_attn_2", "blockwise"}
    assert all(KERNELS[name].tested for name in AUTO)


def test_choose_on_cpu_returns_cpu_kernel() -> None:
    q, _, v, _ = inputs(64)
    assert choose("auto", q, v, SPECS[0]).name == "cpu"
    assert choose("blockwise", q, v, SPECS[0]).name == "blockwise"
    assert choose("auto", q, v, SPECS[0], varlen=True) is None
    assert choose("cpu", q, v, SPECS[0], varlen=True) is None


def test_choose_refusing_kernel_names_working_one() -> None:
    q, _, v, _ = inputs(64)
    with pytest.raises(UnsupportedError, match=r"'cudnn' cannot do this call: it needs an NVIDIA GPU.*Use 'cpu'"):
        choose("cudnn", q, v, SPECS[0])
    with pytest.raises(UnsupportedError, match="called 'sdpa': use one of auto, flash_attn_4"):
        choose("sdpa", q, v, SPECS[0])


def test_choose_no_working_kernel_lists_reasons() -> None:
    q, _, v, _ = (x.to("meta") for x in inputs(64))
    with pytest.raises(UnsupportedError, match=r"cudnn: .*flash: .*flex: .*cpu: .*kernel='blockwise'"):
        choose("auto", q, v, SPECS[0])


def test_kernels_import_loads_no_triton() -> None:
    heavy = ("transformers", "triton", "flash_attn", "torch._dynamo")
    code = f"import sys, ithaca.attention.kernels; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
