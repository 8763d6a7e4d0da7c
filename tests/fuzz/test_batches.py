"""Any mask with any positions is what transformers makes of the same call, or refused; cases drawn from a seed.

`python -m tests.fuzz.test_batches FIRST LAST` shows what became of each.
"""

from __future__ import annotations

import sys

import pytest

from tests.fuzz.batches import check, setting

QUICK, SLOW = 12, 300


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(QUICK))
def test_a_batch_is_what_transformers_makes_of_it_or_refused(seed: int) -> None:
    check(seed, *setting(seed))


@pytest.mark.slow
def test_many_batches_are_what_transformers_makes_of_them_or_refused() -> None:
    faults = []
    for seed in range(QUICK, QUICK + SLOW):
        try:
            check(seed, *setting(seed))
        except AssertionError as fault:
            faults.append(str(fault))
    assert not faults, "\n".join(faults)


if __name__ == "__main__":
    for chosen in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
        try:
            print("ok   ", check(chosen, *setting(chosen)), flush=True)
        except Exception as fault:
            print("FAULT", str(fault)[:300], flush=True)
