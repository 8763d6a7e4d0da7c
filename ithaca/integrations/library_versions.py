"""Releases of accelerate, transformers, trl and peft that were tested, and the refusal of any other.

The integration depends on undocumented behaviour of these libraries, so an untested release is refused by name instead
of failing with an AttributeError in the middle of a run.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from ithaca.errors import UnsupportedError

# major.minor of the releases that tests/integrations ran with.
TESTED = {"accelerate": ("1.15",), "transformers": ("5.22", "5.23"), "trl": ("1.16",), "peft": ("0.21",)}


def check_versions(*, allow_untested: bool) -> None:
    """Refuse an unknown release of a library that this process has imported."""
    if allow_untested:
        return
    unknown = []
    for name, known in TESTED.items():
        if name in sys.modules:
            with suppress(PackageNotFoundError):
                found = version(name)
                if ".".join(found.split(".")[:2]) not in known:
                    unknown.append(f"{name} {found}")
    if unknown:
        tested = ", ".join(f"{name} {' or '.join(known)}" for name, known in TESTED.items())
        raise UnsupportedError(
            f"UlyssesConfig was not run with {', '.join(unknown)}: tested are {tested}. Install one of these, or pass "
            "allow_untested=True and compare the first losses with one process"
        )
