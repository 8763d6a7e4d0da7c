"""Folders that models are exported to: an empty one or this run's own, never a mixture, and modes of the umask."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.config.schema import LoraSettings
from ithaca.errors import IthacaError
from ithaca.mesh import init_mesh
from ithaca.models.files.export_checkpoint import describe_model, find_checkpoint
from ithaca.models.files.export_folder import MARK, export_into, read_mark
from ithaca.models.files.pretrained import add_adapters
from ithaca.models.files.write_weights import save_pretrained
from ithaca.parallelize import parallelize
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.verify.small_models.features import small_model
from tests.ranks import expect_refusal, run_ranks


def make_run(run: str, identity: str, spoil: bool = False) -> None:
    """Make a run with two checkpoints of a small model, started from a folder."""
    root = Path(run)
    model: Any = small_model("llama", dtype=torch.float32, seed=len(identity))
    model.save_pretrained(root / "start")
    (root / "start" / "tokenizer_config.json").write_text("{}")
    mesh = init_mesh()
    model = parallelize(model, mesh, memory=None)
    keeper = Checkpoints(root / "checkpoints", 2, mesh, background=False)
    facts = {"model": describe_model(model, folder=root / "start"), "run": identity}
    tensors = state_tensors(model)
    for step in (1, 2):
        with torch.no_grad():
            for tensor in tensors.values():
                tensor += 1
            if spoil:
                tensors["model.model.norm.weight"][3] = float("nan")
        keeper.save(step, tensors, facts)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_ranks(1, make_run, str(tmp_path / "run"), "one")
    (tmp_path / "run" / "metrics.jsonl").touch()
    return tmp_path / "run"


def export(*words: object) -> str | None:
    """Return the message of a refused export; None if it was written."""
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == 0 or isinstance(result.exception, IthacaError), result.exception
    return None if result.exit_code == 0 else str(result.exception)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def another_model(folder: Path) -> Path:
    """Write a user's model in shards, with an adapter, a tokenizer and a pickle."""
    small_model("qwen3", dtype=torch.float32).save_pretrained(folder, max_shard_size="10KB")
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.model",
        "vocab.json",
        "pytorch_model.bin",
    ):
        (folder / name).write_bytes(b"theirs")
    (folder / "README.md").write_text("mine")
    return folder


def test_export_over_another_model_needs_force(run: Path, tmp_path: Path) -> None:
    there = another_model(tmp_path / "there")
    before = contents(there)
    said = export(run, "--to", there)
    assert said is not None
    assert "which this run did not write: name a new or empty folder, or use --force" in said
    assert contents(there) == before
    assert export(run, "--to", there, "--force") is None
    assert export(run, "--to", tmp_path / "fresh") is None
    ours = contents(there)
    assert ours.pop("README.md") == b"mine"
    assert ours == contents(tmp_path / "fresh")
    assert AutoModelForCausalLM.from_pretrained(there).config.model_type == "llama"


