"""Kinds of damage to one file, each a function of the file and a random generator.

Every function returns a few words on what it did, so that a failing case can be understood without running it again.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[Path, Random], str]

# What a value of JSON or YAML may be replaced by: of every type, and of sizes that nobody meant.
_VALUES = (
    "null",
    "-1",
    "0",
    "1e999",
    "NaN",
    "true",
    '""',
    '"wobble"',
    "[]",
    "{}",
    "[[1]]",
    "99999999999999999999",
    "0.5",
    "'",
)
_VALUE = re.compile(rb'(?<=[:\[,])\s*("(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[A-Za-z_][\w/.-]*)')


def flip(file: Path, random: Random) -> str:
    """Flip one to eight bits."""
    content = bytearray(file.read_bytes())
    places = [random.randrange(len(content)) for _ in range(random.randint(1, 8))] if content else []
    for place in places:
        content[place] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return f"bits flipped at {places}"


def cut(file: Path, random: Random) -> str:
    """Cut the file short."""
    content = file.read_bytes()
    length = random.randrange(len(content)) if content else 0
    file.write_bytes(content[:length])
    return f"cut to {length} of {len(content)} bytes"


def empty(file: Path, random: Random) -> str:
    """Leave nothing of the content."""
    file.write_bytes(b"")
    return "emptied"


def zero(file: Path, random: Random) -> str:
    """A block of zeros, as a file system leaves after a crash."""
    content = bytearray(file.read_bytes())
    start = random.randrange(len(content)) if content else 0
    end = min(len(content), start + random.choice((16, 512, 4096)))
    content[start:end] = bytes(end - start)
    file.write_bytes(content)
    return f"bytes {start} to {end} zeroed"


def grow(file: Path, random: Random) -> str:
    """Random bytes at the end."""
    with file.open("ab") as stream:
        stream.write(random.randbytes(random.choice((1, 7, 300))))
    return "random bytes appended"


def noise(file: Path, random: Random) -> str:
    """Random bytes in place of everything."""
    file.write_bytes(random.randbytes(random.choice((3, 100, 5000))))
    return "random bytes"


def value(file: Path, random: Random) -> str:
    """Another value where a text file has one; bits flipped where there is none."""
    content = file.read_bytes()
    found = list(_VALUE.finditer(content)) if b"\0" not in content else []
    if not found:
        return flip(file, random)
    chosen = random.choice(found)
    new = random.choice(_VALUES)
    file.write_bytes(content[: chosen.start(1)] + new.encode() + content[chosen.end(1) :])
    return f"{chosen[1].decode(errors='replace')[:40]} at {chosen.start(1)} became {new}"


def swap(file: Path, random: Random) -> str:
    """The contents of two files exchanged."""
    others = [other for other in sorted(file.parent.rglob("*")) if other.is_file() and other != file]
    if not others:
        return cut(file, random)
    other = random.choice(others)
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"swapped with {other.relative_to(file.parent)}"


def compressed(file: Path, random: Random) -> str:
    """The same content, gzipped, under the old name."""
    file.write_bytes(gzip.compress(file.read_bytes()))
    return "gzipped under its old name"


def twice(file: Path, random: Random) -> str:
    """The content two times."""
    file.write_bytes(file.read_bytes() * 2)
    return "its content twice"


def gone(file: Path, random: Random) -> str:
    """No file."""
    file.unlink()
    return "deleted"


def folder(file: Path, random: Random) -> str:
    """A folder of that name."""
    file.unlink()
    file.mkdir()
    return "a folder in its place"


def dangling(file: Path, random: Random) -> str:
    """A link to nothing."""
    file.unlink()
    file.symlink_to(file.parent / "nowhere")
    return "a link to nothing"


def deep(file: Path, random: Random) -> str:
    """JSON nested deeper than a parser's stack."""
    file.write_text("[" * 100_000 if random.random() < 0.5 else json.dumps({"a": 1})[:-1] + ', "b": ' + "[" * 50_000)
    return "nested 50,000 deep"


DAMAGES: tuple[Damage, ...] = (
    flip, cut, empty, zero, grow, noise, value, value, value, swap, compressed, twice, gone, folder, dangling, deep,
)  # fmt: skip


def copy_tree(good: Path, to: Path) -> Path:
    """A copy to damage, links kept as links."""
    shutil.copytree(good, to, symlinks=True)
    return to
