"""`save_pretrained` from sharded weights: byte for byte the folder transformers writes of the untouched model.

Names, file cuts, tied weights, fused experts and config included; nothing of Ithaca is in it. Rank 0 holds no more
than a file and a layer, a folder is replaced only when the new one is complete, and a failure raises on every rank.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ithaca.errors import IthacaError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.files import write_weights
from ithaca.models.files.write_weights import save_pretrained
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
}
SIZES = {"whole": "50GB", "cut": "20KB"}


def build(kind: str, dtype: torch.dtype) -> Any:
    name, overrides = KINDS[kind]
    return small_model(name, dtype=dtype, **overrides)


def save_both(root: str, cases: list[tuple[str, torch.dtype, str]], weights: str = "shard") -> None:
    """Write the twin's folder (rank 0 alone) and ours for every case, side by side."""
    mesh = init_mesh(sp=2)
    for kind, dtype, size in cases:
        folder = folder_of(root, kind, dtype, size)
        model = build(kind, dtype)
        if mesh.rank == 0:
            copy.deepcopy(model).save_pretrained(folder / "theirs", max_shard_size=SIZES[size])
        model = parallelize(model, mesh, weights=weights, allow_untested=True)  # type: ignore[arg-type]
        save_pretrained(model, folder / "ours", max_shard_size=SIZES[size])


def folder_of(root: str | Path, kind: str, dtype: torch.dtype, size: str) -> Path:
    return Path(root) / f"{kind} {dtype} {size}".replace(" ", "-")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_same_files(folder: Path) -> int:
    ours, theirs = contents(folder / "ours"), contents(folder / "theirs")
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        assert ours[name] == theirs[name], f"{folder.name}: {name} differs"
    assert b"ithaca" not in ours["config.json"]
    return len(ours)


CASES = [
    (kind, dtype, size)
    for kind in KINDS
    for dtype, size in ((torch.float32, "cut"), (torch.bfloat16, "whole"), (torch.bfloat16, "cut"))
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_save_writes_folder_of_transformers(world: int, tmp_path: Path) -> None:
    cases = CASES if world == 2 else [case for case in CASES if case[2] == "cut" and case[1] is torch.float32]
    run_ranks(world, save_both, str(tmp_path), cases)
    for case in cases:
        files = check_same_files(folder_of(tmp_path, *case))
        assert files == 3 if case[2] == "whole" else files > 5


@pytest.mark.parametrize("weights", ["replicate", "none"])
def test_save_unsharded_weights_writes_folder_of_transformers(weights: str, tmp_path: Path) -> None:
    cases = [("tied llama", torch.float32, "cut"), ("mixtral", torch.bfloat16, "cut")]
    run_ranks(2, save_both, str(tmp_path), cases, weights)
    for case in cases:
        check_same_files(folder_of(tmp_path, *case))


def test_save_planted_changed_weight_is_seen(tmp_path: Path) -> None:
    """The comparison sees one changed bit in one file."""
    case = ("llama", torch.float32, "cut")
    run_ranks(2, save_both, str(tmp_path), [case])
    folder = folder_of(tmp_path, *case)
    file = folder / "ours" / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(AssertionError, match=r"model-00002-of-00007\.safetensors differs"):
        check_same_files(folder)


@pytest.mark.parametrize("kind", ["tied llama", "mixtral", "gpt_oss"])
def test_saved_folder_loads_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    run_ranks(2, save_both, str(tmp_path), [(kind, torch.float32, "cut")])
    loaded = AutoModelForCausalLM.from_pretrained(
        folder_of(tmp_path, kind, torch.float32, "cut") / "ours", attn_implementation="eager", dtype="auto"
    )
    twin = build(kind, torch.float32).eval()
    ids = small_batch()["input_ids"]
    loaded.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, twin(ids).logits)


