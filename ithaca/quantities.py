"""Values as a run file or a caller may write them: lengths such as `128k`, amounts such as `2B` and `80GB`, paths with `~`;
and amounts of memory as they are said."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from ithaca.constants import GIB
from ithaca.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def parse_number(value: object, base: int) -> object:
    """`128k` as a whole number, `k` being `base`; what is no such text is left for the checks that follow."""
    if not isinstance(value, str):
        return no_truth(value)
    number = _exact(value, base)
    if number is None:
        raise ValueError(f"{value!r} is no number such as 4096, 128k or 1M")
    if number != int(number):
        raise ValueError(f"{value!r} is {number:f}, which is no whole number: use {int(number)}")
    return int(number)


def _exact(text: str, base: int) -> Decimal | None:
    """What a text such as `128k`, `1_000` or `1e6` says; None where it is no number."""
    # Unicode's other digits are left out; so are exponents that no amount has.
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbgt]?)\s*", text, re.IGNORECASE)
    return None if found is None else Decimal(found[1].replace("_", "")) * base ** _POWERS[found[2].lower()]


def parse_bytes(value: object) -> object:
    """`60GiB` or `80GB` as bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9._e+]+\s*[kmgt]?)(i?)b?\s*", value, re.IGNORECASE)
    size = None if found is None else _exact(found[1], 1024 if found[2] else 1000)
    if size is None:
        raise ValueError(f"{value!r} is no amount of memory such as 60GiB or 80GB")
    return int(size)


def with_unit(value: int) -> int:
    """Refuse an amount of memory so small that its unit was forgotten."""
    if 0 < value < 1024:
        raise ValueError(f"{value} is taken as bytes: write a unit, such as {value}GB")
    return value


def unit_of(size: float) -> tuple[int, str]:
    """GiB; below a quarter of one MiB, so that toys too are told apart."""
    return (GIB, "GiB") if size >= 2**28 else (2**20, "MiB")


def show_bytes(size: float, digits: int = 2) -> str:
    unit, name = unit_of(size)
    return f"{size / unit:.{digits}f} {name}"


def write_bytes(size: float) -> str:
    """As `parse_bytes` takes it, no more than `size`."""
    unit, name = unit_of(size)
    return f"{math.floor(10 * size / unit) / 10:g}{name}"


def show_of(part: float, whole: float) -> str:
    """`89.9 of 79.1 GiB`, in the unit of the larger."""
    unit, name = unit_of(max(part, whole))
    return f"{part / unit:.1f} of {whole / unit:.1f} {name}"


def no_truth(value: object) -> object:
    """`true` is a number to Python, and to nobody who writes it."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


def as_number(value: Any) -> float:
    """A finite number of any kind, a tensor's too; nan for all else, texts and truths included."""
    if isinstance(value, str | bool):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def one_or_more(value: object) -> object:
    """A list, or the one thing that would be in it; nothing is an empty one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def at_home(value: str) -> str:
    """A path with `~` written out; ConfigError where it is none: nothing, or the home of nobody."""
    if not value.strip() or "\0" in value:
        raise ConfigError(f"{value!r} is no path: name a file or a folder")
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError:
        raise ConfigError(
            f"{value!r} begins with the home of a user that is not known here: write the whole path"
        ) from None


Length = Annotated[int, BeforeValidator(lambda value: parse_number(value, 1024)), Field(ge=1)]
Tokens = Annotated[int, BeforeValidator(lambda value: parse_number(value, 1000)), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), AfterValidator(with_unit)]
Number = Annotated[float, BeforeValidator(no_truth)]
Share = Annotated[Number, Field(ge=0.0, le=1.0)]
Decay = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, BeforeValidator(no_truth), Field(ge=1)]
Where = Annotated[str, AfterValidator(at_home)]
WhereIfAny = Annotated[str, AfterValidator(lambda value: at_home(value) if value else value)]


def run_name(model: str, sources: Sequence[str], rest: object) -> str:
    """A name for what is trained on what: the last parts of both, and digits that tell places of one name apart."""
    paths = [path.rstrip("/") for path in (model, *sources)]
    digits = hashlib.sha256(repr((paths, rest)).encode()).hexdigest()[:6]
    more = "-and-more" if len(sources) > 1 else ""
    return f"{_last_part(paths[0])}-{_last_part(paths[1]) if sources else 'data'}{more}-{digits}"


def _last_part(path: str) -> str:
    """The last part of a path or hub name, in letters that every file system takes."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", path.rpartition("/")[2]).strip("-.")
    return name[:40].rstrip("-.") or "folder"
