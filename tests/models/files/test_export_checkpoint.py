"""A checkpoint exported by one process is byte for byte what the ranks that trained it would have saved.

Names, file cuts, tied weights, fused experts, config and generation config included. Adapters come out by themselves
and merged, as peft itself merges them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.config.schema import LoraSettings
from ithaca.errors import CheckpointError, IthacaError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.files import export_checkpoint as module
from ithaca.models.files.export_checkpoint import ADAPTER, describe_model, export_checkpoint, find_checkpoint
from ithaca.models.files.pretrained import add_adapters, empty_model
from ithaca.models.files.read_weights import load_weights
from ithaca.models.files.write_weights import save_pretrained
from ithaca.parallelize import parallelize
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            }
        },
    ),
    "mixtral": ("mixtral", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
CUT = "20KB"


def start_from(folder: Path, kind: str) -> Path:
    name, overrides = KINDS[kind]
    model: Any = small_model(name, dtype=torch.float32, **overrides)
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=2)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    return folder


def train_and_save(start: str, run: str, lora: LoraSettings | None) -> int:
    """Train two steps, save a checkpoint and the ranks' own folder; return the checkpoint's bytes."""
    mesh = init_mesh(sp=2)
    model: Any = empty_model(start, dtype=torch.float32)
    model = add_adapters(model, lora, seed=0) if lora else model
    model = parallelize(model, mesh, memory=None, allow_untested=True)
    load_weights(model, start)
    base = model.get_base_model() if lora else model
    base.set_experts_implementation("eager")
    optimizer = build_optimizer(model, lr=1e-2)
    tensors = state_tensors(model, optimizer)
    keeper = Checkpoints(Path(run) / "checkpoints", 3, mesh, background=False)
    facts = {"model": describe_model(model, folder=start)}
    for step in (1, 2):
        causal_loss(model, small_batch(), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()
        keeper.save(step, tensors, facts)
    save_pretrained(model, Path(run) / "live", max_shard_size=CUT)
    return sum(tensor.nbytes for tensor in tensors.values())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if "llama" in kind or kind == "mixtral" else pytest.mark.slow) for kind in KINDS],
)
def test_export_equals_save_of_ranks(kind: str, tmp_path: Path) -> None:
    start_from(tmp_path / "start", kind)
    run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), None)
    export_checkpoint(find_checkpoint(tmp_path), tmp_path / "export", max_shard_size=CUT)
    ours, theirs = contents(tmp_path / "export"), contents(tmp_path / "live")
    assert ours.pop("tokenizer_config.json") == b'{"a": 1}'
    assert sorted(ours) == sorted(theirs)
    assert len(ours) > 5
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    # Another step is another model: the comparison sees it.
    export_checkpoint(find_checkpoint(tmp_path, 1), tmp_path / "earlier", max_shard_size=CUT)
    assert any(
        ours[name] != data for name, data in contents(tmp_path / "earlier").items() if name.endswith("safetensors")
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.generation_config.top_k == 7


def test_export_adapters_writes_adapter_and_merged_model(tmp_path: Path) -> None:
    start_from(tmp_path / "start", "llama")
    kept = run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), LoraSettings(rank=2, alpha=8))[0]
    assert kept < 0.5 * (tmp_path / "start" / "model.safetensors").stat().st_size
    export_checkpoint(find_checkpoint(tmp_path), tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    merged = PeftModel.from_pretrained(base, str(tmp_path / "export" / ADAPTER)).merge_and_unload()
    ours = load_file(tmp_path / "export" / "model.safetensors")
    theirs = merged.state_dict()
    assert sorted(ours) == sorted(theirs)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    before = load_file(tmp_path / "start" / "model.safetensors")
    changed = [key for key in before if not torch.equal(before[key], ours[key])]
    assert len(changed) == 14
    live, exported = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("live", f"export/{ADAPTER}")
    )
    assert sorted(live) == sorted(exported)
    assert all(torch.equal(live[key], exported[key]) for key in live)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


def test_export_command_writes_folder(tmp_path: Path) -> None:
    start_from(tmp_path / "start", "tied llama")
    run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), None)
    done = invoke(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "step-00000002" in done.output
    assert f"-> {tmp_path / 'export-step-2'}" in done.output
    assert not (tmp_path / "export").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export-step-2", dtype="auto").dtype == torch.float32
    done = invoke(str(tmp_path), "--step", "1", "--to", str(tmp_path / "half"), "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    for arguments, match in (
        ((str(tmp_path / "nowhere"),), "nowhere is no folder: name a run"),
        ((str(tmp_path), "--step", "7"), "no checkpoint of step 7: there are 1, 2"),
        ((str(tmp_path / "checkpoints/step-00000001"), "--step", "2"), "not that of step 2"),
    ):
        raised = invoke(*arguments).exception
        assert isinstance(raised, IthacaError)
        assert match in str(raised)


def test_export_to_folder_of_run_is_refused(tmp_path: Path) -> None:
    start_from(tmp_path / "start", "llama")
    run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), None)
    last = tmp_path / "stages" / "1-64"
    export_checkpoint(find_checkpoint(tmp_path), last)
    (tmp_path / "export").symlink_to("stages/1-64", target_is_directory=True)
    before = contents(last)
    done = invoke(str(tmp_path), "--step", "1")
    assert done.exit_code == 0, done.output
    assert contents(tmp_path / "export-step-1")["model.safetensors"] != before["model.safetensors"]
    (tmp_path / "link").symlink_to(tmp_path / "stages", target_is_directory=True)
    for to in (
        "export",
        "export/half",
        "stages",
        "stages/1-64",
        "stages/2-128",
        "link/new",
        "checkpoints/step-00000001",
    ):
        raised = invoke(str(tmp_path), "--step", "1", "--to", str(tmp_path / to)).exception
        assert isinstance(raised, IthacaError), to
        assert "which the run keeps for itself: name another folder" in str(raised)
    assert contents(last) == before
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == ["1-64"]
    # The name alone is nothing: a folder of stages that is no run's may be written to.
    done = invoke(str(tmp_path), "--to", str(tmp_path / "mine" / "stages" / "new"))
    assert done.exit_code == 0, done.output


def test_export_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    start_from(tmp_path / "start", "llama")
    run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), None)
    newest = find_checkpoint(tmp_path)
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert find_checkpoint(tmp_path).name == "step-00000001"
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        find_checkpoint(tmp_path, 2)


def test_export_without_tokenizer_warns_and_writes_weights(tmp_path: Path) -> None:
    start_from(tmp_path / "start", "llama")
    run_ranks(2, train_and_save, str(tmp_path / "start"), str(tmp_path), None)
    for file in (tmp_path / "start").iterdir():
        file.unlink()
    (tmp_path / "start").rmdir()
    with patch.object(module.logger, "warning") as said:
        export_checkpoint(find_checkpoint(tmp_path), tmp_path / "export")
    assert "has no tokenizer" in said.call_args.args[0]
    assert (tmp_path / "export" / "model.safetensors").is_file()
