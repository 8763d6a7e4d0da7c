"""Settings of a run that are far from what pretrained weights are trained on with: a rate, a change of RoPE.

Nothing here is refused, since somebody may mean it; each is a sentence with what was given, what is usual and what to
write instead. Weights that start from random numbers know no rate and no positions, so nothing is unusual for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ithaca.config.schema import RopeSettings, StageSettings
from ithaca.training.schedule import LARGEST_JUMP, Positions, positions_of

# Long-context training of pretrained models goes from 1e-6 to 1e-4, and adapters take ten times that.
HIGHEST_RATE, HIGHEST_ADAPTER_RATE = 2e-4, 2e-3
USUAL_RATE, USUAL_ADAPTER_RATE = "1.0e-5", "1.0e-4"
# Published models raised theta to a hundred times of what ntk scaling takes for their length, and none further.
LARGEST_THETA = 100


def advise_settings(text: Any, stages: Sequence[StageSettings], *, adapters: bool) -> list[str]:
    """A sentence for each setting of `stages` that is unusual for a pretrained model with the text config `text`."""
    positions, said = positions_of(text), []
    for number, stage in enumerate(stages, 1):
        if rate := _rate(stage.lr, adapters=adapters):
            said.append(f"stage {number} has {rate}")
        # A stretch may be made once for all lengths to come.
        longest = max(later.length for later in stages[number - 1 :])
        if stage.rope is not None and positions is not None and (change := _rope(stage.rope, positions, longest)):
            said.append(f"stage {number} has {change}")
    return said


def _rate(rate: float, *, adapters: bool) -> str | None:
    highest, usual = (HIGHEST_ADAPTER_RATE, USUAL_ADAPTER_RATE) if adapters else (HIGHEST_RATE, USUAL_RATE)
    if rate <= highest:
        return None
    what = "adapters take" if adapters else "pretrained weights take without losing what they know"
    return f"lr {rate:g}, far above what {what} (at most {highest:g}): lr: {usual} is usual"


def _rope(rope: RopeSettings, own: Positions, longest: int) -> str | None:
    if rope.theta is not None and rope.theta < own.theta:
        return (
            f"a rope theta of {rope.theta:,g}, below the model's own {own.theta:,g}: positions then look unlike those "
            "that it was trained on; leave rope out, or raise theta"
        )
    if longest <= own.reach:
        return (
            f"a rope change of kind {rope.kind!r} for {longest:,} tokens, and the model's positions reach {own.reach:,} as "
            "they are: leave rope out"
        )
    needed = longest / own.original
    if rope.factor is not None and rope.factor > LARGEST_JUMP * needed:
        return (
            f"a rope factor of {rope.factor:g} over {own.original:,} positions, far more than the {longest:,} tokens of "
            f"the longest stage need: factor: {needed:g} is enough"
        )
    if rope.theta is not None and rope.theta > LARGEST_THETA * own.theta * needed:
        return (
            f"a rope theta of {rope.theta:,g}, far more than {longest:,} tokens need of a model with {own.theta:,g} "
            f"over {own.original:,} positions: theta: {own.theta * needed * LARGEST_JUMP:.0f} is plenty"
        )
    return None
