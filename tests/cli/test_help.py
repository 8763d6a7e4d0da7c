"""Tests of help pages, of the width of pages, and of hints for mistyped words."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli import app
from ithaca.cli.help_text import EPILOGS
from ithaca.config.schema import load_run
from ithaca.errors import ConfigError
from ithaca.models.files.pretrained import find_folder
from ithaca.planning.model.known_models import known_names, nearest_models
from ithaca.report.plan_page import parameters

VERBS = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
ROOT = Path(__file__).parents[2]


def test_verb_has_an_epilog() -> None:
    assert set(VERBS) == set(EPILOGS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples_keys_and_exit_codes(
    typed: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = typed(verb, "--help")
    assert status == 0
    assert "Examples:" in out
    assert f"ithaca {verb}" in out.split("Examples:")[1]
    assert "Exit codes: 0" in out
    assert ("KEY.SUB=VALUE sets one" in out) == ("[KEY.SUB=VALUE]" in out), "keys where a run file is taken"
    assert "[default: 0]" not in out or "from 0" in out


@pytest.mark.parametrize("columns", [40, 79, 80])
def test_narrow_help_page_cuts_no_word(columns: int) -> None:
    """Options differ in their ends: --host-memory, --host-headroom."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "ithaca", "plan", "--help"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "\u2026" not in said
    assert {"--host-memory", "--host-headroom", "--headroom", "config.json"} <= set(re.findall(r"[\w.-]+\w", said))
    assert max(len(line) for line in said.splitlines()) <= max(columns, 52)


@pytest.mark.parametrize("verb", VERBS)
def test_options_in_examples_exist(verb: str) -> None:
    (command,) = [one for one in app.registered_commands if one.callback is not None and one.callback.__name__ == verb]
    from typer.main import get_command_from_info

    built = get_command_from_info(command, pretty_exceptions_short=False, rich_markup_mode=None)
    known = {name for option in built.params for name in option.opts}
    for line in EPILOGS[verb].splitlines():
        if line.startswith("ithaca "):
            words = shlex.split(line)
            assert words[1] == verb
            assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.usefixtures("own_folder")
def test_plan_page_in_a_pipe_is_not_cut(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    status, out, _ = typed("plan", "--model", "llama-3.1-8b", "--length", "128k", "--write", "-", "--compare")
    assert status == 0
    assert "…" not in out
    assert "staged for the host" in out
    assert not [line for line in out.splitlines() if line.endswith(" ")]


@pytest.mark.usefixtures("own_folder")
def test_models_takes_a_type_a_folder_or_a_known_name(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    Path("mine").mkdir()
    Path("mine/config.json").write_text('{"model_type": "qwen3"}')
    said = {typed("models", name) for name in ("qwen3", "mine", "Qwen/Qwen3-8B")}
    assert len(said) == 1
    [(status, out, _)] = said
    assert status == 0
    assert "loss, logits and gradients are those of one process" in out


@pytest.mark.usefixtures("own_folder")
def test_mistyped_folder_gets_the_nearest_name(typed: Any) -> None:
    for name, kept in (("my-llama", "config.json"), ("my-lamas", "notes.txt")):
        Path(name).mkdir()
        Path(name, kept).write_text("{}")
    for words in (("plan", "--model", "./my-lama"), ("plan", "--model", "my-lama")):
        status, _, err = typed(*words)
        assert status == 2
        assert "no such folder here" in err
        assert "did you mean my-llama" in err
    with pytest.raises(ConfigError, match=r"did you mean my-llama\?$"):
        find_folder("./my-lama")


@pytest.mark.usefixtures("own_folder")
def test_model_folder_as_run_file_gets_the_key_to_type() -> None:
    Path("mine").mkdir()
    with pytest.raises(ConfigError, match=r"mine is a folder: name a run\.yaml$"):
        load_run("mine")
    Path("mine/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"given as model\.name=mine$"):
        load_run("mine")


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (8_030_261_248, "8.03 B"),
        (124_439_808, "0.12 B"),
        (99_999_999, "100.00 M"),
        (1_650_000, "1.65 M"),
        (96, "96"),
        (0, "0"),
    ],
)
def test_parameter_count_above_zero_is_never_shown_as_zero(count: int, said: str) -> None:
    assert parameters(count) == said


def test_nearest_model_names_leave_the_name_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in known_names():
        assert name not in nearest_models(name)
        assert name not in nearest_models(name.lower())
    with pytest.raises(ConfigError) as caught:
        find_folder("Qwen/Qwen3-8B")
    assert str(caught.value).count("Qwen/Qwen3-8B'") == 1
    assert "Qwen/Qwen3-8B," not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: [1\nb: 2\n", "line 2, column 2"),
        ("model: {name: x\n", "line 2, column 1"),
        ("a: 1\n\tb: 2\n", "line 2, column 1"),
        ("x: 'y\n", "line 2"),
    ],
)
def test_invalid_yaml_gets_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml, {where}.*: not YAML \(.+\)$"):
        load_run(file)


