"""The report of a hang: one sentence that names the ranks behind, out of the heartbeats of all ranks.

Behind are, in this order: ranks that stopped answering; ranks that have passed fewer boundaries; ranks that are not
inside a collective while other ranks are. Functions of values only; `Watch` sends the heartbeats.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

# A thread whose innermost frames are in these files waits for other ranks, or for a device that does.
_WATCH = os.path.join("ithaca", "training", "watch", "watch.py")
_WAITS = (os.path.join("torch", "distributed"), _WATCH)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The heartbeat of one rank: boundaries passed, the last one's label, seconds since, and the line of code.

    `waits`: True if the rank is inside a collective.
    """

    rank: int
    count: int
    label: str
    idle: float
    when: float
    where: str = ""
    waits: bool = False

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes | str) -> Heartbeat:
        return cls(**json.loads(text))


def explain(posts: Sequence[Heartbeat], silent: Collection[int], now: float) -> str:
    """Return one sentence with the ranks behind and the label at which others wait; `silent`: ranks that post no more."""
    behind = _behind(posts, silent)
    others = [post for post in posts if post not in behind]
    if not behind:
        first = min(posts, key=lambda post: -post.idle)
        return f"no rank has got past '{first.label}' for {first.idle:.0f} s{_at(first)}"
    first = behind[0]
    names = name_ranks([post.rank for post in behind])
    if first.rank in silent:
        text = (
            f"{names} stopped answering {max(now - first.when, 0):.0f} s ago, last seen in '{first.label}'{_at(first)}"
        )
    else:
        text = f"{names} {'has' if len(behind) == 1 else 'have'} been in '{first.label}' for {first.idle:.0f} s{_at(first)}"
    if not others:
        return text
    wait = "waits" if len(others) == 1 else "wait"
    where = "there" if others[0].label == first.label else f"in '{others[0].label}'"
    return f"{text}; {name_ranks([post.rank for post in others])} {wait} for it {where}{_at(others[0])}"


def _behind(posts: Sequence[Heartbeat], silent: Collection[int]) -> list[Heartbeat]:
    if silent:
        return [post for post in posts if post.rank in silent]
    least = min(post.count for post in posts)
    if any(post.count > least for post in posts):
        return [post for post in posts if post.count == least]
    busy = [post for post in posts if not post.waits]
    return busy if len(busy) < len(posts) or len(posts) == 1 else []


def _at(post: Heartbeat) -> str:
    return f" ({post.where})" if post.where else ""


def name_ranks(ranks: Collection[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def locate(thread: int | None) -> tuple[str, bool]:
    """Return a thread's file, line and function outside of libraries, and True if it waits for other ranks there."""
    frames = sys._current_frames()
    frame = frames.get(thread or 0) or frames.get(threading.main_thread().ident or 0)
    waits = False
    while frame is not None and _is_library(frame):
        waits |= any(part in frame.f_code.co_filename for part in _WAITS)
        frame = frame.f_back
    if frame is None:
        return "", waits
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, {code.co_name}", waits


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return f"{os.sep}site-packages{os.sep}" in path or path.endswith((f"{os.sep}threading.py", _WATCH))
