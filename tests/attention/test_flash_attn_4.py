"""FlashAttention-4 without a GPU: its calls fit the package's source, its refusals, and one call for all documents.

The package is pure Python and is installed without what it needs to run, so that its source can be read here.
`benchmarks/kernels.py` compares its results on a GPU.
"""

from __future__ import annotations

import ast
import inspect
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.attention.kernels import KERNELS, choose, flash_attn_4
from ithaca.attention.kernels.flash_attn_4 import CHECKED, FlashAttn4Kernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, DocumentOffsets
from ithaca.attention.local import KernelCall, plan_calls
from ithaca.errors import UnsupportedError
from ithaca.sequence.layout import SequenceLayout

KERNEL = FlashAttn4Kernel()
CAUSAL = AttentionSpec(scale=0.1)


def package_file(name: str) -> str:
    return Path(str(metadata.distribution("flash-attn-4").locate_file(f"flash_attn/cute/{name}"))).read_text()


def signatures() -> dict[str, inspect.Signature]:
    """The signatures of the package's functions, read from its source: importing it needs a CUDA compiler."""
    found = {}
    for node in ast.parse(package_file("interface.py")).body:
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args]
            required = len(every) - len(node.args.defaults)
            given = [
                inspect.Parameter(
                    each.arg,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if place < required else None,
                )
                for place, each in enumerate(every)
            ]
            found[node.name] = inspect.Signature(given)
    return found


