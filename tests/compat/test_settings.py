"""Run files of an earlier version are read to the settings that it read them to."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.compat.held import FILES, Typed, read

NAMES = sorted(file.stem for file in (FILES / "settings").glob("*.yaml"))


def changed(then: Any, now: Any, where: str = "") -> list[str]:
    """Settings of then that are gone or have another value now; later versions may have more."""
    if isinstance(then, dict) and isinstance(now, dict):
        gone = [f"{where}.{key} is gone" for key in then if key not in now]
        return gone + [fault for key in then if key in now for fault in changed(then[key], now[key], f"{where}.{key}")]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [fault for at, (old, new) in pairs for fault in changed(old, new, f"{where}.{at}")]
    return [] if then == now else [f"{where} was {then!r} and is {now!r}"]


@pytest.mark.parametrize("name", NAMES)
def test_run_file_of_then_reads_to_the_same_settings(name: str, typed: Typed) -> None:
    words = "data.sources=texts" if name == "planned" else ""
    status, shown, said = typed(f"train {FILES}/settings/{name}.yaml {words} --show")
    assert status == 0, said
    assert changed(read(f"settings/{name}.json"), yaml.safe_load(shown)) == []


@pytest.mark.parametrize("name", NAMES)
def test_resolved_file_of_then_is_a_run_file(name: str, typed: Typed, tmp_path: Any) -> None:
    then = read(f"settings/{name}.json")
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(then))
    status, shown, said = typed(f"train {file} --show")
    assert status == 0, said
    assert changed(then, yaml.safe_load(shown)) == []
