"""One habit: a script that runs with and without Ithaca, and what shall come of it.

The same script runs twice: `script(None)` on one process with plain transformers, `script(sp)` on `sp` ranks with
Ithaca. It returns numbers by name (floats, lists of floats, tensors). Put what a user would look at into them: losses
of several steps, gradient norms, weights after training, metrics, generated tokens.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ithaca.verify.fp64 import compute_in_fp64
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

Numbers = Mapping[str, Any]
Script = Callable[[int | None], Numbers]
Outcome = Literal["exact", "refused", "absent"]


@dataclass(frozen=True, slots=True)
class Habit:
    """An entry of the table; `exact`, `refused` and `absent` below make one.

    `door` and `name` are what the page shows; `says` is what the refusal matches (a regular expression) or why the
    habit is absent; `within` is the largest relative difference, from tests/tolerances.py.
    """

    door: str
    name: str
    outcome: Outcome
    script: Script | None = None
    says: str = ""
    note: str = ""
    error: str = "UnsupportedError"
    within: float = FP64
    ranks: int = 2
    slow: bool = False

    @property
    def label(self) -> str:
        return f"{self.door}: {self.name}"

    def check(self) -> None:
        """Assert the outcome; the plain script has to run in any case, or the habit is nobody's."""
        if self.script is None:
            return
        promote = self.within == FP64
        expected = _flat(_run(self.script, None, promote))
        assert expected, f"{self.label}: the script returns no numbers"
        if self.outcome == "refused":
            expect_refusal(self.ranks, _run, self.script, self.ranks, promote, error=self.error, match=self.says)
            return
        for rank, numbers in enumerate(run_ranks(self.ranks, _run, self.script, self.ranks, promote)):
            _hold(_flat(numbers), expected, self.within, f"{self.label}, rank {rank}")


def exact(door: str, name: str, script: Script, **options: Any) -> Habit:
    """The numbers of one process."""
    return Habit(door, name, "exact", script, **options)


def refused(door: str, name: str, script: Script, *, says: str, **options: Any) -> Habit:
    """An error on every rank whose message matches `says`."""
    return Habit(door, name, "refused", script, says, **options)


def absent(door: str, name: str, why: str) -> Habit:
    """Nothing that this door has, and why."""
    return Habit(door, name, "absent", says=why)


def _run(script: Script, sp: int | None, promote: bool) -> dict[str, Any]:
    """The script's numbers as plain tensors, without the warnings of libraries that it calls.

    `promote` lifts transformers' casts to fp32 (norms, softmax, the loss) to fp64, without which 1e-10 has no meaning.
    """
    with warnings.catch_warnings(), compute_in_fp64() if promote else nullcontext():
        warnings.simplefilter("ignore")
        return {name: _plain(value) for name, value in script(sp).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # Not a view of a shared object, nor a subclass: what a pipe carries must not depend on the library.
    return value.detach().as_subclass(Tensor).clone() if isinstance(value, Tensor) else value


def _flat(numbers: Numbers, before: str = "") -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = torch.as_tensor(value, dtype=torch.float64)
    return flat


def _hold(got: dict[str, Tensor], expected: dict[str, Tensor], within: float, label: str) -> None:
    assert got.keys() == expected.keys(), f"{label}: {sorted(got.keys() ^ expected.keys())}"
    for name, truth in expected.items():
        assert got[name].shape == truth.shape, f"{label}: {name} has shape {list(got[name].shape)}"
        assert torch.isfinite(truth).all(), f"{label}: {name} of one process is not finite"
        # Relative to the largest value, but not below one: a gradient that is zero in truth has no size.
        size = max(1.0, float(truth.abs().max())) if truth.numel() else 1.0
        error = float((got[name] - truth).abs().max()) / size if truth.numel() else 0.0
        assert error <= within, f"{label}: {name} is off by {error:.1e} of {size:.3g}"


def check_scripts(habits: list[Habit]) -> None:
    """Refuse entries that could not run on a rank: ranks find a script by its module and name."""
    for habit in habits:
        if habit.script is None:
            assert habit.outcome == "absent", f"{habit.label}: {habit.outcome} without a script"
            continue
        script = getattr(habit.script, "func", habit.script)
        assert inspect.getmodule(script) is not None, habit.label
        assert script.__qualname__.isidentifier(), f"{habit.label}: {script.__qualname__} is not at module level"
