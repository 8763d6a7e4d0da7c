"""transformers' private conversion tables: the versions, signatures and round trips that `conversion.py` relies on."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ithaca.models.files import conversion
from ithaca.models.files.conversion import CHECKED, copy_conversions, describe_conversions, restore_conversions
from ithaca.models.files.pretrained import transformers_words
from ithaca.models.files.read_weights import WholeWeights, plain_model_like
from ithaca.models.files.safetensors_files import read_headers
from ithaca.models.files.weight_sources import plan_groups
from ithaca.verify.small_models.features import small_model

# Names of the arguments that are passed, in their order; those without a value must be among them.
PASSED = {
    "get_model_conversion_mapping": ["model"],
    "rename_source_key": [
        "source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict",
    ],
    "revert_weight_conversion": ["model", "state_dict"],
    "dot_natural_key": ["s"],
}  # fmt: skip
# Experts stacked, experts stacked and joined, and names on disk as they are in memory.
KINDS = ["mixtral", "qwen3_moe", "llama"]


def wrong_arguments(function: Any, passed: list[str]) -> bool:
    parameters = inspect.signature(function).parameters
    needed = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    return list(parameters)[: len(passed)] != passed or not set(needed) <= set(passed)


def test_installed_version_is_one_that_the_tables_were_checked_on() -> None:
    minor = ".".join(transformers.__version__.split(".")[:2])
    assert minor in CHECKED, (
        f"transformers {minor}: compare its conversion_mapping.py and core_model_loading.py with those of {CHECKED[-1]}, run "
        "tests/models/files whole, then add it to CHECKED in ithaca/models/files/conversion.py"
    )


@pytest.mark.parametrize("name", PASSED)
def test_private_function_takes_the_arguments_passed(name: str) -> None:
    assert not wrong_arguments(getattr(conversion, name), PASSED[name])


def test_another_argument_is_seen() -> None:
    def renamed(net: Any) -> None: ...
    def longer(model: Any, dtype: Any) -> None: ...

    assert wrong_arguments(renamed, ["model"])
    assert wrong_arguments(longer, ["model"])


@pytest.mark.parametrize("kind", KINDS)
def test_folder_read_and_written_has_the_same_names_and_bits(kind: str, tmp_path: Path) -> None:
    small_model(kind, dtype=torch.float32).save_pretrained(tmp_path)
    headers = read_headers(tmp_path)
    twin = plain_model_like(small_model(kind, dtype=torch.float32))
    weights = WholeWeights(twin, tmp_path)
    written = conversion.names_on_disk(twin, {key: weights.whole(key) for key in twin.state_dict()})
    assert {key: tuple(tensor.shape) for key, tensor in written.items()} == {k: h.shape for k, h in headers.items()}
    kept: dict[str, Tensor] = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(weights.whole(key), tensor) for key, tensor in kept.items())


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_described_are_restored(kind: str, tmp_path: Path) -> None:
    model = small_model(kind, dtype=torch.float32)
    assert describe_conversions(model) is None
    model.save_pretrained(tmp_path)
    loaded, other, restored = plain_model_like(model), plain_model_like(model), plain_model_like(model)
    groups = plan_groups(loaded, read_headers(tmp_path), tmp_path)
    described = describe_conversions(loaded)
    assert bool(described) == any(group.converter is not None for group in groups) == (kind != "llama")
    copy_conversions(loaded, other)
    restore_conversions(restored, described)
    assert describe_conversions(other) == described == describe_conversions(restored)


def test_stack_of_experts_is_known_from_other_weights(tmp_path: Path) -> None:
    small_model("mixtral", dtype=torch.float32).save_pretrained(tmp_path)
    twin = plain_model_like(small_model("mixtral", dtype=torch.float32))
    groups = plan_groups(twin, read_headers(tmp_path), tmp_path)
    stacked = {target for group in groups if group.stacked for target in group.targets}
    assert stacked == {key for key in twin.state_dict() if ".experts." in key}


def test_transformers_words_hold_old_names_of_layer_types() -> None:
    assert {"full_attention", "attention"} <= transformers_words().layers, "transformers renamed its private table"
