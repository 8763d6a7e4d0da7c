"""Tests of folders that no model can be built of: every verb that reads one ends with one sentence and status 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.config.schema import load_run
from ithaca.errors import IthacaError
from ithaca.models.files.pretrained import empty_model
from ithaca.models.files.tokenizer import load_tokenizer
from ithaca.training.session import stage_config
from tests.bad_configs import BAD_FILES, BAD_VALUES
from tests.training.runs import tiny_model

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def verbs(typed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Status and errors of plan, verify, rehearse and train on a folder, as far as each gets before a rank is started."""
    monkeypatch.setattr("ithaca.launch.launcher.launch", lambda *a, **k: 0)
    monkeypatch.setattr("ithaca.rehearse.rehearse_page.page", lambda *a: "")
    monkeypatch.setattr(
        "ithaca.rehearse.rehearsal.rehearse", lambda asked, tell: empty_model(asked.config, dtype=torch.float32)
    )

    def run(folder: Path) -> dict[str, tuple[int, str]]:
        words = {
            "plan": ("--length", "1k", "--gpus", "1xH100", "--write", "-"),
            "verify": ("--device", "cpu"),
            "rehearse": ("--length", "64", "--world", "8"),
        }
        ends = {}
        for verb, more in words.items():
            status, out, err = typed(verb, "--model", str(folder), *more)
            assert "Traceback" not in out + err
            ends[verb] = (status, err)
        # `train` asks this on every rank, before the documents are prepared.
        try:
            run = load_run(None, [f"model.name={folder}", "stages=[{length: 64, steps: 1}]"])
            stage_config(run, str(folder), 0)
            ends["train"] = (0, "")
        except IthacaError as error:
            ends["train"] = (2, f"ithaca: {error}\n")
        return ends

    return run


def expect_refused(ends: dict[str, tuple[int, str]]) -> None:
    assert {verb: status for verb, (status, _) in ends.items()} == dict.fromkeys(ends, 2)
    for verb, (_, err) in ends.items():
        assert err.startswith("ithaca: "), (verb, err)
        assert err.count("\n") == 1, (verb, err)
        assert "config.json" in err or "model.json" in err or "/model" in err


def test_valid_folder_passes_every_verb(verbs: Any, folder: Path) -> None:
    assert verbs(folder) == dict.fromkeys(("plan", "verify", "rehearse", "train"), (0, ""))


@pytest.mark.few(20)
@pytest.mark.parametrize("name", BAD_VALUES)
def test_config_with_bad_value_is_refused_by_every_verb(verbs: Any, folder: Path, name: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **BAD_VALUES[name]}))
    expect_refused(verbs(folder))


@pytest.mark.parametrize("name", BAD_FILES)
def test_file_that_is_no_config_is_refused_by_every_verb(verbs: Any, folder: Path, name: str) -> None:
    held = BAD_FILES[name]
    file = folder / "config.json"
    file.unlink() if held is None else file.write_bytes(held)
    expect_refused(verbs(folder))


def test_code_in_a_folder_is_not_run_for_a_known_type(verbs: Any, folder: Path) -> None:
    file = folder / "config.json"
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    (folder / "own.py").write_text("raise SystemExit('code of the folder was run')\n")
    assert {status for status, _ in verbs(folder).values()} == {0}


GENERATION = {
    "cut": "{", "list": "[]", "number": "5", "temperature": '{"temperature": "hot"}',
    "compile": '{"compile_config": 5}', "tokens": '{"suppress_tokens": 5}', "watermark": '{"watermarking_config": 5}',
}  # fmt: skip


@pytest.mark.parametrize("name", GENERATION)
def test_invalid_generation_config_is_refused(typed: Any, folder: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr("ithaca.launch.launcher.launch", lambda *a, **k: 0)
    (folder / "generation_config.json").write_text(GENERATION[name])
    status, _, err = typed("verify", "--device", "cpu", "--model", str(folder))
    assert (status, err.count("\n")) == (2, 1)
    assert "generation_config.json: transformers could not save a model with it" in err


CUT = '{"version": "1.0", "model": '
TOKENIZERS: dict[str, tuple[str, Any]] = {
    "cut": ("tokenizer.json", CUT),
    "list": ("tokenizer.json", []),
    "null": ("tokenizer.json", None),
    "no_model": ("tokenizer.json", {"model": None}),
    "vocabulary_of_a_list": ("tokenizer.json", {"model": {"type": "BPE", "vocab": [], "merges": []}}),
    "merges_of_strangers": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": [["zz", "yy"]]}}),
    "regex": ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}),
    "panic": (
        "tokenizer.json",
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ),
    "config_cut": ("tokenizer_config.json", "{"),
    "config_list": ("tokenizer_config.json", []),
    "class_of_a_number": ("tokenizer_config.json", {"tokenizer_class": 5}),
    "class_without_its_files": ("tokenizer_config.json", {"tokenizer_class": "CTRLTokenizer"}),
    "class_of_another_model": ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}),
    "class_in_the_folder": (
        "tokenizer_config.json",
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
    ),
    "special_token_of_a_number": ("tokenizer_config.json", {"eos_token": 5}),
    "side": ("tokenizer_config.json", {"padding_side": "wobble"}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_that_cannot_be_built_is_refused(typed: Any, folder: Path, name: str) -> None:
    file, change = TOKENIZERS[name]
    path = folder / file
    if isinstance(change, dict):
        change = {**json.loads(path.read_text()), **change}
    path.write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(IthacaError, match="no tokenizer came from"):
        load_tokenizer(str(folder))
    Path("text.txt").write_text("one\n\ntwo")
    status, out, err = typed("prepare", f"model.name={folder}", "data.sources=text.txt", "output=run")
    assert status == 2
    assert "Traceback" not in out + err
    assert "no tokenizer came from" in err.splitlines()[-1]
