"""Entry point of `python -m ithaca`."""

from ithaca.cli import main

main()
