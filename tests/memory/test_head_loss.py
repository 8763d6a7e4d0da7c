"""Head and loss by tiles against the same written out whole, in fp64."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ithaca.constants import IGNORE_INDEX
from ithaca.memory.head_loss import LossSpec, head_loss
from tests.tolerances import FP64

SPECS = [
    LossSpec(),
    LossSpec(scale=0.3),
    LossSpec(softcap=2.0),
    LossSpec(smoothing=0.1),
    LossSpec(z=0.05),
    LossSpec(scale=1.7, softcap=3.0, smoothing=0.2, z=0.01),
]


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, spec: LossSpec) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, 1) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    flat = targets.flatten()
    loss = F.cross_entropy(logits, flat, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=spec.smoothing)
    return loss + spec.z * (logits.logsumexp(-1).square() * (flat != IGNORE_INDEX)).sum()


def operands(*, bias: bool, learned: float = 0.7) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    targets = torch.randint(0, 17, (2, 11), generator=generator)
    targets[torch.rand(2, 11, generator=generator) > learned] = IGNORE_INDEX
    return [values(2, 11, 6), values(17, 6), *([values(17)] if bias else [])], targets


@pytest.mark.parametrize("tile", [1, 4, 11, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_head_loss_in_tiles_equals_whole_logits(spec: LossSpec, bias: bool, tile: int) -> None:
    """Value and every gradient, under a factor that arrives only in backward; 22 tokens leave a tail."""
    leaves, targets = operands(bias=bias)
    hidden, weight, *rest = leaves
    expected = whole(hidden, weight, rest[0] if bias else None, targets, spec)
    total, count = head_loss(hidden, weight, rest[0] if bias else None, targets, tile, spec)
    assert int(count) == int((targets != IGNORE_INDEX).sum())
    torch.testing.assert_close(total, expected, rtol=FP64, atol=FP64)
    wanted = torch.autograd.grad(expected * 0.37, leaves)
    for got, want in zip(torch.autograd.grad(total * 0.37, leaves), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=FP64, atol=FP64)


def test_head_loss_without_targets_is_zero_with_graph() -> None:
    leaves, targets = operands(bias=False, learned=-1.0)
    total, count = head_loss(*leaves, None, targets, 4, LossSpec())
    assert total.item() == count.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("frozen", [0, 1])
def test_head_loss_frozen_side_gets_no_gradient(frozen: int) -> None:
    leaves, targets = operands(bias=False)
    leaves[frozen].requires_grad_(False)
    total, _ = head_loss(*leaves, None, targets, 4, LossSpec())
    expected = whole(*leaves, None, targets, LossSpec())
    [got], [want] = (torch.autograd.grad(x, leaves[1 - frozen]) for x in (total, expected))
    torch.testing.assert_close(got, want, rtol=FP64, atol=FP64)


def test_head_loss_allocates_one_tile_of_logits() -> None:
    """Tensors as wide as the vocabulary are as long as a tile, or are the weight."""
    leaves, targets = operands(bias=False)
    longest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal longest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (17,):
                longest = max(longest, out.numel() // 17)
            return out

    with Watch():
        total, _ = head_loss(*leaves, None, targets, 4, LossSpec())
        total.backward()
    assert longest == 6, "the transposed weight; a tile has 4 tokens, the whole 22"


def test_head_loss_after_forward_frees_hidden_states() -> None:
    """The loss is there until backward ends: what its gradients were made of need not be."""
    (hidden, weight), targets = operands(bias=False)
    normed = hidden * 2
    storage = StorageWeakRef(normed.untyped_storage())
    total, _ = head_loss(normed, weight, None, targets, 4, LossSpec())
    assert not storage.expired()
    del normed
    assert storage.expired()
    expected = torch.autograd.grad(whole(hidden * 2, weight, None, targets, LossSpec()), [hidden, weight])
    for got, want in zip(torch.autograd.grad(total, [hidden, weight]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=FP64, atol=FP64)


def test_head_loss_tile_is_freed_before_next() -> None:
    leaves, targets = operands(bias=False)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.aten.mm.default and args[1].shape[1] == 17:
                alive.append(sum(one() is not None for one in made))
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (17,) and len(out) <= 4:
                made.append(weakref.ref(out))
            return out

    with Watch():
        head_loss(*leaves, None, targets, 4, LossSpec())
    assert alive == [0] * 6
