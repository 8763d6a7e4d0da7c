"""`python -m tools.lint [FOLDER or FILE ...]`: print one line a fault, exit with 1 if there is one."""

from __future__ import annotations

import sys

from tools.lint.tree import tree_faults


def main(only: list[str]) -> int:
    """Print the faults of the tree, or of the folders and files in `only`; return the exit status."""
    prefixes = [name.rstrip("/") for name in only]
    faults = [
        fault
        for fault in tree_faults()
        if not prefixes or any(fault.path == name or fault.path.startswith(f"{name}/") for name in prefixes)
    ]
    for fault in faults:
        print(fault)
    if faults:
        print(f"{len(faults)} faults", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
