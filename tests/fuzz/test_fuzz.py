"""Every kind of damage to a file of every kind, drawn from a seed; and the two outcomes that are allowed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz.damage import DAMAGES
from tests.fuzz.house import build
from tests.fuzz.verbs import KINDS, Kind, Refused, fresh, hashes, lost

BY_NAME = {kind.name: kind for kind in KINDS}


class Fuzz:
    """The undamaged files, what every kind gives over them, and a place for the damaged copy."""

    def __init__(self, root: Path) -> None:
        self.good, self.copy = build(root / "good"), root / "copy"
        self.truths: dict[str, list[Any]] = {}

    def truth(self, kind: Kind) -> list[Any]:
        if kind.name not in self.truths:
            root = fresh(self.good, self.copy)
            first = kind.candidates(root)[0]
            self.truths[kind.name] = [kind.act(root, first)] if kind.right is None else kind.right(root)
        return self.truths[kind.name]

    def case(self, kind: Kind, seed: int) -> str:
        """Damage one file, run the verb, hold the outcome; gives what was done and what came of it."""
        truth = self.truth(kind)
        random = Random(f"{kind.name} {seed}")
        root = fresh(self.good, self.copy)
        file = random.choice(kind.candidates(root))
        did = f"{kind.name} {seed}: {file.relative_to(root)}: {DAMAGES[seed % len(DAMAGES)](file, random)}"
        before = hashes(root)
        try:
            result = kind.act(root, file)
            said, writes = "taken", kind.writes
        except Refused as refusal:
            result, said, writes = None, f"refused: {refusal}", ()
        except AssertionError as error:
            raise AssertionError(f"{did}: {error}") from None
        except Exception as error:
            raise AssertionError(f"{did}: {type(error).__name__}: {error}") from error
        assert said != "taken" or not kind.same or result in [None, *truth], f"{did}: another result"
        missing = [name for name in lost(before, hashes(root), writes) if name != str(file.relative_to(root))]
        assert not missing, f"{did}; {said}; lost: {missing}"
        return f"{did}; {said}"


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.few(16)
@pytest.mark.parametrize("seed", range(len(DAMAGES)))
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_file_damaged_is_refused_or_changes_nothing(fuzz: Fuzz, kind: Kind, seed: int) -> None:
    fuzz.case(kind, seed)


def _ignores_damage(root: Path, damaged: Path) -> Any:
    return damaged.read_bytes()


def _loses_a_file(root: Path, damaged: Path) -> Any:
    (root / "texts" / "001.txt").unlink()
    raise Refused("something")


def _breaks(root: Path, damaged: Path) -> Any:
    raise KeyError("a traceback")


@pytest.mark.parametrize(
    ("act", "seen"), [(_ignores_damage, "another result"), (_loses_a_file, "lost"), (_breaks, "KeyError")]
)
def test_verb_planted_fault_is_seen(fuzz: Fuzz, act: Any, seen: str) -> None:
    kind = Kind("planted", ("texts/000.txt",), act)
    fuzz.truths["planted"] = [(fuzz.good / "texts" / "000.txt").read_bytes()]
    with pytest.raises(AssertionError, match=seen):
        fuzz.case(kind, 1)


def main(words: list[str]) -> None:
    """Run cases of a kind (or "all") by seed: `KIND FIRST [LAST]`, and show what each did."""
    first, last = int(words[1]), int(words[-1])
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        for kind in KINDS if words[0] == "all" else [BY_NAME[words[0]]]:
            for seed in range(first, last + 1):
                try:
                    print("ok   ", fuzz.case(kind, seed)[:300], flush=True)
                except AssertionError as fault:
                    print("FAULT", str(fault)[-1500:], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