def train_and_save(folder: str) -> dict[str, Tensor]:
    """Return the gathered weights after a step."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama", dtype=torch.float32, tie_word_embeddings=True), mesh, allow_untested=True)
    causal_loss(model, small_batch(), mesh).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    save_pretrained(model, folder)
    with torch.no_grad():
        causal_loss(model, small_batch(), mesh)
    save_pretrained(model, folder)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def test_save_after_training_equals_one_process(tmp_path: Path) -> None:
    trained = run_ranks(2, train_and_save, str(tmp_path))[0]
    saved = load_file(tmp_path / "model.safetensors")
    assert sorted(saved) == sorted(trained)
    for name, tensor in saved.items():
        assert torch.equal(tensor, trained[name]), name
    untrained = dict(small_model("llama", dtype=torch.float32, tie_word_embeddings=True).named_parameters())
    assert all(not torch.equal(tensor, untrained[name]) for name, tensor in saved.items())


def save_adapter(folder: str, weights: str) -> Tensor:
    from peft import LoraConfig, get_peft_model

    mesh = init_mesh(sp=2)
    base = small_model("llama", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids = small_batch()["input_ids"]
    with torch.no_grad():
        logits = model.eval()(ids).logits
    save_pretrained(parallelize(model, mesh, weights=weights, allow_untested=True), folder)  # type: ignore[arg-type]
    return logits


@pytest.mark.parametrize("weights", ["shard", "none"])
def test_saved_adapter_loads_with_peft(weights: str, tmp_path: Path) -> None:
    from peft import PeftModel

    expected = run_ranks(2, save_adapter, str(tmp_path), weights)[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any(name.startswith("model") for name in names)
    loaded = PeftModel.from_pretrained(small_model("llama", dtype=torch.float32), str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(small_batch()["input_ids"]).logits, expected)
        with loaded.disable_adapter():
            assert not torch.equal(loaded(small_batch()["input_ids"]).logits, expected)


def _adapters(kind: str) -> Any:
    """Return kinds of adapters whose PEFT files hold more than one low-rank adapter named "default"."""
    from peft import LoraConfig, get_peft_model

    whole = {"modules_to_save": ["lm_head"]} if kind == "whole" else {}
    tokens = {"trainable_token_indices": [1, 5]} if kind == "tokens" else {}
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **whole, **tokens)
    model = get_peft_model(small_model("llama"), config, adapter_name="mine" if kind == "named" else "default")
    if kind == "several":
        model.add_adapter("other", LoraConfig(r=3, target_modules=["down_proj"], init_lora_weights=False))
    return model


def save_adapters(folder: str, kind: str) -> None:
    save_pretrained(parallelize(_adapters(kind), init_mesh(sp=2)), folder)


@pytest.mark.parametrize("kind", ["whole", "tokens", "named", "several"])
def test_save_adapters_writes_files_of_peft(kind: str, tmp_path: Path) -> None:
    run_ranks(2, save_adapters, str(tmp_path / "ours"), kind)
    _adapters(kind).save_pretrained(tmp_path / "theirs")
    files = [
        {str(path.relative_to(tmp_path / side)): load_file(path) for path in (tmp_path / side).rglob("*.safetensors")}
        for side in ("ours", "theirs")
    ]
    assert len(files[1]) == (2 if kind == "several" else 1)
    torch.testing.assert_close(*files, rtol=0, atol=0)


def save_to(folder: str, *, adapter: bool = False, fail: int | None = None) -> None:
    mesh = init_mesh(sp=2)
    model: Any = small_model("llama", dtype=torch.float32)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    model = parallelize(model, mesh, allow_untested=True)
    with full_disk_after(fail):
        save_pretrained(model, folder, max_shard_size="20KB")


@contextmanager
def full_disk_after(files: int | None) -> Iterator[None]:
    original = write_weights.write_tensors
    written: list[Path] = []

    def write(path: Path, tensors: dict[str, Tensor]) -> None:
        if files is not None and len(written) >= files:
            raise OSError(28, "No space left on device")
        written.append(path)
        original(path, tensors)

    with patch.object(write_weights, "write_tensors", write):
        yield


@pytest.mark.parametrize("adapter", [False, True])
def test_save_to_file_is_refused_on_all_ranks(adapter: bool, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("mine")
    expect_refusal(
        2, save_to, str(path), adapter=adapter, error="IthacaError", match="taken: it is a file, a folder is"
    )
    assert path.read_text() == "mine"


def test_save_full_disk_raises_on_all_ranks_and_keeps_older_save(tmp_path: Path) -> None:
    run_ranks(2, save_to, str(tmp_path))
    before = contents(tmp_path)
    expect_refusal(2, save_to, str(tmp_path), fail=2, error="IthacaError", match="could not write to .*No space left")
    assert contents(tmp_path) == before


def test_save_over_other_file_sizes_removes_older_files(tmp_path: Path) -> None:
    foreign = tmp_path / "model_of_mine.safetensors"
    foreign.write_bytes(b"mine")
    run_ranks(2, save_to, str(tmp_path))
    assert (tmp_path / "model.safetensors.index.json").exists()
    run_ranks(2, train_and_save, str(tmp_path))
    weights = {path.name for path in tmp_path.iterdir() if "safetensors" in path.name}
    assert weights == {"model.safetensors", foreign.name}
    run_ranks(2, save_to, str(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    weights = {path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"}
    assert weights == {*index["weight_map"].values(), foreign.name}


def storages(tensors: dict[str, Tensor]) -> int:
    """Return the bytes that these tensors keep alive; views of one storage count once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors.values()}.values())


