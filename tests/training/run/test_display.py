"""Lines of a run as they are read: whole in a log, brackets and all."""

from __future__ import annotations

import pytest

from ithaca.training.run.display import Display


@pytest.mark.parametrize("name", ["runs/[exp]", "runs/[/bold]", "runs/:smile:"])
def test_log_line_with_markup_in_path_is_whole(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said = f"going on from {name}/{'a long name ' * 9}/step-00000005: 5 steps done"
    Display(shows=True, stages=1).say(said)
    assert capsys.readouterr().err == f"{said}\n"
