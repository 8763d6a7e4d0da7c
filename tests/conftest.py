"""What every test session shares: the parent's threads and environment, `--record`, the end of the pool.

The environment is set here, before any test imports transformers, because it is read at import.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import POOL
from tests.record import Recorder

os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
torch.set_num_threads(2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", type=Path, help="write versions, counts and seconds as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is not None:
        chosen = [f"-{name} {value}" for name in "mk" if (value := config.getoption(f"-{name}"))]
        paths = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        config.pluginmanager.register(Recorder(file, " ".join([*paths, *chosen])))


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection, which every rehearsed run asks for, need not walk over it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A test that joined a group and stayed in it would fail others, far from here: ranks are the pool's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group in the parent: run it on ranks, by run_ranks")


def pytest_sessionfinish() -> None:
    POOL.stop()
