"""Tests of the doctor: kernels are tried, and missing is not the same as broken."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from ithaca.attention.kernels import AUTO, KERNELS
from ithaca.cli import main
from ithaca.machine import diagnose
from ithaca.machine.kernel_trials import KernelTrial


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, diagnose.Finding]:
    return {each.name: each for each in diagnose.examine(tmp_path_factory.mktemp("runs") / "not" / "yet")}


def test_cpu_kernel_runs_and_is_chosen(findings: dict[str, diagnose.Finding]) -> None:
    assert findings["cpu"].state == findings["blockwise"].state == "right"
    assert findings["cpu"].found.endswith("of fp32: head size 128, head size 256")
    assert findings["cudnn"].state == "missing"
    assert "needs an NVIDIA GPU" in findings["cudnn"].found
    assert findings["chosen"].found.startswith("cpu")
    assert set(KERNELS) <= set(findings)


def test_doctor_on_this_machine_finds_nothing_broken(findings: dict[str, diagnose.Finding]) -> None:
    assert [each for each in findings.values() if each.state == "broken"] == []
    assert findings["torch"].found == torch.__version__
    assert findings["gloo"].state == "good"
    assert findings["output"].topic == "disk"
    assert all(each.fix for each in findings.values() if each.state in ("tight", "wrong", "broken"))


@pytest.mark.parametrize(("state", "chosen"), [("wrong", "broken"), ("missing", "good"), ("right", "good")])
def test_wrong_first_choice_is_broken(monkeypatch: pytest.MonkeyPatch, state: Any, chosen: str) -> None:
    def trial(kernel: Any, device: torch.device) -> KernelTrial:
        return KernelTrial(state if kernel.name == AUTO[0] else "right", "said")

    monkeypatch.setattr(diagnose, "try_kernel", trial)
    found = {each.name: each for each in diagnose.kernels()}
    assert found[AUTO[0]].state == state
    assert found["chosen"].state == chosen
    assert bool(found[AUTO[0]].fix) == (state == "wrong")


def test_missing_package_gets_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.version

    def without(name: str) -> str:
        if name in ("peft", "pydantic"):
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", without)
    missing = diagnose.optional("peft", "LoRA adapters")
    assert (missing.state, missing.fix) == ("missing", "pip install 'ithaca[peft]'")
    needed = diagnose.package(Requirement("pydantic>=2.7"))
    assert (needed.state, needed.fix) == ("broken", "pip install 'pydantic>=2.7'")
    old = diagnose.package(Requirement("torch>=99"))
    assert old.state == "broken"
    assert ">=99 is needed" in old.found


def test_package_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("undefined symbol")

    assert importlib.util.find_spec("rich") is not None
    monkeypatch.setattr(diagnose, "import_module", broken)
    found = diagnose.optional("rich", "pages")
    assert found.state == "missing"
    assert "undefined symbol" in found.found


def test_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises() -> Iterator[diagnose.Finding]:
        raise RuntimeError("the driver is gone")

    for check in ("versions", "kernels", "links", "limits"):
        monkeypatch.setattr(diagnose, check, lambda: iter(()))
    monkeypatch.setattr(diagnose, "devices", raises)
    found = diagnose.examine(tmp_path)
    assert [each.topic for each in found] == ["devices", "disk"]
    assert found[0].state == "broken"
    assert "the driver is gone" in found[0].found


@pytest.mark.parametrize(("state", "status"), [("missing", 0), ("broken", 1)])
def test_broken_finding_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    finding = diagnose.Finding("versions", "torchao", state, "not installed", "pip install 'ithaca[torchao]'")  # type: ignore[arg-type]
    monkeypatch.setattr(diagnose, "examine", lambda folder: [finding])
    for words in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["ithaca", "doctor", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert int(stop.value.code or 0) == status
        said = capsys.readouterr().out
        assert "pip install 'ithaca[torchao]'" in said
        if words:
            assert json.loads(said)[0]["state"] == state
