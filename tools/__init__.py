"""Programs of the maintainers, outside the wheel."""
