"""metrics.jsonl on bad disks: full disks, half lines, a folder instead of the file; never a part of a line."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ithaca.errors import ConfigError, DataError
from ithaca.report.loss_picture import draw_loss, read_metrics
from ithaca.training.run.json_lines import JsonLines


def record(step: int, **more: object) -> str:
    return json.dumps({"kind": "step", "step": step, "loss": 1.0, "stage": 1, "length": 64, **more})


def steps(file: Path) -> list[int]:
    data = file.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line)["step"] for line in data.split(b"\n")[:-1]]


@contextmanager
def limited_size(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes: the system writes a part and refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_within_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    file, draw = tmp_path / "metrics.jsonl", random.Random(5)
    lines, written = JsonLines(file), 0
    for _ in range(20):
        lines.append(record(written := written + 1))
        with limited_size(file.stat().st_size + draw.randrange(1, 200)):
            for _ in range(draw.randrange(1, 6)):
                lines.append(record(written := written + 1, pad="x" * draw.randrange(100)))
                assert steps(file) == list(range(1, len(steps(file)) + 1))
    lines.append(record(written + 1))
    assert steps(file) == list(range(1, written + 2))


def test_half_last_line_is_removed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = f"{record(1)}\n{record(2)}\n"
    for cut in range(len(record(3))):
        caplog.clear()
        file.write_text(whole + record(3)[:cut])
        JsonLines(file).append(record(3))
        assert steps(file) == [1, 2, 3]
        assert ("had been cut short" in caplog.text) == (cut > 0)
    file.write_text(whole + record(3))
    JsonLines(file).append(record(4))
    assert steps(file) == [1, 2, 3, 4]


def test_keep_removes_broken_lines_and_later_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    broken = [
        record(2)[:20],
        "[]",
        "{}",
        "null",
        '{"kind": 1, "step": 2}',
        "\ufffd",
        record(3)[:9] + record(3),
        "[" * 9999,
    ]
    file.write_text("\n".join([record(1), *broken, record(2), record(3), record(4)]) + "\n")
    JsonLines(file).keep(lambda found: found["step"] <= 3)
    assert steps(file) == [1, 2, 3]
    assert f"{len(broken)} lines that are no records are removed" in caplog.text
    before = file.stat().st_ino
    JsonLines(file).keep(lambda found: found["step"] <= 2)
    assert (steps(file), file.stat().st_ino) == ([1, 2], before)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_random_bytes_are_read_without_traceback(tmp_path: Path) -> None:
    file, draw = tmp_path / "metrics.jsonl", random.Random(7)
    good = "".join(f"{record(step)}\n" for step in range(1, 30)).encode()
    for _ in range(200):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        if read_metrics(file):
            draw_loss(file, tmp_path / "loss.png") if draw.random() < 0.02 else None
        JsonLines(file).keep(lambda found: found["step"] <= 40)
        JsonLines(file).append(record(40))
        assert steps(file)[-1] == 40


def test_folder_instead_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read .*: move it away"):
        JsonLines(tmp_path / "metrics.jsonl").keep(lambda _: True)
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read"):
        read_metrics(tmp_path / "metrics.jsonl")
