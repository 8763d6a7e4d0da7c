"""Bytes that the search goes by: the sum of the terms that are written out."""

from __future__ import annotations

import random

import pytest

from ithaca.planning.memory_plan import MODES, Job, LayerMode
from ithaca.planning.terms.memory_terms import MemoryModel, ModesMemory
from tests.planning.models import K
from tests.planning.search.test_family import SIX, WINDOWED


@pytest.mark.parametrize("seed", range(40))
def test_device_bytes_random_modes_equal_sum_of_terms(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choice([SIX, WINDOWED])
    job = Job(draw.choice([8, 100, 256]) * K, sp=draw.choice([1, 4]), accumulate=draw.random() < 0.5)
    modes: list[LayerMode] = ["save"]
    while len(modes) < len(sizes.layers):
        modes.append(draw.choice([mode for mode in MODES if mode != "rebuild" or modes[-1] != "keep"]))
    model = MemoryModel(sizes, job, draw.choice([2048, job.tokens]), 4096, draw.choice([1, 2]))
    offload = tuple(draw.random() < 0.5 and mode != "keep" for mode in modes)
    of_modes = ModesMemory(model, modes)
    memory = of_modes.memory(offload)
    assert of_modes.device_bytes(offload) == memory.device_bytes
    assert of_modes.host_bytes(offload) + model.host_beside_saved == memory.host_bytes
