"""Numbers with suffixes (`128k`, `2B`), amounts of memory (`60GiB`, `80GB`) and paths with `~`, as people write them.

parse_number("128k", 1024)  # 131072
parse_bytes("60GiB")        # 64424509440
show_bytes(64424509440)     # "60.00 GiB"
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from ithaca.constants import GIB
from ithaca.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def parse_number(value: object, base: int) -> object:
    """Return `128k` as a whole number, with `base` for `k`; a value that is no text goes to the caller's checks."""
    if not isinstance(value, str):
        return refuse_bool(value)
    number = _read_decimal(value, base)
    if number is None:
        raise ValueError(f"{value!r} is no number such as 4096, 128k or 1M")
    if number != int(number):
        raise ValueError(f"{value!r} is {number:f}, which is no whole number: use {int(number)}")
    return int(number)


def _read_decimal(text: str, base: int) -> Decimal | None:
    """Return the value of `128k`, `1_000` or `1e6`; None if the text is no number."""
    # ASCII digits alone, and no exponent above two digits: 1e999999999 would take all memory as an int.
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbgt]?)\s*", text, re.IGNORECASE)
    return None if found is None else Decimal(found[1].replace("_", "")) * base ** _POWERS[found[2].lower()]


def parse_bytes(value: object) -> object:
    """Return `60GiB` or `80GB` as bytes; a value that is no text goes to the caller's checks."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9._e+]+\s*[kmgt]?)(i?)b?\s*", value, re.IGNORECASE)
    size = None if found is None else _read_decimal(found[1], 1024 if found[2] else 1000)
    if size is None:
        raise ValueError(f"{value!r} is no amount of memory such as 60GiB or 80GB")
    return int(size)


def require_unit(value: int) -> int:
    """Refuse an amount of memory so small that its unit was forgotten."""
    if 0 < value < 1024:
        raise ValueError(f"{value} is taken as bytes: write a unit, such as {value}GB")
    return value


def memory_unit(size: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit to show `size` in: MiB below a quarter of a GiB, else GiB."""
    return (GIB, "GiB") if size >= 2**28 else (2**20, "MiB")


def show_bytes(size: float, digits: int = 2) -> str:
    """Return `60.00 GiB`."""
    unit, name = memory_unit(size)
    return f"{size / unit:.{digits}f} {name}"


def show_part(part: float, whole: float) -> str:
    """Return `89.9 of 79.1 GiB`, in the unit of the larger amount."""
    unit, name = memory_unit(max(part, whole))
    return f"{part / unit:.1f} of {whole / unit:.1f} {name}"


def plural(count: int, noun: str) -> str:
    """Return `1 step` or `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def bytes_setting(size: float) -> str:
    """Return a text that `parse_bytes` reads, such as `38.8GiB`; rounded down, so that it is never above `size`."""
    unit, name = memory_unit(size)
    return f"{math.floor(10 * size / unit) / 10:g}{name}"


def refuse_bool(value: object) -> object:
    """Return the value; refuse True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


def finite_or_nan(value: Any) -> float:
    """Return a number of any kind, also a tensor's, as a float; nan if it is not finite, a text or a bool."""
    if isinstance(value, str | bool):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def expand_home(value: str) -> str:
    """Return a path with `~` written out; ConfigError if it is empty or names the home of an unknown user."""
    if not value.strip() or "\0" in value:
        raise ConfigError(f"{value!r} is no path: name a file or a folder")
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError:
        raise ConfigError(
            f"{value!r} begins with the home of a user that is not known here: write the whole path"
        ) from None
