"""Liger's kernel of a tile: taken only where it is the one known here, and given what it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ithaca.constants import IGNORE_INDEX
from ithaca.memory import liger
from ithaca.memory.head_loss import LossSpec, loss_and_gradient

SPECS = [LossSpec(), LossSpec(softcap=5.0), LossSpec(smoothing=0.1), LossSpec(softcap=5.0, smoothing=0.1, z=0.01)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clear the cache before and after."""
    liger.tile_kernel.cache_clear()
    yield
    liger.tile_kernel.cache_clear()


def installed(*arguments: str) -> Any:
    """A package with a kernel of these arguments."""
    names = ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.cross_entropy")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].liger_cross_entropy_kernel = SimpleNamespace(arg_names=list(arguments))  # type: ignore[attr-defined]
    return patch.dict(sys.modules, modules)


def test_liger_not_installed_gives_none() -> None:
    with patch.object(liger, "find_spec", lambda _: None):
        assert liger.tile_kernel() is None


def test_liger_broken_import_gives_none() -> None:
    # Of a package that was imported before, too: what is asked for by its full name is looked up by it.
    broken = dict.fromkeys(("liger_kernel", "liger_kernel.ops.cross_entropy"))
    with patch.object(liger, "find_spec", lambda _: True), patch.dict(sys.modules, broken):
        assert liger.tile_kernel() is None


def test_liger_other_arguments_give_none() -> None:
    known = sorted(liger.USED | liger.UNUSED.keys())
    with patch.object(liger, "find_spec", lambda _: True):
        with installed(*known):
            assert liger.tile_kernel() is not None
        liger.tile_kernel.cache_clear()
        with installed(*known, "TEMPERATURE"):
            assert liger.tile_kernel() is None
        liger.tile_kernel.cache_clear()
        with installed(*known[1:]):
            assert liger.tile_kernel() is None


class Standing:
    """Stands for the kernel, and writes where it writes."""

    def __getitem__(self, grid: tuple[int]) -> Standing:
        self.grid = grid
        return self

    def __call__(self, **given: Any) -> None:
        assert given.keys() - {"num_warps"} == liger.USED | liger.UNUSED.keys()
        assert given["HAS_SOFTCAPPING"] == (given["softcap"] is not None)
        assert given["BLOCK_SIZE"] >= min(given["n_cols"], liger.MOST_COLUMNS)
        logits, targets = given["X_ptr"], given["Y_ptr"]
        assert self.grid == (len(logits),)
        spec = LossSpec(softcap=given["softcap"], smoothing=given["label_smoothing"], z=given["lse_square_scale"])
        loss, gradient = loss_and_gradient(logits, targets, spec)
        learned = targets != given["ignore_index"]
        given["loss_ptr"][learned] = loss[learned].float()
        logits.copy_(gradient)


@pytest.mark.parametrize("spec", SPECS)
def test_liger_settings_reach_kernel(spec: LossSpec) -> None:
    logits, targets = torch.randn(7, 33), torch.randint(0, 33, (7,))
    targets[2] = IGNORE_INDEX
    loss, gradient = loss_and_gradient(logits, targets, spec)
    got = liger.in_place(
        Standing(), logits, targets, softcap=spec.softcap, smoothing=spec.smoothing, z=spec.z, ignore=IGNORE_INDEX
    )
    assert torch.equal(got, loss)
    assert torch.equal(logits, gradient)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("vocabulary", [1000, 128_256])
def test_liger_kernel_on_gpu_equals_reference(spec: LossSpec, vocabulary: int) -> None:
    kernel = liger.tile_kernel()
    if kernel is None:
        pytest.skip("needs liger-kernel")
    logits = 3 * torch.randn(70, vocabulary, device="cuda")
    targets = torch.randint(0, vocabulary, (70,), device="cuda")
    targets[2] = IGNORE_INDEX
    loss, gradient = loss_and_gradient(logits.double(), targets, spec)
    got = liger.in_place(
        kernel, logits, targets, softcap=spec.softcap, smoothing=spec.smoothing, z=spec.z, ignore=IGNORE_INDEX
    )
    torch.testing.assert_close(got, loss.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, gradient.float(), rtol=1e-4, atol=1e-7)
