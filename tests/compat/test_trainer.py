"""What a Trainer of an earlier version left: its pickled arguments load, its checkpoint is taken up."""

from __future__ import annotations

import contextlib
import json
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch

import ithaca
from tests.compat.held import environment, read
from tests.compat.make import run_script
from tests.compat.test_runs import same

# Modules whose classes stand in files of users, by these names.
PICKLED = {
    "ithaca.integrations.config UlyssesConfig",
    "ithaca.integrations.config UlyssesRecord",
    "ithaca.integrations.settings Settings",
    "ithaca.planning.plan MemoryPlan",
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
        # Not every file is a pickle.
        with contextlib.suppress(ValueError):
            values = [value for _, value, _ in pickletools.genops(part)]
            # Module and name in one, or by later protocols the module alone.
            found |= {value for value in values if isinstance(value, str) and value.startswith("ithaca.")}
    return found


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
    assert vars(config).keys() >= vars(ithaca.UlyssesConfig()).keys()
    json.dumps(found.to_dict()["parallelism_config"])


def test_training_args_of_then_with_a_plan_load(unpacked: Path) -> None:
    found = torch.load(unpacked / "plan.bin", weights_only=False)
    plan = ithaca.MemoryPlan(("save", "recompute"), (False, True), 1024, 512)
    assert found.parallelism_config.settings.memory == plan
    assert repr(found.parallelism_config) == repr(ithaca.UlyssesConfig(memory=plan, host_budget="1GB"))


def test_training_args_of_then_as_trl_made_them_load(unpacked: Path) -> None:
    record = torch.load(unpacked / "sft.bin", weights_only=False).parallelism_config
    assert record["host_budget"] == record.settings.host_budget == "1GB"


@pytest.mark.slow
def test_trainer_from_a_checkpoint_of_then_gets_the_losses_of_then(work: Path) -> None:
    losses = run_script(work, "script.py", "trainer/checkpoint-3", **environment())
    assert losses == same(read("trainer.json")["again"])
    assert losses[-3:] == pytest.approx(read("trainer.json")["first"][3:], abs=1e-5)


def test_loop_from_a_state_of_then_gets_the_losses_of_then(work: Path) -> None:
    assert run_script(work, "loop.py", "state.pt", **environment()) == same(read("trainer.json")["loop"])
