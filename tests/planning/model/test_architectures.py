"""Reader of architectures.json, and the shape of the file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

from ithaca.planning.model.architectures import ArchitectureFacts, architectures, facts_of, structures_of, verdicts
from tools.survey.measured import facts_row
from tools.survey.stated import stated_kinds


def test_facts_of_unknown_type_are_uncounted_llama() -> None:
    assert facts_of("brand_new") == ArchitectureFacts()
    assert structures_of("brand_new") == {}
    assert facts_of("llama").counted
    assert "brand_new" not in verdicts()


def test_architectures_every_row_is_valid() -> None:
    known = {field.name for field in fields(ArchitectureFacts)}
    for kind, row in architectures()["architectures"].items():
        assert set(row) <= {"verdict", "facts", "structures"}, kind
        assert set(row.get("facts", {})) <= known, kind
        assert set(row.get("structures", {})) in (set(), {"models", "layers"}), kind


def test_structures_only_of_types_with_exact_replays() -> None:
    stored = {kind for kind in architectures()["architectures"] if structures_of(kind)}
    assert {"llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gpt_oss"} <= stored
    assert {verdicts()[kind].get("memory") for kind in stored} == {"exact"}


def test_facts_of_every_type_equal_measured_and_stated() -> None:
    rows = architectures()["architectures"]
    found = {kind: facts_row(kind) for kind in sorted(stated_kinds())}
    assert {kind: row["facts"] for kind, row in rows.items() if "facts" in row} == found


def test_measured_facts_are_those_that_modeling_files_show() -> None:
    assert facts_row("gemma2")["norms_in_fp32"]
    assert "centred" not in facts_row("gemma2")
    assert facts_row("cohere")["centred"]
    assert facts_row("cohere")["one_norm"]
    assert not facts_row("gpt2")["gated"]
    assert "gated" not in facts_row("mixtral")
    assert facts_row("qwen3_moe")["slides_if_set"]
    assert "slides_if_set" not in facts_row("llama")


def test_architectures_reader_imports_no_torch() -> None:
    code = (
        "import sys; from ithaca.planning.model.architectures import verdicts, facts_of, structures_of; "
        "verdicts(), facts_of('llama'), structures_of('llama'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
