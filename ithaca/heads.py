"""Split of attention heads over ranks.

Query heads are cut into `sp` neighbouring ranges, so any head count works up to sp = H. A key-value head goes to every
rank that has one of its query heads. The cut has the smallest largest range, then the fewest kv copies, then the most
even ranges. Example, 28 query and 4 kv heads over 8 ranks:

    rank       0    1    2     3      4      5      6      7
    q heads    0-3  4-6  7-10  11-13  14-17  18-20  21-24  25-27
    kv head    0    0    1     1      2      2      3      3
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf
from operator import add

from ithaca.errors import MeshError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Neighbouring heads of one rank for one kernel call, with equally many query heads for each kv head."""

    q: Range
    kv: Range


# Without slots: the planner reads the cached properties thousands of times.
@dataclass(frozen=True)
class HeadSplit:
    """Split of all heads: `q[r]` and `kv[r]` are rank r's heads, as ranges of the model's heads."""

    heads: int
    kv_heads: int
    q: tuple[Range, ...]
    kv: tuple[Range, ...]

    @cached_property
    def kv_copies(self) -> int:
        """Number of kv heads sent; more than the model has if ranks share a kv head."""
        return sum(end - start for start, end in self.kv)

    @cached_property
    def most_groups(self) -> int:
        """Largest number of head groups: each needs a whole kv head of every rank."""
        return min(end - start for start, end in self.kv)

    @cached_property
    def most(self) -> tuple[int, int]:
        """Largest numbers of query heads and of key-value heads on a rank."""
        return max(end - start for start, end in self.q), max(end - start for start, end in self.kv)

    def group(self, index: int, groups: int) -> HeadSplit:
        """Return the `index`-th of `groups` parts: a part of every rank's kv heads, with their query heads."""
        size = self.heads // self.kv_heads
        kv = tuple(_piece(kv_range, index, groups) for kv_range in self.kv)
        q = tuple(
            (max(own[0], first * size), min(own[1], last * size)) for own, (first, last) in zip(self.q, kv, strict=True)
        )
        return HeadSplit(self.heads, self.kv_heads, q, kv)

    def runs(self, rank: int) -> tuple[HeadRun, ...]:
        """Return the heads of rank `rank`, counted from its first, as kernel calls with equal groups."""
        group = self.heads // self.kv_heads
        q_start, q_end = self.q[rank]
        first, last = self.kv[rank]
        sizes = [min((kv + 1) * group, q_end) - max(kv * group, q_start) for kv in range(first, last)]
        runs: list[HeadRun] = []
        q = 0
        for kv, size in enumerate(sizes):
            if runs and kv and sizes[kv - 1] == size:
                runs[-1] = HeadRun((runs[-1].q[0], q + size), (runs[-1].kv[0], kv + 1))
            else:
                runs.append(HeadRun((q, q + size), (kv, kv + 1)))
            q += size
        return tuple(runs)


def _piece(whole: Range, index: int, pieces: int) -> Range:
    start, size = whole[0], whole[1] - whole[0]
    return start + size * index // pieces, start + size * (index + 1) // pieces


@lru_cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, sp: int) -> HeadSplit:
    """Return the split of `heads` query and `kv_heads` key-value heads over `sp` ranks."""
    if heads % kv_heads:
        raise MeshError(
            f"{heads} query heads are not a multiple of {kv_heads} key-value heads: no grouping is possible"
        )
    if sp > heads:
        raise MeshError(f"{heads} heads over sp={sp}: every rank needs a head, use sp={heads} or less")
    group = heads // kv_heads
    cuts = _best_cuts(heads, group, sp)
    q = tuple(pairwise(cuts))
    kv = tuple((start // group, (end - 1) // group + 1) for start, end in q)
    return HeadSplit(heads, kv_heads, q, kv)


def _best_cuts(heads: int, group: int, sp: int) -> tuple[int, ...]:
    """Return the best cut points from 0 to `heads`, by dynamic programming; a cut inside a group costs a kv copy."""
    largest = -(-heads // sp)
    squares = [size * size for size in range(1, largest + 1)]
    # One kv copy outweighs any sum of squared sizes.
    prices_of_cut = [(heads * heads + 1) * (end % group != 0) for end in range(heads + 1)]
    # For each rank from the last: the least price of the ranges that follow, by the head where they begin.
    following: list[float] = [*[inf] * heads, 0, *[inf] * largest]
    tables = [following]
    for rank in range(sp - 1, 0, -1):
        prices = [inf] * len(following)
        left = sp - rank
        for start in range(max(rank, heads - left * largest), min(rank * largest, heads - left) + 1):
            ends = following[start + 1 : start + 1 + largest]
            prices[start] = prices_of_cut[start] + min(map(add, ends, squares))
        tables.append(following := prices)
    cuts = [0]
    for following in reversed(tables):
        ends = following[cuts[-1] + 1 : cuts[-1] + 1 + largest]
        totals = list(map(add, ends, squares))
        # Of equal prices the largest range comes first.
        cuts.append(cuts[-1] + largest - totals[::-1].index(min(totals)))
    return tuple(cuts)