class Recorder:
    """Stands for the package's interface: keeps the arguments of each call by the names of its signature."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> tuple[Tensor, ...]:
            bound = signatures()[name].bind(*given, **named).arguments
            self.calls[name] = bound
            if name == "_flash_attn_fwd":
                q, v = bound["q"], bound["v"]
                return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(1, dtype=torch.float32), None
            return torch.zeros_like(bound["q"]), torch.zeros_like(bound["k"]), torch.zeros_like(bound["v"])

        return call


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(flash_attn_4, "_package", lambda: recorder)
    return recorder


def tensors(size: int = 64, value_size: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = (4, 2, 2, 4)
    sizes = (size, size, value_size, value_size)
    q, k, v, dout = (torch.randn(1, 10, h, d).bfloat16() for h, d in zip(heads, sizes, strict=True))
    return q, k, v, dout


def test_installed_version_is_checked() -> None:
    assert metadata.version("flash-attn-4") in CHECKED


def test_extra_installs_a_checked_version() -> None:
    extra = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert f'fa4 = ["flash-attn-4[cu13]=={CHECKED[-1]}"]' in extra
    makefile = Path(__file__).parents[2].joinpath("Makefile").read_text()
    assert f"FA4 := flash-attn-4=={CHECKED[-1]}\n" in makefile


def test_calls_fit_the_package_and_hand_each_tensor_to_its_name(package: Recorder) -> None:
    q, k, v, dout = tensors()
    qkv = QKV(q, k, v)
    out, lse = KERNEL.forward(qkv, CAUSAL)
    lse = torch.zeros(1, 4, 10)
    KERNEL.backward(dout, qkv, out, lse, CAUSAL)
    forward, backward = package.calls["_flash_attn_fwd"], package.calls["_flash_attn_bwd"]
    assert (forward["q"] is q, forward["k"] is k, forward["v"] is v, forward["return_lse"]) == (True,) * 4
    assert (backward["q"] is q, backward["k"] is k, backward["v"] is v, backward["dout"] is dout) == (True,) * 4
    assert (backward["out"] is out, backward["lse"] is lse) == (True, True)
    for call in (forward, backward):
        assert (call["softmax_scale"], call["causal"], call["softcap"]) == (0.1, True, 0.0)
        # A causal call without a window names no side: given one, the package takes the slower way of windows.
        assert (call["window_size_left"], call["window_size_right"]) == (None, None)
        assert "cu_seqlens_q" not in call


@pytest.mark.parametrize(
    ("spec", "sides"),
    [
        (AttentionSpec(0.1, window=5), (4, 0)),
        (AttentionSpec(0.1, window=5, causal=False), (4, 4)),
        (AttentionSpec(0.1, causal=False), (None, None)),
        (AttentionSpec(0.1, window=1), (0, 0)),
    ],
    ids=["window", "window both ways", "both ways", "itself alone"],
)
def test_window_becomes_numbers_of_keys_before_and_after(
    package: Recorder, spec: AttentionSpec, sides: tuple[int | None, int | None]
) -> None:
    KERNEL.forward(QKV(*tensors()[:3]), spec)
    call = package.calls["_flash_attn_fwd"]
    assert (call["window_size_left"], call["window_size_right"]) == sides


def test_documents_are_offsets_of_queries_and_keys(package: Recorder) -> None:
    q, k, v, dout = (x[0] for x in tensors())
    qkv = QKV(q, k, v, DocumentOffsets(torch.tensor([0, 3, 10], dtype=torch.int32), 7))
    out, _ = KERNEL.forward(qkv, CAUSAL)
    KERNEL.backward(dout, qkv, out, torch.zeros(4, 10), CAUSAL)
    for call in package.calls.values():
        assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == [0, 3, 10]
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (7, 7)


def test_repeatable_mode_asks_for_the_repeatable_backward(package: Recorder) -> None:
    q, k, v, dout = tensors()
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            KERNEL.backward(dout, QKV(q, k, v), q, torch.zeros(1, 4, 10), CAUSAL)
        finally:
            torch.use_deterministic_algorithms(False)
        assert package.calls["_flash_attn_bwd"]["deterministic"] is wanted


@pytest.mark.parametrize(
    ("own", "heads", "size", "value_size"),
    [((20, 36), 2, 64, 64), ((192, 36), 2, 192, 192), ((180, 100), 2, 192, 192), ((180, 100), 4, 192, 128)],
    ids=["to 32", "to the larger", "shared kv heads to one size", "latent attention as it is"],
)
def test_odd_head_sizes_are_padded_to_those_that_are_right(
    package: Recorder, own: tuple[int, int], heads: int, size: int, value_size: int
) -> None:
    q, k, v, _ = tensors(own[0], own[1])
    k, v = (x[:, :, :1].expand(-1, -1, heads, -1).contiguous() for x in (k, v))
    out, _ = KERNEL.forward(QKV(q, k, v), CAUSAL)
    call = package.calls["_flash_attn_fwd"]
    assert (call["q"].shape[-1], call["v"].shape[-1], out.shape[-1]) == (size, value_size, own[1])


def refusal(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], size: int, value_size: int) -> str | None:
    monkeypatch.setattr(flash_attn_4, "_version", lambda: CHECKED[-1])
    monkeypatch.setattr(flash_attn_4, "cuda_refusal", lambda x, dtypes: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, _, v, _ = tensors(size, value_size)
    return KERNEL.refusal(q, v, CAUSAL)


@pytest.mark.parametrize(
    ("capability", "size", "value_size", "reason"),
    [
        ((9, 0), 128, 128, None), ((9, 0), 192, 128, None), ((9, 0), 256, 256, None), ((9, 0), 80, 40, None),
        ((9, 0), 257, 64, "head sizes go up to 256, got 257 and 64"),
        ((10, 0), 128, 64, None),
        ((10, 3), 192, 128, "on Blackwell head sizes go up to 128, or 192 with values of 128, got 192 and 128"),
        ((10, 0), 160, 160, "on Blackwell head sizes go up to 128, or 192 with values of 128, got 160 and 160"),
        ((8, 0), 128, 128, "it needs a Hopper or datacenter Blackwell GPU, got capability 8.0"),
        ((12, 0), 128, 128, "it needs a Hopper or datacenter Blackwell GPU, got capability 12.0"),
    ],
)  # fmt: skip
def test_card_and_head_sizes_are_guarded(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], size: int, value_size: int, reason: str | None
) -> None:
    assert refusal(monkeypatch, capability, size, value_size) == reason


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "the package flash-attn-4 is not installed: pip install 'ithaca[fa4]'"),
        ("4.0.0b1", "flash-attn-4 4.0.0b1 was not checked, 4.0.0b36 was: pip install flash-attn-4==4.0.0b36"),
    ],
)
def test_missing_or_unchecked_package_is_refused_by_name_and_not_chosen(
    monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
) -> None:
    monkeypatch.setattr(flash_attn_4, "_version", lambda: version)
    q, _, v, _ = tensors()
    with pytest.raises(UnsupportedError) as refused:
        choose("flash_attn_4", q, v, CAUSAL)
    assert reason in str(refused.value)
    assert "Use 'cpu'" in str(refused.value)
    assert choose("auto", q, v, CAUSAL).name == "cpu"


def test_first_choice_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttn4Kernel, "refusal", lambda *_: None)
    q, _, v, _ = tensors()
    assert choose("auto", q, v, CAUSAL) is KERNELS["flash_attn_4"]
    assert choose("auto", q, v, CAUSAL, varlen=True) is KERNELS["flash_attn_4"]


class Store:
    """Stands for the package's cache_utils, and makes caches in memory or in a folder as that does."""

    class JITCache:
        def __init__(self, place: str = "memory") -> None:
            self.place = place

    def __init__(self, folder: str | None = None) -> None:
        self.CUTE_DSL_CACHE_ENABLED = folder is not None
        self.CUTE_DSL_CACHE_DIR = folder

    def get_jit_cache(self, name: str) -> JITCache:
        return self.JITCache(f"{self.CUTE_DSL_CACHE_DIR}/{name}" if self.CUTE_DSL_CACHE_ENABLED else "memory")


