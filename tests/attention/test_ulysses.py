"""`ulysses_attention` on ranks against dense softmax with autograd in one process: out, dq, dk, dv, dsinks in fp64.

Every feature that some system drops in silence is here with a planted fault beside it: a head lost by an uneven
split, documents that see each other, padding attended, sinks of the wrong rank, kv gradients not summed, a window off
by one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention import ulysses
from ithaca.attention.exchange import Pending, TensorColumns
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.attention.tape import Tape
from ithaca.attention.ulysses import UlyssesPlan, attend_sharded, ulysses_attention
from ithaca.errors import IthacaError
from ithaca.mesh import Mesh, init_mesh
from ithaca.sequence.layout import SequenceLayout
from tests.attention.reference import naive
from tests.attention.test_exchange import watched
from tests.ranks import run_ranks

# Sums of a few dozen terms in fp64 differ by about 1e-15; a thousand times that is still far below any fault.
EXACT = 1e-10
# What a fault must cost to count as seen: values are of order 1.
SEEN = 1e-3


@dataclass(frozen=True)
class Case:
    """One call. `rows` are document numbers by token, -1 for padding; None is two whole rows of 13 tokens."""

    heads: tuple[int, int] = (8, 2)
    sizes: tuple[int, int] = (8, 8)
    rows: tuple[tuple[int, ...], ...] | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    # How the call is made: see `FORMS`.
    form: str = "kept"

    def layout(self, shards: int) -> SequenceLayout:
        if self.rows is None:
            return SequenceLayout.whole_rows(2, 13, shards)
        return SequenceLayout.packed(torch.tensor(self.rows), shards, len(self.rows[0]) - 1)

    @property
    def spec(self) -> AttentionSpec:
        scale = self.sizes[0] ** -0.5 if self.scale is None else self.scale
        return AttentionSpec(scale=scale, causal=self.causal, window=self.window, softcap=self.softcap)


# One group whose whole sequences are kept for backward, several groups, an anchor that is left on a tape, and a call
# that starts from such an anchor: each with its head groups.
FORMS = {"kept": 1, "grouped": 4, "anchored": 1, "replayed": 4}

PACKED = ((0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3), (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1))
LEFT = ((-1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
AWKWARD = ((-1, 0, 0, 0, 1, 1, -1, -1, 2, 2, 2, 2, -1), (-1,) * 13)
VARIANTS = {
    "causal": Case(),
    "both": Case(causal=False),
    "window": Case(window=4, sizes=(8, 6)),
    "softcap": Case(softcap=0.7, causal=False, window=5),
    "sinks": Case(sinks=True),
    "sizes": Case(sizes=(6, 10), scale=0.9),
    "packed": Case(rows=PACKED),
    "left": Case(rows=LEFT, sinks=True),
    "awkward": Case(rows=AWKWARD, causal=False, softcap=2.0),
}


def inputs(case: Case, layout: SequenceLayout) -> list[Tensor]:
    """q, k, v, sinks and dout of the whole batch, the same on every rank; padding holds large numbers."""
    (h, k), (d, e) = case.heads, case.sizes
    generator = torch.Generator().manual_seed(3)
    shapes = [(h, d), (k, d), (k, e), (h, e)]
    drawn = [
        torch.randn(layout.batch, layout.padded, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]
    real = torch.zeros(layout.batch, layout.padded, dtype=torch.bool)
    for b, row in enumerate(layout.documents):
        for start, end in row:
            real[b, start:end] = True
    for x in drawn[:3]:
        x[~real] = 50.0
    drawn[3][~real] = 0.0
    sinks = torch.randn(h, generator=generator, dtype=torch.float64)
    return [x.to(case.dtype) for x in (*drawn[:3], sinks, drawn[3])]


def dense(case: Case, layout: SequenceLayout) -> list[Tensor]:
    """out, dq, dk, dv, dsinks over whole sequences in one process; every document on its own, padding zero."""
    *leaves, dout = inputs(case, layout)
    q, k, v, sinks = (x.requires_grad_() for x in leaves)
    out = torch.zeros_like(dout)
    for b, row in enumerate(layout.documents):
        for start, end in row:
            part = (x[b : b + 1, start:end] for x in (q, k, v))
            out[b, start:end] = naive(*part, case.spec, sinks if case.sinks else None)[0][0]
    grads = torch.autograd.grad(out, (q, k, v, sinks), dout, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def parallel(case: Case, layout: SequenceLayout, mesh: Mesh, backward: Callable[..., None]) -> list[Tensor]:
    """Return this rank's shard of the five results; dsinks is summed over ranks, like any weight's gradient."""
    *leaves, dout = inputs(case, layout)
    mine = layout.shard(mesh.sequence_rank)
    q, k, v = (x[:, mine].clone().requires_grad_() for x in leaves[:3])
    sinks = leaves[3].requires_grad_()
    out = attend(case, layout, mesh, q, k, v, sinks if case.sinks else None)
    backward(out, dout[:, mine])
    dsinks = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad
    dist.all_reduce(dsinks, group=mesh.sp_group)
    return [out.detach(), q.grad, k.grad, v.grad, dsinks]  # type: ignore[list-item]


def attend(
    case: Case, layout: SequenceLayout, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    if case.form == "kept":
        return ulysses_attention(
            q, k, v, mesh, layout, case.causal, scale=case.scale, window=case.window, softcap=case.softcap, sinks_H=sinks
        )  # fmt: skip
    # Through the module, where a fault may be planted.
    spec = ulysses.AttentionSpec(scale=case.spec.scale, causal=case.causal, window=case.window, softcap=case.softcap)
    groups, tape = FORMS[case.form], None if case.form == "grouped" else Tape()
    if case.form == "replayed":
        assert tape is not None
        with torch.no_grad():
            attend_sharded(q, k, v, mesh, layout, spec, sinks, "auto", groups=groups, tape=tape)
        tape = tape.for_replay()
        with watched() as wire:
            out = attend_sharded(q, k, v, mesh, layout, spec, sinks, "auto", groups=groups, tape=tape)
        assert not wire.collectives, "a replay attends again"
        return out
    return attend_sharded(q, k, v, mesh, layout, spec, sinks, "auto", groups=groups, tape=tape)


def plain_backward(out: Tensor, dout: Tensor) -> None:
    out.backward(dout)


def backward_in_a_thread(out: Tensor, dout: Tensor) -> None:
    """Run backward on another thread, like CUDA: nothing thread-local of the forward pass exists there."""
    thread = threading.Thread(target=out.backward, args=(dout,))
    thread.start()
    thread.join()


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest; infinite where a number is none, because NaN hides in a maximum."""
    value = float((got - expected).abs().max())
    return value if value == value else float("inf")


