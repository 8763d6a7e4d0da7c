"""Which releases of the libraries above the integration was run against, and what it says of any other.

The integration stands on what these libraries do between their documented calls, so an unknown release is refused by
name rather than met with an AttributeError in the middle of a run.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from ithaca.errors import UnsupportedError

# major.minor of the releases the tests in tests/integrations were run with.
TESTED = {"accelerate": ("1.15",), "transformers": ("5.22", "5.23"), "trl": ("1.16",), "peft": ("0.21",)}


def check_versions(*, allow_untested: bool) -> None:
    """Refuse an unknown release of a library that this process has imported."""
    if allow_untested:
        return
    found = {name: _installed(name) for name in TESTED if name in sys.modules}
    unknown = [f"{name} {got}" for name, got in found.items() if got and not _tested(name, got)]
    if unknown:
        tested = ", ".join(f"{name} {' or '.join(known)}" for name, known in TESTED.items())
        raise UnsupportedError(
            f"UlyssesConfig was not run with {', '.join(unknown)}: tested are {tested}. Install one of these, or pass "
            "allow_untested=True and compare the first losses with one process"
        )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tested(name: str, got: str) -> bool:
    return ".".join(got.split(".")[:2]) in TESTED[name]