def most_held(folder: str, kind: str, size: str, *, hoard: bool = False) -> tuple[int, int]:
    """Return the most bytes that the writer held, and the bytes of the largest file plus the largest layer."""
    mesh = init_mesh(sp=2)
    model = parallelize(build(kind, torch.float32), mesh, allow_untested=True)
    held, files, layers = [0], [0], [0]
    kept: dict[str, Tensor] = {}
    take, write = write_weights._FileWriter.take, write_weights.write_tensors

    def watched_take(writer: Any, base: Any, layer: dict[str, Tensor]) -> None:
        layers.append(storages(layer))
        held.append(storages({**writer.pending, **{f"layer.{key}": x for key, x in layer.items()}}))
        if hoard:
            kept.update(layer)
            held.append(storages(kept))
        take(writer, base, layer)

    def watched_write(path: Path, tensors: dict[str, Tensor]) -> None:
        files.append(storages(tensors))
        write(path, tensors)

    class Writer(write_weights._FileWriter):  # type: ignore[misc]
        take = watched_take

    with patch.multiple(write_weights, _FileWriter=Writer, write_tensors=watched_write):
        save_pretrained(model, folder, max_shard_size=size)
    return max(held), max(files) + max(layers)


@pytest.mark.parametrize(("kind", "size"), [("llama", "20KB"), ("mixtral", "60KB"), ("qwen3_moe", "60KB")])
def test_save_rank_0_holds_one_file_and_one_layer(kind: str, size: str, tmp_path: Path) -> None:
    """File sizes that every tensor fits into; a larger tensor has its own file."""
    total = sum(p.numel() * 4 for p in build(kind, torch.float32).parameters())
    most, allowed = run_ranks(2, most_held, str(tmp_path / "a"), kind, size)[0]
    assert 0 < most <= allowed < total
    hoarded, allowed = run_ranks(2, most_held, str(tmp_path / "b"), kind, size, hoard=True)[0]
    assert hoarded > allowed, "a writer that keeps everything goes unseen"


def test_save_without_process_group_writes_folder(tmp_path: Path) -> None:
    model = small_model("llama", dtype=torch.float32)
    copy.deepcopy(model).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    save_pretrained(model, tmp_path / "ours", max_shard_size="20KB")
    check_same_files(tmp_path)
    with pytest.raises(IthacaError, match="it is a file"):
        save_pretrained(model, tmp_path / "ours" / "config.json")


def plain_save(folder: str, weights: str, unbound: bool) -> None:
    model = parallelize(small_model("llama"), init_mesh(sp=2), weights=weights)  # type: ignore[arg-type]
    if unbound:
        unbind(model)
    model.save_pretrained(folder)


@pytest.mark.parametrize(("weights", "unbound"), [("shard", False), ("shard", True), ("replicate", False)])
def test_model_save_of_sharded_weights_is_refused_naming_ours(tmp_path: Path, weights: str, unbound: bool) -> None:
    match = r"call ithaca\.save_pretrained\(model, folder\) on every rank"
    expect_refusal(2, plain_save, str(tmp_path), weights, unbound, error="UnsupportedError", match=match)


def plain_save_that_works(folder: str) -> None:
    """Save whole weights, and a gathered state dict."""
    mesh = init_mesh(sp=2)
    whole = small_model("llama").state_dict()
    for weights in ("none", "shard"):
        model = parallelize(small_model("llama"), mesh, weights=weights)  # type: ignore[arg-type]
        if mesh.rank == 0:
            model.save_pretrained(Path(folder) / weights, **({"state_dict": whole} if weights == "shard" else {}))


def test_model_save_of_whole_weights_stays(tmp_path: Path) -> None:
    run_ranks(2, plain_save_that_works, str(tmp_path))
    a, b = (load_file(tmp_path / weights / "model.safetensors") for weights in ("none", "shard"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
