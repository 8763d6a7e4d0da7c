"""What is run over damaged files, and what may come of it: the kinds of the fuzz.

A `Kind` names the files that may be damaged and a verb. The verb returns what its user would take from it (tokens,
weights, a resolved run file) or raises `Refused`. Where `same` is true, what it returns has to be what the undamaged
files give; a damaged document is another document and a damaged weight another weight, so there it is false.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ithaca.errors
from ithaca.cli import main
from ithaca.config.schema import load_run
from ithaca.data.prepared import prepare
from ithaca.models.files.tokenizer import load_tokenizer
from tests.fuzz.house import train_in
from tests.ranks import RankError, run_ranks

# One sentence, with room for a path and a library's own words in it.
_LONGEST = 1200


class Refused(Exception):
    """The sentence that a user gets."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Files below the folder that may be damaged (glob patterns), and what is run over them."""

    name: str
    files: tuple[str, ...]
    act: Callable[[Path, Path], Any]
    same: bool = True
    # All results that are right, where there are more than one; else the one over undamaged files.
    right: Callable[[Path], list[Any]] | None = None
    # Folders that the verb may write to; in them a good file may be replaced, elsewhere none may change.
    writes: tuple[str, ...] = ()

    def candidates(self, root: Path) -> list[Path]:
        """Files that may be damaged, links left out."""
        found = {file for pattern in self.files for file in root.glob(pattern)}
        return sorted(file for file in found if file.is_file() and not file.is_symlink())


@contextlib.contextmanager
def standing_in(root: Path) -> Iterator[None]:
    """Paths in run files are relative, and a machine's calibration is the folder's own."""
    before, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
    os.chdir(root)
    os.environ["XDG_CACHE_HOME"] = str(root / "calibration")
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("XDG_CACHE_HOME")
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = cache


def typed(root: Path, *words: str) -> str:
    """A verb as it is typed, in this process; what it printed, or Refused with its one sentence."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["ithaca", *words]
    try:
        with standing_in(root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        if stop.code:
            if stop.code != 2:
                raise AssertionError(f"{words} ended with {stop.code}: {err.getvalue()}") from None
            raise Refused(_one_sentence(err.getvalue())) from None
    finally:
        sys.argv = argv
    return out.getvalue()


def _one_sentence(said: str) -> str:
    line = said.strip().splitlines()[-1] if said.strip() else ""
    assert line, "a refusal without a word"
    assert "Traceback" not in said, said
    assert len(line) < _LONGEST, f"{len(line)} letters: {line[:300]}"
    return line


def on_ranks(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What rank 0 returns; Refused where every rank that raised was refused by name."""
    try:
        return run_ranks(2, function, *args, timeout=60, **options)[0]
    except RankError as caught:
        for rank, raised in caught.exceptions.items():
            known = isinstance(getattr(ithaca.errors, raised.error, None), type)
            assert known, f"rank {rank} raised {raised.error}: {raised.message}\n{raised.traceback}"
        raise Refused(_one_sentence(caught.exceptions[caught.rank].message)) from None


def show_run(root: Path, damaged: Path) -> Any:
    """`ithaca train run.yaml --show`, which has to print a run file that is read the same again."""
    shown = typed(root, "train", "run.yaml", "--show")
    again = root / "again.yaml"
    again.write_text(shown, encoding="utf-8")
    assert typed(root, "train", "again.yaml", "--show") == shown


def prepare_data(root: Path, damaged: Path) -> Any:
    """`ithaca prepare` of the damaged file alone, or of the folder of texts it stands in."""
    source = damaged.parent if damaged.parent.name == "texts" else damaged
    kind = "chat" if damaged.parent.name == "chats" else "text"
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    (root / "template.jinja").write_text(template, encoding="utf-8")
    words = [f"data.sources=[{{path: {source.relative_to(root)}, kind: {kind}}}]", "data.cache=fresh"]
    words += ["data.chat_template=template.jinja"] if kind == "chat" else []
    typed(root, "prepare", "run.yaml", *words)


def read_tokenizer(root: Path, damaged: Path) -> Any:
    """`ithaca prepare` with the damaged tokenizer, into a cache of its own."""
    typed(root, "prepare", "run.yaml", "data.cache=fresh")


