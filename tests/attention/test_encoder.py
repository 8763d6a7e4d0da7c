"""`ulysses_attention` in a model that is nobody's but the user's: the same outputs and gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.attention.ulysses import ulysses_attention
from ithaca.mesh import init_mesh
from ithaca.sequence.layout import SequenceLayout
from tests.attention.reference import naive
from tests.attention.test_ulysses import EXACT, PACKED, difference
from tests.ranks import run_ranks


class Encoder(nn.Module):
    """A bidirectional encoder, written by hand: what a user does who has no Hugging Face model."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.inward = nn.ModuleList(nn.Linear(24, 2 * 24) for _ in range(2))
        self.outward = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, inward, outward in zip(self.norms, self.inward, self.outward, strict=True):
            q, k, v = inward(norm(x)).unflatten(-1, (12, 4)).split([6, 3, 3], dim=2)
            x = x + outward(self.attend(q, k, v).flatten(2))
        return x


def encode() -> dict[str, float]:
    mesh = init_mesh(sp=dist.get_world_size())
    layout = SequenceLayout.packed(torch.tensor([PACKED[0]]), mesh.shards, 12)
    x_BSC = torch.randn(1, layout.padded, 24, dtype=torch.float64)
    weight_BSC = torch.randn(1, layout.padded, 24, dtype=torch.float64)
    weight_BSC[:, layout.length :] = 0.0

    def by_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = AttentionSpec(scale=0.5, causal=False)
        out = torch.zeros_like(q)
        for start, end in layout.documents[0]:
            out[:, start:end] = naive(q[:, start:end], k[:, start:end], v[:, start:end], spec)[0]
        return out

    twin = Encoder(by_document).double()
    model = Encoder(lambda q, k, v: ulysses_attention(q, k, v, mesh, layout, causal=False)).double()
    model.load_state_dict(twin.state_dict())
    mine = layout.shard(mesh.sequence_rank)
    expected, got = twin(x_BSC), model(x_BSC[:, mine])
    (expected * weight_BSC).sum().backward()
    (got * weight_BSC[:, mine]).sum().backward()
    errors = {"out": difference(got, expected[:, mine])}
    for (name, theirs), ours in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        dist.all_reduce(ours.grad)
        errors[name] = difference(ours.grad, theirs.grad)
    assert min(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None) > 0
    return errors


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [2, 4])
def test_encoder_written_by_hand_equals_one_process(world: int) -> None:
    for errors in run_ranks(world, encode):
        assert len(errors) == 1 + 12
        assert max(errors.values()) < EXACT, errors
