"""What every test session shares: the parent's threads and environment, `--record`, the end of the pool.

The environment is set here, before anything imports torch or transformers, which read it when they are imported.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

# OpenMP's threads spin while they wait, unless told otherwise before torch is imported: with more threads than cores a
# step of a small model took 25 times as long. Ranks and commands inherit it.
os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"})

import pytest
import torch
import torch.distributed as dist

from tests.ranks import stop_all
from tests.record import Recorder, file_of, longest_first

# The cores are for the ranks.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", type=Path, help="write versions, counts and seconds as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it puts in the background with Ctrl-C ignored, and every process that a test starts inherits
    # that. Processes that share the tests have their own main thread, which alone may set a handler.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    file = config.getoption("--record")
    # Processes that run a share of the tests report to the first one, which writes.
    if file is not None and not hasattr(config, "workerinput"):
        chosen = [f"-{name} {value}" for name in "mk" if (value := config.getoption(f"-{name}"))]
        paths = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        config.pluginmanager.register(Recorder(file, " ".join([*paths, *chosen])))


RECORD = Path(__file__).parent / "results" / "test-all.json"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test with `few(n)` but n, spread evenly over them; side by side, order the files."""
    mark_few(items)
    # Only where several processes share the files: by itself a session runs in the order of the command.
    if hasattr(config, "workerinput"):
        files = {file: place for place, file in enumerate(longest_first([item.nodeid for item in items], RECORD))}
        items.sort(key=lambda item: files[file_of(item.nodeid)])


def mark_few(items: list[pytest.Item]) -> None:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in families.values():
        (count,) = cases[0].get_closest_marker("few").args  # type: ignore[union-attr]
        kept = {round(index * (len(cases) - 1) / max(1, count - 1)) for index in range(count)}
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.slow)


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
    stop_all()