def worst(cases: dict[str, Case], fault: str | None = None, *, threaded: bool = False) -> dict[str, float]:
    """The largest difference of any of the five, by case, as this rank sees it."""
    mesh = init_mesh(sp=dist.get_world_size())
    errors = {}
    for name, case in cases.items():
        layout = case.layout(mesh.sp)
        expected = dense(case, layout)
        mine = layout.shard(mesh.sequence_rank)
        expected = [*(x[:, mine] for x in expected[:4]), expected[4]]
        with planted(fault):
            got = parallel(case, layout, mesh, backward_in_a_thread if threaded else plain_backward)
        errors[name] = max(difference(a, b) for a, b in zip(got, expected, strict=True))
    return errors


def over_ranks(world: int, cases: dict[str, Case], *args: Any, **kwargs: Any) -> dict[str, float]:
    by_rank = run_ranks(world, worst, cases, *args, **kwargs)
    return {name: max(errors[name] for errors in by_rank) for name in cases}


HEADS = [(8, 8), (8, 2), (4, 1), (7, 7), (9, 3), (14, 2)]


@pytest.mark.few(8)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ulysses_every_feature_equals_one_process(world: int, heads: tuple[int, int]) -> None:
    cases = {
        f"{name} {form}": replace(case, heads=heads, form=form) for name, case in VARIANTS.items() for form in FORMS
    }
    errors = over_ranks(world, cases)
    assert max(errors.values()) < EXACT, errors