def open_cache(root: Path, damaged: Path) -> Any:
    """`ithaca prepare` over the cache that is there; gives every token of every document."""
    typed(root, "prepare", "run.yaml")
    with standing_in(root):
        run = load_run("run.yaml", [])
        try:
            prepared = prepare(
                run.data,
                load_tokenizer(run.model.name),
                validation=run.validation,
                seed=run.seed,
                folder=Path(run.data.cache or "."),
            )
            return [[(ids.tolist(), learn.tolist()) for ids, learn in _documents(store)] for store in prepared.stores]
        except ithaca.errors.IthacaError as error:
            raise Refused(_one_sentence(str(error))) from None


def _documents(store: Any) -> Iterator[Any]:
    return (store.piece(number, 0, int(length)) for number, length in enumerate(store.lengths))


def resume(root: Path, damaged: Path) -> Any:
    """`ithaca train` over the folder of a run that was stopped: its last weights and losses."""
    return _train_again(root, "runs/one")


def restart(root: Path, damaged: Path) -> Any:
    """`ithaca train` over the folder of a run that is done: its model stays what it is."""
    found = _train_again(root, "runs/two")
    # A damaged model or journal of a run that is done is not written again.
    return None if "stages" in damaged.parts or damaged.suffix == ".jsonl" else found


def _train_again(root: Path, output: str) -> Any:
    result = on_ranks(train_in, str(root), output)
    assert result["status"] == 0
    assert any((root / output / "checkpoints").glob("step-*/manifest.json")), "no checkpoint is left"
    losses = [(line["step"], line["loss"]) for line in result["metrics"] if line["kind"] == "step"]
    return result["sum"], losses[-1:]


def export(root: Path, damaged: Path) -> Any:
    """`ithaca export` of the newest whole checkpoint: its step, and a hash of its weights."""
    return _export(root, "runs/one")


def exports(root: Path) -> list[Any]:
    """What may come of it: the newest checkpoint, or the one before it if that is said."""
    return [_export(root, f"runs/one/checkpoints/{name}") for name in ("step-00000007", "step-00000006")]


def _export(root: Path, path: str) -> Any:
    to = root / f"out-{Path(path).name}"
    said = typed(root, "export", path, "--to", to.name)
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(to.glob("*.safetensors"))]
    return said.split(" -> ")[0].rpartition("step-")[2], sums


def start(root: Path, damaged: Path) -> Any:
    """`ithaca plan` and two steps of `ithaca train` from the damaged model, into a folder of their own."""
    typed(root, "plan", "--model", "model", "--length", "64", "--gpus", "8xH100")
    result = on_ranks(train_in, str(root), "runs/new", steps=2)
    assert result["status"] == 0
    assert all(line["loss"] is not None for line in result["metrics"] if line["kind"] == "step")
    assert result["sum"] is not None


def plan(root: Path, damaged: Path) -> Any:
    """`ithaca plan` on the card that was measured."""
    typed(root, "plan", "--model", "llama-3.1-8b", "--length", "32k", "--gpus", "H200")


_RUN = "runs/one"
KINDS: tuple[Kind, ...] = (
    Kind("run file", ("run.yaml",), show_run, same=False),
    Kind("texts", ("texts/*",), prepare_data, same=False),
    Kind("tables", ("tables/*",), prepare_data, same=False),
    Kind("chats", ("chats/*",), prepare_data, same=False),
    Kind("tokenizer", ("model/tokenizer*",), read_tokenizer, same=False),
    Kind("cache", ("cache/**/*",), open_cache, writes=("cache",)),
    Kind("model", ("model/*",), start, same=False),
    Kind("run folder", (f"{_RUN}/*",), resume, writes=("cache", _RUN)),
    Kind("checkpoint to resume", (f"{_RUN}/checkpoints/*/*",), resume, writes=("cache", _RUN)),
    Kind("checkpoint to export", (f"{_RUN}/checkpoints/*/*",), export, right=exports),
    Kind("finished run", ("runs/two/*", "runs/two/*/*/*"), restart, writes=("cache", "runs/two")),
    Kind("calibration", ("calibration/**/*",), plan, same=False),
)


def hashes(root: Path) -> dict[str, str]:
    """Every file below `root` with a hash of its content."""
    files = (file for file in sorted(root.rglob("*")) if file.is_file() and not file.is_symlink())
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def lost(before: dict[str, str], after: dict[str, str], writes: tuple[str, ...]) -> list[str]:
    """Files whose content is nowhere any more; those that the verb may write are left out."""
    there = set(after.values())
    return [
        name
        for name, content in before.items()
        if content not in there and not any(name.startswith(f"{folder}/") for folder in writes)
    ]


def fresh(good: Path, at: Path) -> Path:
    """A copy of the undamaged files in place of what was there."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(good, at, symlinks=True)
    return at