def interface_of(store: Store) -> SimpleNamespace:
    def _flash_attn_fwd() -> None: ...
    def other() -> None: ...

    _flash_attn_fwd.compile_cache = store.get_jit_cache("fwd")  # type: ignore[attr-defined]
    return SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, other=other, number=3)


def test_compiled_kernels_are_kept_in_a_folder_of_the_user(tmp_path: Path) -> None:
    store = Store()
    interface = interface_of(store)
    flash_attn_4.keep_compiled(interface, store, tmp_path / "ours")
    assert interface._flash_attn_fwd.compile_cache.place == f"{tmp_path}/ours/_flash_attn_fwd"
    assert (tmp_path / "ours").is_dir()
    assert not hasattr(interface.other, "compile_cache")


def test_store_that_the_user_switched_on_stays(tmp_path: Path) -> None:
    store = Store("/scratch")
    interface = interface_of(store)
    flash_attn_4.keep_compiled(interface, store, tmp_path / "ours")
    assert interface._flash_attn_fwd.compile_cache.place == "/scratch/fwd"
    assert not (tmp_path / "ours").exists()


def test_folder_that_cannot_be_made_leaves_kernels_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store()
    modules = {"flash_attn.cute.interface": interface_of(store), "flash_attn.cute.cache_utils": store}
    (tmp_path / ".cache").write_text("a file")
    monkeypatch.setattr(flash_attn_4, "import_module", modules.__getitem__)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    flash_attn_4._package.cache_clear()
    found = flash_attn_4._package()
    flash_attn_4._package.cache_clear()
    assert found._flash_attn_fwd.compile_cache.place == "memory"


def test_members_of_the_packages_store_are_there() -> None:
    source = package_file("cache_utils.py")
    for member in (
        "CUTE_DSL_CACHE_ENABLED: bool",
        "CUTE_DSL_CACHE_DIR: str | None",
        "class JITCache:",
        "def get_jit_cache(",
    ):
        assert f"\n{member}" in source
    assert package_file("interface.py").count(".compile_cache = get_jit_cache(") >= 6


def test_one_kernel_for_both_forms_takes_all_documents_in_one_call() -> None:
    lengths = (40_000, 10, 50_000, 3)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    layout = SequenceLayout.packed(ids, 1, 100_000)
    total = sum(lengths)
    assert plan_calls(layout, varlen=True, long_alone=False) == [KernelCall(slice(0, 1), (0, total), lengths)]
    assert len(plan_calls(layout, varlen=True)) == 4
