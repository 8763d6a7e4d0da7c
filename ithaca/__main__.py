"""`python -m ithaca` is `ithaca`."""

from ithaca.cli import main

main()
