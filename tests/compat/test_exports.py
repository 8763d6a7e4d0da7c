"""Models that an earlier version exported load, and its checkpoints are exported to the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ithaca
from tests.compat.held import Typed
from tests.ranks import run_ranks


def logits(folder: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def sharded_loss(folder: str) -> float:
    mesh = ithaca.init_mesh(sp=2, device="cpu")
    model = ithaca.parallelize(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), mesh)
    ids = torch.arange(3, 19)[None]
    return float(ithaca.causal_loss(model, {"input_ids": ids, "labels": ids}, mesh).detach())


def test_export_in_plain_transformers_and_on_ranks_gives_one_loss(work: Path) -> None:
    folder = str(work / "exported")
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "sea ship"
    ids = torch.arange(3, 19)
    alone = torch.nn.functional.cross_entropy(logits(folder)[0, :-1], ids[1:])
    torch.testing.assert_close(torch.tensor(run_ranks(2, sharded_loss, folder)), alone.expand(2))


def test_checkpoint_of_then_is_exported_to_the_same_weights(work: Path, typed: Typed) -> None:
    status, _, said = typed("export runs/ended --to again")
    assert status == 0, said
    then, now = load_file(work / "exported/model.safetensors"), load_file(work / "again/model.safetensors")
    assert then.keys() == now.keys()
    assert all(torch.equal(then[name], now[name]) for name in then)


def test_folder_of_an_earlier_export_is_replaced_with_force_only(work: Path, typed: Typed) -> None:
    # It has no mark of whose export it is: the earlier version left none, and wrote over whatever was there.
    status, _, said = typed("export runs/ended --to exported")
    assert (status, "--force" in said) == (2, True)
    status, _, said = typed("export runs/ended --to exported --force")
    assert status == 0, said
    torch.testing.assert_close(logits(str(work / "exported")), logits(str(work / "runs/ended/export")))