def on_a_terminal(code: str) -> bytes:
    """Return the output of a program whose stderr is a terminal."""
    own, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(own, 4096):
            written += piece
    except OSError:
        # Linux says so when the other end is closed.
        pass
    os.close(own)
    assert job.wait(60) == 0
    return written


def test_message_replaces_the_progress_line() -> None:
    code = (
        "import os; os.write(2, b'stage 1 ----- 9/60'); "
        "from ithaca.launch.terminal import say_beside_a_bar; say_beside_a_bar('stopping')"
    )
    assert on_a_terminal(code) == b"stage 1 ----- 9/60\r\x1b[Kithaca: stopping\r\n"


def test_loading_message_comes_before_the_import() -> None:
    """Only a terminal gets the message, from a module that imports neither torch nor transformers."""
    code = (
        "import sys; from ithaca.launch.terminal import say_loading; say_loading('loading torch'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert on_a_terminal(code).endswith(b"loading torch ...\r\n")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stderr == b""


@pytest.mark.parametrize("verb", ["train", "verify", "prepare", "rehearse", "doctor"])
def test_slow_verb_prints_loading_before_importing_torch(verb: str) -> None:
    """The first line is written while torch is not there yet."""
    code = (
        f"import sys; sys.argv = ['ithaca', {verb!r}]\n"
        "class Said(Exception): pass\n"
        "def say(text):\n"
        "    assert 'torch' not in sys.modules, 'torch was imported in silence'\n"
        "    raise Said(text)\n"
        "from ithaca.cli import app\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.startswith('ithaca.') and hasattr(module, 'say_loading'):\n"
        "        module.say_loading = say\n"
        "try:\n"
        "    app(standalone_mode=False)\n"
        "except Said:\n"
        "    raise SystemExit(0)\n"
        "raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --steps 5", "type stages.0.steps=5"),
        ("train --lr=1e-3", "type stages.0.lr=1e-3"),
        ("prepare --batch-size 4", "type stages.0.batch=4"),
        ("verify --every 3", "type validation.every=3 or metrics.every=3"),
        ("rehearse --stages.0.steps 3", "type stages.0.steps=3"),
        ("train --data x", "type data.sources.0.path=x"),
        ("train --model x", "type model.name=x"),
        ("train --output --show", "type output=..."),
    ],
)
def test_setting_typed_as_option_gets_the_setting_to_type(typed: Any, words: str, said: str) -> None:
    status, out, err = typed(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("ithaca: --")
    assert err.rstrip().endswith(said)


def test_unknown_option_without_near_setting_is_a_usage_error(typed: Any) -> None:
    status, _, err = typed("train", "--qqq", "5")
    assert status == 2
    assert "no such option" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan llama-3.1-8b", "type --model llama-3.1-8b"),
        ("plan --model llama-3.1-8b --lenght 1M", "did you mean --length?"),
        ("plan --model llama-3.1-8b --json out.json", "type --json > out.json"),
        ("plan --length 1M", "such as --model Qwen/Qwen3-8B"),
        ("plan --model", "see `ithaca --help`"),
        ("doctor gpu", "see `ithaca doctor --help`"),
        ("export runs/mine --dtype fp16", "choose one of 'bf16', 'fp32'"),
        ("export", "see `ithaca export --help`"),
        ("--lenght", "see `ithaca --help`"),
    ],
)
def test_mistake_in_words_is_one_sentence_with_words_to_type(typed: Any, words: str, said: str) -> None:
    status, out, err = typed(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("ithaca: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith(said)
