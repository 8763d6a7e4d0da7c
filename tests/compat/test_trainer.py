"""What a Trainer of an earlier version left: its pickled arguments load, its checkpoint is taken up."""

from __future__ import annotations

import json
import pickletools
import socket
import zipfile
from pathlib import Path

import pytest
import torch

import ithaca
from tests.compat.held import ROOT, read, run_alone
from tests.compat.test_runs import MADE, same

# Modules whose classes stand in files of users, by these names.
PICKLED = {
    "ithaca.integrations.config UlyssesConfig",
    "ithaca.integrations.settings Settings",
}


def pickled_names(file: Path) -> set[str]:
    """Names of ithaca's that a pickle, or a file of torch.save, would import."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            parts = [opened.read(name) for name in opened.namelist() if name.endswith("data.pkl")]
    else:
        parts = [file.read_bytes()]
    found: set[str] = set()
    for part in parts:
        texts: list[str] = []
        try:
            for code, value, _ in pickletools.genops(part):
                if code.name == "GLOBAL":
                    found.add(str(value))
                elif code.name == "STACK_GLOBAL":
                    found.add(" ".join(texts[-2:]))
                if isinstance(value, str):
                    texts.append(value)
        except ValueError:
            # No pickle.
            continue
    return {name for name in found if name.startswith("ithaca")}


def test_files_of_then_name_no_other_classes_than_those_kept(unpacked: Path) -> None:
    names = {name for file in unpacked.rglob("*") if file.is_file() for name in pickled_names(file)}
    assert names == PICKLED


def test_training_args_of_then_load_with_their_settings(unpacked: Path) -> None:
    found = torch.load(unpacked / "trainer" / "training_args.bin", weights_only=False)
    config = found.parallelism_config
    assert isinstance(config, ithaca.UlyssesConfig)
    assert config.settings.plain() == {
        **config.settings.plain(),
        "sp_size": 2,
        "memory": {"layers": "save"},
        "memory_budget": "2GB",
        "weights": "shard",
    }
    # All that the class has now, so that it can be printed, logged and trained with.
    assert repr(config) == repr(ithaca.UlyssesConfig(sp_size=2, memory={"layers": "save"}, memory_budget="2GB"))
    assert vars(config).keys() == vars(ithaca.UlyssesConfig()).keys()
    json.dumps(found.to_dict()["parallelism_config"])


@pytest.mark.slow
def test_trainer_from_a_checkpoint_of_then_gets_the_losses_of_then(work: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    words = [str(ROOT / "tests" / "compat" / "script.py"), "trainer/checkpoint-3"]
    ranks = [run_alone(words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    losses = json.loads((work / "losses.json").read_text())
    assert losses == same(MADE["trainer"]["again"])
    assert read("made.json")["trainer"]["first"][3:] == pytest.approx(losses[-3:], abs=1e-5)
