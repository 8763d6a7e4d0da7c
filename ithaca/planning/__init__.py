"""Predictions before a run: cards, model sizes, memory term by term, and the plan with the least recompute that fits."""

import sys

from ithaca.planning import memory_plan

# `training_args.bin` files of earlier versions hold a pickled `ithaca.planning.plan.MemoryPlan`.
sys.modules["ithaca.planning.plan"] = memory_plan
