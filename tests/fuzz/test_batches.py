"""Any mask with any positions is what transformers makes of the same call, or refused; rows drawn from a seed.

`python -m tests.fuzz.test_batches FIRST LAST` shows what became of each.
"""

from __future__ import annotations

import sys

import pytest

from tests.fuzz.batches import CASES, check


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_batch_is_what_transformers_makes_of_it_or_refused(seed: int) -> None:
    check(seed)


if __name__ == "__main__":
    for chosen in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
        try:
            print("ok   ", check(chosen), flush=True)
        except Exception as fault:
            print("FAULT", str(fault)[:300], flush=True)
