"""What a step reads of its tensors' values, on two CPU ranks: on a GPU each such read waits for the device.

The ranks agree on a step once, before its forward pass, from tensors of the host. From there to the end of the
optimizer's step nothing is read. On a GPU `tests/training/test_launching.py` sees the same by torch's sync debug mode.
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca import MemoryPlan
from ithaca.loss.causal import agree_on, causal_loss, count_tokens, micro_loss
from ithaca.mesh import init_mesh
from ithaca.models.shard_loss import TokenLoss
from ithaca.parallelize import parallelize
from ithaca.state.optimizer.build import build_optimizer
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import ROOT, run_ranks

# What needs a tensor's value, or as many bytes as its value says.
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


class Reads(TorchDispatchMode):
    """Counts reads and collectives by operator; `where` has the last own line of each read."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.where: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in READS:
            self.counts["reads"] += 1
            own = [each for each in traceback.extract_stack() if str(ROOT / "ithaca") in each.filename]
            self.where.append(f"{name} at " + (f"{own[-1].filename}:{own[-1].lineno}" if own else "torch"))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


# Files that read tensors of the host alone: the batch as the loader gave it, the agreement's table over the host group,
# and the state of the host's random generator.
ON_HOST = (
    "sequence/batch.py",
    "sequence/documents.py",
    "sequence/layout.py",
    "sequence/agree.py",
    "memory/random_state.py",
)
PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]])


def counted(
    kind: str, sp: int, plan: MemoryPlan | None, *, packed: bool, micro: int, overrides: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """Reads elsewhere than on the host, and collectives, of the third step."""
    mesh = init_mesh(sp=sp)
    memory = {} if plan is None else {"memory": plan}
    model = small_model(kind, dtype=torch.float32, **overrides)
    # The small models' own implementation of experts, which fp64 needs, reads how many tokens each expert has.
    if kind in ("gpt_oss", "mixtral", "deepseek_v3"):
        model.set_experts_implementation("grouped_mm")
    model = parallelize(model, mesh, allow_untested=True, **memory)
    optimizer = build_optimizer(model, lr=1e-3)
    batch = small_batch()
    if packed:
        batch["position_ids"] = PACKED
    reads = Reads()
    for number in range(3):
        with reads if number == 2 else nullcontext():
            batches = [dict(batch) for _ in range(micro)]
            count = count_tokens(batches, mesh) if micro > 1 else None
            for each in batches:
                causal_loss(model, each, mesh, count=count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return dict(reads.counts), [where for where in reads.where if not any(file in where for file in ON_HOST)]


def modes(first: Any, second: Any = None, *, groups: int = 1) -> MemoryPlan:
    return MemoryPlan((first, second or first), (False,) * 2, 8, 8, groups)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "sp", "plan", "packed", "micro", "overrides"),
    [
        ("llama", 2, None, False, 1, {}),
        ("llama", 2, None, True, 2, {}),
        ("llama", 2, modes("save"), True, 1, {}),
        ("llama", 2, modes("save", "rebuild", groups=2), False, 3, {}),
        ("llama", 2, modes("recompute"), True, 1, {}),
        ("llama", 1, modes("save"), False, 1, {}),
        ("gemma2", 2, modes("keep"), True, 1, {}),
        ("gpt_oss", 2, None, True, 1, {"output_router_logits": True}),
        ("mixtral", 2, modes("save"), False, 2, {"output_router_logits": True}),
        ("deepseek_v3", 2, None, False, 1, {}),
    ],
)
def test_step_reads_no_value_after_its_agreement(
    kind: str, sp: int, plan: MemoryPlan | None, micro: int, overrides: dict[str, Any], *, packed: bool
) -> None:
    for counts, elsewhere in run_ranks(2, counted, kind, sp, plan, packed=packed, micro=micro, overrides=overrides):
        assert elsewhere == []
        assert counts["reads"] > 0, "the agreement itself reads: nothing else shows that reads are seen"


def agreements(micro: int) -> list[str]:
    """The all-reduces of whole numbers in one step: the tables that the ranks compare."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama", dtype=torch.float32), mesh)
    batches = [small_batch(seed=n) for n in range(micro)]
    calls: list[str] = []
    plain = dist.all_reduce

    def counting(tensor: Tensor, *given: Any, **named: Any) -> Any:
        # The sums of losses are of floating point.
        calls.extend([str(tensor.dtype)] * (not tensor.is_floating_point()))
        return plain(tensor, *given, **named)

    with patch.object(dist, "all_reduce", counting):
        # As in `ithaca train`, which has all micro-batches of a step beforehand.
        micros = agree_on(model, batches, micro, mesh)
        for each in micros:
            micro_loss(model, each, mesh, sum(each.targets for each in micros), TokenLoss()).backward()
    return calls


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_micro_batches_of_a_step_share_one_agreement(micro: int) -> None:
    assert run_ranks(2, agreements, micro) == [["torch.int64"]] * 2


def planted() -> list[str]:
    """The reads of a step whose model looks at a value, as an expert's count of tokens once did."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama", dtype=torch.float32), mesh)
    model.model.layers[0].register_forward_hook(lambda module, given, out: bool(torch.isfinite(out).all()) and None)
    with Reads() as reads:
        causal_loss(model, small_batch(), mesh).backward()
    return [where for where in reads.where if not any(file in where for file in ON_HOST)]


def test_planted_read_is_seen() -> None:
    assert all(len(found) == 1 for found in run_ranks(2, planted))
