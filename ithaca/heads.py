"""Which rank attends with which heads.

Query heads are cut into `sp` neighbouring ranges, so any head count up to sp = H works; a key-value head goes
to every rank that has one of its query heads, and to no other. Of all cuts the one is taken whose largest
range is least, then whose kv copies are fewest, then whose ranges are most even: 28/4 heads over 8 ranks
give 4, 3, 4, 3, ... with one kv head each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ithaca.errors import MeshError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Neighbouring heads of one rank that a kernel can take in one call: every kv head has equally many q heads."""

    q: Range
    kv: Range


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """`q[r]` and `kv[r]` are rank r's heads, as ranges of the model's."""

    heads: int
    kv_heads: int
    q: tuple[Range, ...]
    kv: tuple[Range, ...]

    @property
    def kv_copies(self) -> int:
        """Key-value heads sent in all: more than there are when a group is split over ranks."""
        return sum(end - start for start, end in self.kv)

    @property
    def most_groups(self) -> int:
        """The number of groups into which every rank's heads can be cut with no kv head cut."""
        return min(end - start for start, end in self.kv)

    @property
    def most(self) -> tuple[int, int]:
        """The most query heads, and the most key-value heads, of any rank."""
        return max(end - start for start, end in self.q), max(end - start for start, end in self.kv)

    def group(self, index: int, groups: int) -> HeadSplit:
        """The `index`-th of `groups` parts: of every rank some of its kv heads, with their query heads."""
        size = self.heads // self.kv_heads
        kv = tuple(_piece(kv_range, index, groups) for kv_range in self.kv)
        q = tuple(
            (max(own[0], first * size), min(own[1], last * size)) for own, (first, last) in zip(self.q, kv, strict=True)
        )
        return HeadSplit(self.heads, self.kv_heads, q, kv)

    def runs(self, rank: int) -> tuple[HeadRun, ...]:
        """Rank `rank`'s heads, counted from its own first, as calls with equal groups."""
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
    """The split of `heads` query and `kv_heads` key-value heads over `sp` ranks."""
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
    """Cut points 0..heads. Each cut inside a group costs one more kv copy; found by dynamic programming."""
    largest = -(-heads // sp)
    # best[end] = (cuts inside groups, sum of squared sizes, negated sizes, cuts): sizes tie-break larger first.
    best: dict[int, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {0: (0, 0, (), (0,))}
    for rank in range(sp):
        left = sp - rank - 1
        reached: dict[int, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {}
        for start, (inside, squares, order, cuts) in best.items():
            for size in range(1, largest + 1):
                end = start + size
                if not left <= heads - end <= left * largest:
                    continue
                cost = inside + (end % group != 0)
                candidate = (cost, squares + size * size, (*order, -size), (*cuts, end))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[heads][3]
