"""Tests of run.yaml: values, overrides, and the one sentence for each mistake."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from ithaca.config.schema import RunSettings, SourceSettings, StageSettings, dump_run, load_run, read_run
from ithaca.errors import ConfigError


def test_empty_run_file_is_the_embedded_run() -> None:
    run = load_run(None)
    assert run == RunSettings()
    assert (run.model.name, len(run.stages)) == ("embedded", 2)
    assert (run.checkpoints.save_every, run.checkpoints.keep) == (200, 2)


def test_dumped_run_reads_back_the_same() -> None:
    run = read_run(
        {"lora": {"rank": 4}, "stages": [{"length": "1M", "tokens": "2B", "rope": {"kind": "ntk", "factor": 2}}]}
    )
    assert read_run(yaml.safe_load(dump_run(run))) == run


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("128k", 131_072),
        ("1M", 1_048_576),
        ("1.5k", 1536),
        ("4096", 4096),
        ("1_000", 1000),
        (7, 7),
        ("1e3", 1000),
        ("1.5e3", 1500),
    ],
)
def test_length_with_k_counts_1024(text: str | int, number: int) -> None:
    assert StageSettings(length=text, steps=1).length == number  # type: ignore[arg-type]


def test_stage_of_tokens_counts_1000_and_becomes_steps() -> None:
    stage = StageSettings(length="1k", tokens="2M", batch=4)  # type: ignore[arg-type]
    assert stage.tokens == 2_000_000
    assert stage.count == round(2_000_000 / (1024 * 4))


@pytest.mark.parametrize(("text", "number"), [("60GiB", 60 * 2**30), ("80GB", 80 * 10**9), ("80gb", 80 * 10**9)])
def test_memory_in_gib_or_gb_is_read(text: str, number: int) -> None:
    assert load_run(None, [f"memory.budget={text}"]).memory.budget == number


def test_override_replaces_the_value_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 3\nstages:\n- {length: 4k, steps: 5}\n")
    run = load_run(file, ["stages.0.length=8k", "stages.1.length=16k", "stages.1.steps=2", "mesh.sp=2", "lora.rank=8"])
    assert run.seed == 3
    assert [(s.length, s.steps) for s in run.stages] == [(8192, 5), (16_384, 2)]
    assert run.mesh.sp == 2
    assert run.lora is not None
    assert run.lora.rank == 8


def test_override_below_absent_key_keeps_its_defaults() -> None:
    run = load_run(None, ["stages.0.length=64k"])
    assert run.stages[0].length == 65_536
    assert run.stages[0].steps == RunSettings().stages[0].steps
    assert run.stages[1] == RunSettings().stages[1]


def test_source_as_plain_path_is_read() -> None:
    run = load_run(None, ["data.sources=books/"])
    assert [source.path for source in run.data.sources] == ["books/"]
    assert load_run(None, ["validation.sources=held.jsonl"]).validation.sources[0].path == "held.jsonl"
    assert load_run(None, ["data.sources="]).data.sources == []
    for given in ("chats.jsonl", "[chats.jsonl]", "{path: chats.jsonl}", "[{path: chats.jsonl}]"):
        (source,) = load_run(None, [f"data.sources={given}", "data.sources.0.kind=chat"]).data.sources
        assert (source.path, source.kind) == ("chats.jsonl", "chat")
    two = read_run({"data": {"sources": ["a.jsonl", {"path": "b", "kind": "chat"}]}})
    assert [(source.path, source.kind) for source in two.data.sources] == [("a.jsonl", "auto"), ("b", "chat")]


def test_memory_decided_by_hand_takes_one_value_or_one_a_layer() -> None:
    said = ["memory.layers=save", "memory.offload=false", "memory.mlp_tile=4k", "memory.head_groups=2"]
    run = load_run(None, said)
    assert run.memory.decided == {"layers": "save", "offload": False, "mlp_tile": 4096, "head_groups": 2}
    assert read_run(yaml.safe_load(dump_run(run))) == run
    each = load_run(None, ["memory.layers=[save, recompute]", "memory.offload=[true, false]"])
    assert each.memory.decided == {"layers": ["save", "recompute"], "offload": [True, False]}
    freed = [f"memory.{name}=null" for name in run.memory.decided]
    assert load_run(None, [*said, *freed]) == RunSettings()


WRONG = [
    (["stage.0.length=4k"], "unknown key 'stage': did you mean 'stages'?"),
    (["stages.0.lenght=4k"], "unknown key 'lenght' in stages.0: did you mean 'length'?"),
    (["data.sources.0.formt=text"], "did you mean 'format'?"),
    (["optimizer.zzz=1"], "it takes name, betas"),
    (["precision=fp16"], "use 'mixed' or 'bf16'"),
    (["stages.7.length=4k"], "use 0 to 2"),
    (["stages.0.tokens=5M"], "set the other one to null"),
    (["stages=[{length: 4k}]"], "neither is given"),
    (["stages=[]"], "stages: got []: at least 1 is needed"),
    (["mesh.sp=two"], "mesh.sp: got 'two': a whole number is needed, or 'auto'"),
    (["stages.0.lr=fast"], "stages.0.lr: got 'fast': a number is needed"),
    (["stages=[{steps: 5}]"], "stages.0.length is missing: give it a value"),
    (["lr=1e-5"], "unknown key 'lr': did you mean stages.0.lr?"),
    (["data.kind=chat"], "unknown key 'kind' in data: did you mean data.sources.0.kind?"),
    (["epochs=3"], "unknown key 'epochs': it takes output, seed"),
    (["stages.0.length=long"], "'long' is no number such as 4096, 128k or 1M"),
    (["stages.0.length=1.0003k"], "'1.0003k' is 1024.3072, which is no whole number: use 1024"),
    (["stages.0.length=1:30"], "'1:30' is no number such as 4096, 128k or 1M"),
    (["stages.0.steps=0"], "stages.0.steps: got 0"),
    (["model.name=''"], "model.name: '' is no path: name a file or a folder"),
    (["data.sources=['']"], "data.sources.0.path: '' is no path"),
    (['output="a\\0b"'], "is no path"),
    (["output=~nobody-here/x"], "'~nobody-here/x' begins with the home of a user that is not known here"),
    (["data={}", "data="], "such as data.sources=..."),
    (["stages=[{length: 4k, length: 8k}]"], "line 1: the key 'length' is there twice: leave one of them"),
    (["memory.budget=40"], "memory.budget: 40 is taken as bytes: write a unit, such as 40GB"),
    (["memory.budget=lots"], "60GiB or 80GB"),
    (["memory.layers=kept"], "memory.layers.0: got 'kept': choose 'keep', 'save', 'rebuild' or 'recompute'"),
    (["memory.offload=far"], "memory.offload.0: got 'far': true or false is needed"),
    (["memory.mlp_tile=0"], "memory.mlp_tile: got 0"),
    (["memory.tile=4k"], "unknown key 'tile' in memory: did you mean 'mlp_tile'?"),
    (
        ["memory.plan=none", "memory.offload=false"],
        "memory: plan=none leaves all to autograd: leave out offload, or use",
    ),
    (["model.kernel"], "write key.sub=value"),
    (["seed.x=1"], "nothing under 'x', the value before it is 0: write seed=..."),
    (["stages.0.rope={kind: yarn}"], "needs factor"),
    (["stages.0.rope={kind: theta}"], "needs theta"),
    (["optimizer.name=bf16_sr", "precision=fp32"], "use 'bf16'"),
    (["optimizer.in_backward=true"], "set optimizer.clip=0"),
    (["optimizer.in_backward=true", "optimizer.clip=0"], "stages of batch 1"),
    (["model={"], "not YAML"),
    (["stages.0.steps=true"], "stages.0.steps: true is no number"),
    (["stages.0.lr=true"], "stages.0.lr: true is no number"),
    (["stages.0.length=1"], "got 1: at least 2 is needed"),
    (["stages.0.lr=.inf"], "finite"),
    (["stages.0.warmup=.nan"], "finite"),
    (["optimizer.betas=[1.5, 2.0]"], "optimizer.betas.0: got 1.5: less than 1"),
    (["seed=99999999999999999999999"], "seed: got"),
    (["model=llama"], "model: got 'llama': it is a section, write its keys, such as model.name=llama"),
    (["lora=true"], "lora: got True: it is a section, write its keys, such as lora.rank=16"),
    (["data.sources=3"], "write its keys, such as data.sources.0.path=..."),
    (["stages=3"], "stages: got 3: a list is needed, such as stages=[...]"),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_mistake_in_settings_is_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(None, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"), [("1e3", 1000), ("1_000", 1000), ("010", 10), ("100.0", 100), ("0x10", 16), ("+5", 5)]
)
def test_number_in_yaml_is_read_as_written(text: str, number: int, tmp_path: Path) -> None:
    """No octal and no base of sixty, in an override or in a file."""
    file = tmp_path / "run.yaml"
    file.write_text(f"stages: [{{length: {text}, steps: {text}}}]\n")
    for stage in (
        load_run(None, [f"stages.0.length={text}", f"stages.0.steps={text}"]).stages[0],
        load_run(file).stages[0],
    ):
        assert (stage.length, stage.steps) == (number, number)


@pytest.mark.parametrize("name", ["1e3", "2024-01-01", "010", "1:30", "0x10", "~", "null", "a: b", "ü b"])
def test_text_like_a_number_is_dumped_quoted(name: str, tmp_path: Path) -> None:
    run = read_run({"output": f"{name}" if name != "~" else "x", "model": {"revision": name}})
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run), encoding="utf-8")
    assert load_run(file) == run


@pytest.mark.parametrize(
    "content", ["\ufeffseed: 3\n", "seed: 3\r\n", "# first\r\n\r\nseed: 0003\r\n", "seed: 3"], ids=repr
)
def test_file_with_bom_or_crlf_is_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content.encode())
    assert load_run(file).seed == 3


@pytest.mark.parametrize(
    "content", ["[" * 3000, "seed: " + "1" * 6000, "? [a]\n: 1\n", "seed: 1\n---\nseed: 2\n"], ids=len
)
def test_invalid_yaml_is_one_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"run\.yaml.*(not YAML \(|no number)|seed: got"):
        load_run(file)


def test_unreadable_run_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_run(tmp_path / "no.yaml")
    listed = tmp_path / "list.yaml"
    listed.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds a list"):
        load_run(listed)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"line \d+, column \d+: not YAML"):
        load_run(broken)
    twice = tmp_path / "twice.yaml"
    twice.write_text("model: {name: a}\nstages: []\nmodel: {name: b}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml, line 3: the key 'model' is there twice"):
        load_run(twice)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_run(empty) == RunSettings()


def test_tilde_in_any_path_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/penelope")
    run = load_run(None, ["output=~/runs/a", "model.name=~/m", "model.tokenizer=~/t", "data.sources=~/d"])
    given = [run.output, run.model.name, run.model.tokenizer, run.data.sources[0].path]
    assert given == [f"/home/penelope/{name}" for name in ("runs/a", "m", "t", "d")]


def test_yaml_tag_that_runs_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'made'}]\n")
    with pytest.raises(ConfigError, match=r"line \d+, column \d+: not YAML"):
        load_run(file)
    assert not (tmp_path / "made").exists()


def test_schema_import_leaves_torch_out() -> None:
    code = "import sys, ithaca.config.schema as c; c.load_run(None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ring_refusal_stands_in_one_file() -> None:
    said = "ring attention is not there yet"
    files = (Path(__file__).parents[2] / "ithaca").rglob("*.py")
    assert [path.name for path in files if said in path.read_text(encoding="utf-8")] == ["training_sections.py"]
    run = load_run(None, ["mesh.ring=2"])
    with pytest.raises(ConfigError, match=f"{said}: use mesh.ring=1"):
        run.mesh.refuse_ring()


def test_bytes_are_shown_in_a_readable_unit() -> None:
    from ithaca.quantities import show_bytes, show_part

    assert show_bytes(80 * 2**30, 1) == "80.0 GiB"
    assert show_bytes(2**20) == "1.00 MiB"
    assert show_part(0, 2**34) == "0.0 of 16.0 GiB"
    assert show_part(3 * 2**20, 2**20) == "3.0 of 1.0 MiB"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.sources.path=x", r"write data\.sources\.0\.path=\.\.\. for the first of them, or data\.sources=\.\.\."),
        ("stages.length=4k", r"write stages\.0\.length=\.\.\. for the first of them, or stages=\.\.\. for"),
        ("stages.5.length=4k", "use 0 to 2"),
        ("lora.targets.a=3", r"lora\.targets\.0: got"),
    ],
)
def test_key_without_list_index_gets_the_indexed_name(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run(None, [word])


def test_override_of_default_source_path_drops_its_format() -> None:
    assert load_run(None, ["data.sources.0.path=x.jsonl"]).data.sources == [SourceSettings(path="x.jsonl")]
    kept = read_run({"data": {"sources": [{"path": "x", "kind": "chat"}]}}, ["data.sources.0.path=y"])
    assert kept.data.sources == [SourceSettings(path="y", kind="chat")]


def undocumented_fields(text: str) -> list[str]:
    """Return the annotated names in classes of `text` that no docstring follows."""
    sections = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    missing = []
    for section in sections:
        for field, follower in pairwise([*section.body, ast.Pass()]):
            documented = isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and not documented:
                missing.append(f"{section.name}.{field.target.id}")
    return missing


def test_field_of_the_schema_has_a_docstring() -> None:
    folder = Path(__file__).parents[2] / "ithaca" / "config"
    for name in ("data_sections.py", "training_sections.py", "schema.py"):
        text = (folder / name).read_text(encoding="utf-8")
        assert undocumented_fields(text) == []
        assert undocumented_fields(text.replace('    """Peak learning rate."""\n', "")) == (
            ["StageSettings.lr"] if name == "training_sections.py" else []
        )