@pytest.mark.slow
@pytest.mark.parametrize("world", [5, 8])
def test_ulysses_feature_products_equal_one_process(world: int) -> None:
    """Products of all features, on splits down to one head a rank."""
    splits = [pair for pair in [*HEADS, (28, 4), (8, 4), (12, 3)] if pair[0] >= world]
    cases = {
        f"{heads} {sinks} {window} {rows is None} {causal}": Case(
            heads=heads, sinks=sinks, window=window, rows=rows, causal=causal, softcap=1.5 if window else None
        )
        for heads in splits
        for sinks in (False, True)
        for window in (None, 3)
        for rows in (None, PACKED, AWKWARD)
        for causal in (True, False)
    }
    errors = over_ranks(world, cases)
    assert max(errors.values()) < EXACT, errors


EVERY_FORM = {f"{name} {form}": replace(case, form=form) for name, case in VARIANTS.items() for form in FORMS}


def test_ulysses_on_one_rank_equals_reference() -> None:
    errors = over_ranks(1, EVERY_FORM)
    assert max(errors.values()) < EXACT, errors


def test_ulysses_backward_on_another_thread_equals_reference() -> None:
    errors = over_ranks(2, EVERY_FORM, threaded=True)
    assert max(errors.values()) < EXACT, errors


def test_ulysses_fp32_equals_reference() -> None:
    errors = over_ranks(
        3, {name: replace(case, dtype=torch.float32, heads=(9, 3)) for name, case in EVERY_FORM.items()}
    )
    assert max(errors.values()) < 1e-4, errors


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    with FAULTS[fault]() if fault else nullcontext():
        yield


def _head_dropped() -> AbstractContextManager[Any]:
    to_tokens = UlyssesPlan.to_tokens

    def without_the_last(
        plan: UlyssesPlan, tensors: list[Tensor], ranges: list[Any], into: list[Tensor]
    ) -> Pending | None:
        pending = to_tokens(plan, tensors, ranges, into)
        if pending is not None:
            pending.wait()
        into[0][:, :, -1] = 0.0
        return None

    return patch.object(UlyssesPlan, "to_tokens", without_the_last)


def _kv_not_summed() -> AbstractContextManager[Any]:
    start = ulysses.start_to_tokens

    def first_copy_only(tensors: list[Tensor], all_columns: list[TensorColumns], group: Any, *rest: Any) -> Pending:
        me = dist.get_rank(group)
        for x_BShD, columns in zip(tensors, all_columns, strict=True):
            first, last = columns.ranges[me]
            for head in range(first, last):
                if any(begin <= head < end for begin, end in columns.ranges[:me]):
                    x_BShD[:, :, head - first] = 0.0
        return start(tensors, all_columns, group, *rest)

    return patch.object(ulysses, "start_to_tokens", first_copy_only)


def _documents(change: Callable[[SequenceLayout], tuple[Any, ...]]) -> AbstractContextManager[Any]:
    local = ulysses.LocalAttention
    return patch.object(
        ulysses,
        "LocalAttention",
        lambda layout, *rest: local(replace(layout, documents=change(layout)), *rest),
    )