def test_export_over_same_run_replaces_its_files(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert export(run, "--to", to, "--step", 1) is None
    first = contents(to)
    (to / "notes.txt").write_text("mine")
    assert export(run, "--to", to, "--step", 2, "--dtype", "bf16") is None
    second = contents(to)
    assert second.pop("notes.txt") == b"mine"
    assert second.keys() == first.keys()
    assert load_file(to / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    # What would be read with the model is no note.
    (to / "adapter_config.json").write_text("{}")
    assert "adapter_config.json, which this run did not write" in (export(run, "--to", to) or "")
    (to / "adapter_config.json").unlink()
    run_ranks(1, make_run, str(tmp_path / "other"), "other")
    assert "--force" in (export(tmp_path / "other", "--to", to) or "")
    mark = read_mark(to)
    assert mark is not None
    assert (mark.run, mark.step) == ("one", 2)


def test_export_after_killed_export_leaves_one_model(run: Path, tmp_path: Path) -> None:
    """The export is killed between any two files: the marker names the files, and the next export removes them."""
    to = tmp_path / "to"
    assert export(run, "--to", to, "--step", 1) is None
    (to / ".ithaca-export.part").mkdir()
    (to / ".ithaca-export.part" / "model-00001-of-00002.safetensors").touch()
    old = json.loads((to / MARK).read_text())
    (to / MARK).write_text(json.dumps(old | {"files": [*old["files"], "model-00001-of-00002.safetensors"]}))
    (to / "model-00001-of-00002.safetensors").touch()
    (to / "config.json").unlink()
    assert export(run, "--to", to) is None
    assert export(run, "--to", tmp_path / "fresh") is None
    assert contents(to) == contents(tmp_path / "fresh")


def test_export_to_impossible_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "linked").symlink_to(run)
    before = contents(run)
    for to, said in (
        (run, "is the run's own folder"),
        (tmp_path / "linked", "is the run's own folder"),
        (tmp_path, "is a folder above the run"),
        (run / "start", "is where the run takes its model from"),
        (run / "checkpoints", "which the run keeps for itself"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be written"),
        (tmp_path / "nowhere", ""),
        (tmp_path / "loop", ""),
        (tmp_path / ("long" * 100), "cannot be written"),
        ("/proc/model", "cannot be written"),
    ):
        for more in ((), ("--force",)):
            found = export(run, "--to", to, *more)
            if to == tmp_path / "nowhere" and found is None:
                continue
            assert found is not None, to
            assert said in found, found
            assert "\n" not in found
    assert contents(run) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_export_to_link_is_checked_like_its_target(run: Path, tmp_path: Path) -> None:
    there = another_model(tmp_path / "there")
    (tmp_path / "link").symlink_to(there)
    assert "did not write" in (export(run, "--to", tmp_path / "link") or "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty link").symlink_to(tmp_path / "empty")
    assert export(run, "--to", tmp_path / "empty link") is None
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_export_with_nan_is_refused(tmp_path: Path) -> None:
    run_ranks(1, make_run, str(tmp_path / "run"), "one", True)
    said = export(tmp_path / "run", "--to", tmp_path / "to")
    assert said is not None
    assert "NaN or infinite numbers in model.norm.weight" in said
    assert not list((tmp_path / "to").glob("*.safetensors"))


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_export_files_have_mode_of_umask(run: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert export(run, "--to", tmp_path / "to") is None
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "to").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def save_both(folder: str) -> dict[str, int]:
    """Save a model and an adapter from a plain loop."""
    os.umask(0o022)
    root, mesh = Path(folder), init_mesh()
    model = parallelize(small_model("llama", dtype=torch.float32), mesh, memory=None)
    save_pretrained(model, root / "whole", max_shard_size="10KB")
    save_pretrained(model, root / "whole")
    adapted = add_adapters(small_model("llama", dtype=torch.float32), LoraSettings(rank=2), seed=0)  # type: ignore[arg-type]
    save_pretrained(parallelize(adapted, mesh, memory=None), root / "adapter")
    return {path.name: path.stat().st_mode & 0o777 for path in root.glob("*/*")}


def test_save_over_own_shards_has_usual_modes(tmp_path: Path) -> None:
    for modes in run_ranks(2, save_both, str(tmp_path)):
        assert set(modes.values()) == {0o644}, modes
        assert {name for name in modes if name.startswith("model")} == {"model.safetensors"}


def save_beside_an_adapter(folder: str) -> None:
    model = parallelize(small_model("llama", dtype=torch.float32), init_mesh(), memory=None)
    save_pretrained(model, folder)


def test_save_beside_adapter_is_refused(tmp_path: Path) -> None:
    """from_pretrained would load the adapter on the adapter's own base instead of the saved model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    expect_refusal(
        2,
        save_beside_an_adapter,
        str(tmp_path),
        error="IthacaError",
        match="holds the adapter_config.json of an adapter",
    )
    assert os.listdir(tmp_path) == ["adapter_config.json"]


def test_export_refusal_names_path_as_typed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for words, said in (
        ([run.name], f"{run.name}/checkpoints/step-00000002 -> {run.name}/export-step-2\n"),
        ([run.name, "--to", "out"], f"{run.name}/checkpoints/step-00000002 -> out\n"),
        ([run, "--to", "out"], f"{run}/checkpoints/step-00000002 -> out\n"),
        ([run.name, "--to", tmp_path / "o"], f"{run.name}/checkpoints/step-00000002 -> {tmp_path / 'o'}\n"),
    ):
        assert CliRunner().invoke(app, ["export", *map(str, words)]).stdout.startswith(said)


def test_export_stopped_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    """Folders that the export made are removed, its parents included; earlier folders stay with their files."""
    checkpoint = find_checkpoint(run)
    there = tmp_path / "there"
    there.mkdir()

    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    for target in (tmp_path / "new", tmp_path / "above" / "new", there):
        with pytest.raises(KeyboardInterrupt):
            export_into(checkpoint, target, stop)
    assert sorted(tmp_path.iterdir()) == [run, there]
    assert not list(there.iterdir())
