"""The programs join a world of one in this process; each test leaves it again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
