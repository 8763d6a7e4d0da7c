"""`python -m ithaca.cli` is `ithaca`."""

from ithaca.cli import main

main()