def _window_off_by_one() -> AbstractContextManager[Any]:
    def wider(**settings: Any) -> AttentionSpec:
        return AttentionSpec(**settings | {"window": settings["window"] + 1})

    return patch.object(ulysses, "AttentionSpec", wider)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a head is dropped": _head_dropped,
    "kv gradients are not summed": _kv_not_summed,
    "documents are merged": lambda: _documents(lambda old: tuple(((r[0][0], r[-1][1]),) for r in old.documents)),
    "padding is attended": lambda: _documents(lambda old: (((0, old.padded),),) * old.batch),
    "sinks are not sliced": lambda: patch.object(
        UlyssesPlan,
        "own_sinks",
        lambda plan, sinks, part: None if sinks is None else sinks[: len(range(*part.q[plan.rank]))],
    ),
    "the window is off by one": _window_off_by_one,
}


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("a head is dropped", Case(heads=(8, 8))),
        ("kv gradients are not summed", Case(heads=(8, 2))),
        ("documents are merged", Case(rows=PACKED)),
        ("padding is attended", Case(rows=LEFT)),
        ("sinks are not sliced", Case(sinks=True)),
        ("the window is off by one", Case(window=4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ulysses_planted_fault_is_detected(fault: str, case: Case) -> None:
    forms = {form: replace(case, form=form) for form in FORMS}
    assert max(over_ranks(4, forms).values()) < EXACT
    assert min(over_ranks(4, forms, fault).values()) > SEEN


def frozen_inputs() -> float:
    """Only v needs a gradient (the rest is frozen): it must arrive all the same."""
    mesh = init_mesh(sp=2)
    layout = SequenceLayout.whole_rows(1, 8, 2)
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    v = torch.randn(1, 4, 2, 8, requires_grad=True)
    ulysses_attention(q, k, v, mesh, layout).sum().backward()
    assert v.grad is not None
    return float(v.grad.abs().sum())


def test_ulysses_frozen_inputs_give_gradient_of_v() -> None:
    assert min(run_ranks(2, frozen_inputs)) > 0


def refused(degrees: dict[str, int], heads: tuple[int, int], change: dict[str, Any], **options: Any) -> str:
    mesh = init_mesh(**degrees)
    layout = SequenceLayout.whole_rows(1, 8, mesh.shards)
    length = layout.shard_length
    shapes = {"q": (heads[0], 8), "k": (heads[1], 8), "v": (heads[1], 8)}
    tensors = {name: torch.randn(1, length, *shape) for name, shape in shapes.items()} | change
    with watched() as wire:
        try:
            ulysses_attention(tensors["q"], tensors["k"], tensors["v"], mesh, layout, **options)
        except IthacaError as error:
            assert options.get("kernel") == "cudnn" or not wire.collectives, "refused after a collective"
            return f"{type(error).__name__}: {error}"
    return "no refusal"


SP2 = {"sp": 2}


@pytest.mark.parametrize(
    ("world", "degrees", "heads", "change", "options", "error", "message"),
    [
        (4, {"sp": 4}, (2, 2), {}, {}, "MeshError", r"2 heads over sp=4: every rank needs a head, use sp=2 with dp=2"),
        (4, {"sp": 4}, (3, 1), {}, {}, "MeshError", r"3 heads over sp=4: .* use sp=2 with dp=2"),
        (2, SP2, (8, 3), {}, {}, "MeshError", "8 query heads are not a multiple of 3"),
        (4, {"sp": 2, "ring": 2}, (8, 8), {}, {}, "UnsupportedError", "ring=2 is not built yet: use ring=1"),
        (2, SP2, (4, 4), {"q": torch.randn(1, 3, 4, 8)}, {}, "BatchError", r"q has shape \[1, 3, 4, 8\]: .*= \[1, 4\]"),
        (2, SP2, (4, 4), {"v": torch.randn(2, 4, 4, 8)}, {}, "BatchError", r"v has shape \[2, 4, 4, 8\]"),
        (2, SP2, (4, 2), {"v": torch.randn(1, 4, 4, 8)}, {}, "BatchError", "k has v's heads and q's head size"),
        (2, SP2, (4, 2), {"k": torch.randn(1, 4, 2, 6)}, {}, "BatchError", "k has v's heads and q's head size"),
        (2, SP2, (4, 2), {"k": torch.randn(1, 4, 2, 8).double()}, {}, "BatchError", "k is torch.float64, .* one dtype"),
        (2, SP2, (4, 2), {}, {"window": 0}, "BatchError", "window=0: a query sees at least itself"),
        (2, SP2, (4, 2), {}, {"softcap": 0.0}, "BatchError", "softcap=0.0: .* use softcap > 0 or None"),
        (2, SP2, (4, 2), {}, {"sinks_H": torch.ones(1)}, "BatchError", r"sinks_H has shape \[1\]: .* the 4 heads"),
        (
            2,
            SP2,
            (4, 2),
            {},
            {"kernel": "flash3"},
            "UnsupportedError",
            "no attention kernel is called 'flash3': use one of",
        ),
        (2, SP2, (4, 2), {}, {"kernel": "cudnn"}, "UnsupportedError", "'cudnn' cannot do this call: .* Use 'cpu'"),
    ],
)
def test_refusals(
    world: int,
    degrees: dict[str, int],
    heads: tuple[int, int],
    change: dict[str, Any],
    options: dict[str, Any],
    error: str,
    message: str,
) -> None:
    for said in run_ranks(world, refused, degrees, heads, change, **options):
        assert re.match(f"{error}: .*{message}", said), said
