"""Ranks import what these tests need before the first of them: a refusal gives slow peers a few seconds only."""

from __future__ import annotations

import pytest

from tests.integrations.runs import reset
from tests.ranks import run_ranks


@pytest.fixture(autouse=True, scope="session")
def _ranks_are_ready() -> None:
    run_ranks(2, reset, timeout=300)
