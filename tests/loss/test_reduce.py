"""Own losses over what a rank has of a sequence: exact through `reduce_mean`, refused without it.

Every comparison is with one process of plain transformers over the rows of all data ranks, in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss
from ithaca.loss.reduce import reduce_mean
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.binding import unbind
from ithaca.models.layers import hooks
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.sequence.batch import shard_batch
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import gradient_errors
from ithaca.verify.small_models.features import small_batch, small_model
from tests.batches import right_padded
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

SAVE = MemoryPlan(("save", "save"), (False, False), 4, 5)
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
REFUSED = r"without a reduction over ranks: sum .* ithaca\.reduce_mean\(model, total, count, mesh\)"


def values(logits: Tensor) -> Tensor:
    """A number for every token, [B, L]."""
    return logits.logsumexp(-1) + logits.square().mean(-1)


def averaged(model: nn.Module, mesh: Mesh) -> None:
    """Do what a wrapper of the caller's does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.world_group)
            parameter.grad /= mesh.world


def worst(model: nn.Module, mesh: Mesh, weights: str, truth: nn.Module, shown: float, expected: float) -> float:
    if weights == "none":
        averaged(model, mesh)
    gradients = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    return max(abs(shown - expected), *gradient_errors(model, gradients).values())


def _over_logits(weights: str, memory: Any, add: str) -> float:
    """Two micro-batches on each of two data ranks, padded by unequal amounts; `add`: how micro-batches are counted."""
    mesh = init_mesh(sp=2)
    batches = [[right_padded(2, 10 * d + i) | {"labels": None} for i in range(2)] for d in range(mesh.dp)]
    batches[0].append(
        small_batch(2, 3, seed=5) | {"attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]]), "labels": None}
    )
    batches[1].append(
        small_batch(1, 9, seed=6) | {"attention_mask": torch.ones(1, 9, dtype=torch.long), "labels": None}
    )
    truth = small_model("llama")
    model = parallelize(copy.deepcopy(truth), mesh, weights=weights, memory=memory)
    with compute_in_fp64():
        flat = [batch for own in batches for batch in own]
        number = sum(int(batch["attention_mask"].sum()) for batch in flat)
        expected = 0.0
        for batch in flat:
            plain = {key: batch[key] for key in ("input_ids", "attention_mask")}
            loss = (values(truth(**plain, use_cache=False).logits) * plain["attention_mask"]).sum() / number
            loss.backward()
            expected += float(loss.detach())
        shards = [shard_batch(batch, mesh) for batch in batches[mesh.dp_rank]]
        own = sum(shard.real.sum() for shard in shards)
        shown = 0.0
        for shard in shards:
            total = (values(model(**shard.inputs).logits) * shard.real).sum()
            if add == "total_count":
                part = reduce_mean(model, total, shard.real.sum(), mesh, total_count=number)
            else:
                part = reduce_mean(model, total, own, mesh)
            part /= 1
            part.backward()
            shown += float(part.detach())
    return worst(model, mesh, weights, truth, shown, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["shard", "replicate", "none"])
def test_mean_over_logits_equals_one_process(weights: str) -> None:
    for memory, add in (("auto", "count"), (None, "total_count"), (SAVE, "count")):
        assert max(run_ranks(4, _over_logits, weights, memory, add)) < FP64, (memory, add)


def _beside_causal_loss(weights: str, kind: str, place: str, memory: Any) -> float:
    """The loss, and the mean square of what a hook on an inner module saw, over data ranks of unequal rows."""
    mesh = init_mesh(sp=2)
    batches = [small_batch(2, 15 + 4 * d, seed=d) for d in range(mesh.dp)]
    seen: list[Tensor] = []

    def look(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    truth = small_model(kind, **NO_DROPOUT)
    truth.get_submodule(place).register_forward_hook(look)
    own = small_model(kind, **NO_DROPOUT)
    own.get_submodule(place).register_forward_hook(look)
    model = parallelize(own, mesh, weights=weights, memory=memory)
    with compute_in_fp64():
        number = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        expected = 0.0
        for batch in batches:
            loss = truth(**batch, use_cache=False).loss * int((batch["labels"][:, 1:] != -100).sum()) / number
            loss = loss + seen.pop().square().mean(-1).sum() / tokens
            loss.backward()
            expected += float(loss.detach())
        loss = causal_loss(model, batches[mesh.dp_rank], mesh)
        shard = shard_batch(batches[mesh.dp_rank], mesh)
        sizes = seen.pop().square().mean(-1)
        loss = loss + reduce_mean(model, (sizes * shard.real).sum(), shard.real.sum(), mesh)
        loss.backward()
    return worst(model, mesh, weights, truth, float(loss.detach()), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["shard", "none"])
def test_auxiliary_loss_from_hook_equals_one_process(weights: str) -> None:
    for kind, place, memory in (
        ("llama", "model.norm", "auto"),
        ("llama", "model.layers.0", SAVE),
        ("llama", "model.layers.0.mlp.down_proj", None),
        ("gpt2", "transformer.h.1", None),
    ):
        assert max(run_ranks(4, _beside_causal_loss, weights, kind, place, memory)) < FP64, (kind, place)


def _unreduced(case: str, weights: str = "shard", memory: Any = "auto") -> float:
    """A backward of some loss that no reduction knows of."""
    mesh, batch = init_mesh(sp=2), small_batch(2, 16)
    model = parallelize(small_model("llama"), mesh, weights=weights, memory=memory)
    shard = shard_batch(batch, mesh)
    seen: list[Any] = []
    place = {"input of a hook": "model.layers.1.mlp", "output of a layer": "model.layers.0"}.get(case, "model.norm")
    inner = model.get_submodule(place)
    if case == "input of a hook":
        inner.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    elif case in ("hook", "output of a layer"):
        inner.register_forward_hook(lambda _module, _args, output: seen.append(output))
    if case in ("logits", "sum", "reduced to look at", "two passes"):
        logits = model(**shard.inputs).logits
        loss = logits.square().sum() if case == "sum" else logits.square().mean()
    if case == "reduced to look at":
        reduce_mean(model, logits.square().sum(), logits.numel(), mesh)
    elif case == "two passes":
        loss = loss + causal_loss(model, batch, mesh)
    elif case == "hidden states":
        output = model(**shard.inputs, output_hidden_states=True)
        loss = reduce_mean(model, values(output.logits).sum(), 8, mesh) + output.hidden_states[1].square().mean()
    elif seen or case in ("hook", "output of a layer", "input of a hook"):
        loss = causal_loss(model, batch, mesh)
        found = seen[-1]
        loss = loss + (found[0] if isinstance(found, tuple) else found).square().mean()
    loss.backward()
    return float(loss.detach())


@pytest.mark.few(5)
@pytest.mark.parametrize("weights", ["shard", "none"])
@pytest.mark.parametrize("case", ["logits", "sum", "reduced to look at", "two passes", "hook", "output of a layer"])
def test_backward_past_reduction_is_refused_on_all_ranks(case: str, weights: str) -> None:
    expect_refusal(2, _unreduced, case, weights, error="UnsupportedError", match=REFUSED)


@pytest.mark.parametrize("case", ["hidden states", "input of a hook"])
def test_inner_tensors_past_reduction_are_refused_on_all_ranks(case: str) -> None:
    expect_refusal(2, _unreduced, case, "shard", None, error="UnsupportedError", match=REFUSED)


def _one_shard(weights: str) -> float:
    """Rows of their own on every rank, under a wrapper that averages: the mean is right as it stands."""
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh, weights=weights)
    loss = model(**shard_batch(small_batch(2, 16, seed=mesh.rank), mesh).inputs).logits.square().mean()
    loss.backward()
    return float(loss.detach())


def test_backward_of_whole_rows_with_averaged_gradients_is_allowed() -> None:
    assert run_ranks(2, _one_shard, "none")
    assert run_ranks(1, _one_shard, "shard")
    expect_refusal(2, _one_shard, "shard", error="UnsupportedError", match=REFUSED)


def _wrong_arguments(case: str) -> float:
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh)
    logits = model(**shard_batch(small_batch(1, 16), mesh).inputs).logits
    total: Any = logits.sum()
    count: Any = 8
    if case == "not a sum" and mesh.rank == 1:
        total = logits
    if case == "negative":
        count = -1
    if case == "no graph" and mesh.rank == 1:
        total = torch.zeros((), dtype=torch.float64)
    return float(reduce_mean(model, total, count, mesh).detach())


def test_bad_sum_is_refused_on_all_ranks() -> None:
    match = "total is .*pass one floating-point number|another rank passed something else than numbers"
    with pytest.raises(Exception, match=match):
        run_ranks(2, _wrong_arguments, "not a sum")
    expect_refusal(2, _wrong_arguments, "negative", error="BatchError", match="count=-1: pass one number of values")
    expect_refusal(2, _wrong_arguments, "no graph", error="BatchError", match="needs a gradient on 1 of 2 ranks")


def _measured() -> tuple[float, float, float]:
    """An accuracy over logits without gradients, the same of one process, and of nothing at all."""
    mesh, batch = init_mesh(sp=2), small_batch(2, 19)
    plain = small_model("llama").eval()
    model = parallelize(copy.deepcopy(plain), mesh).eval()
    targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    with torch.no_grad(), compute_in_fp64():
        hits = (plain(input_ids=batch["input_ids"]).logits.argmax(-1) == targets) & (targets != -100)
        shard = shard_batch(batch, mesh)
        own = (model(**shard.inputs).logits.argmax(-1) == shard.targets) & (shard.targets != -100)
        got = reduce_mean(model, own.double().sum(), (shard.targets != -100).sum(), mesh)
        nothing = reduce_mean(model, own.double().sum() * 0, 0, mesh)
    return float(got), float(hits.double().sum() / (targets != -100).sum()), float(nothing)


def test_metric_over_logits_equals_one_process() -> None:
    for got, expected, nothing in run_ranks(2, _measured):
        assert got == pytest.approx(expected, abs=FP64)
        assert nothing == 0.0


def _hooked(what: str) -> dict[str, Any]:
    """One step with hooks of many kinds, taken off again; the warnings, and whether the hook is its own again."""
    mesh, batch, said = init_mesh(sp=2), small_batch(1, 16), []
    truth = small_model("llama")
    model = parallelize(copy.deepcopy(truth), mesh, memory=None)
    rows: list[Any] = []
    hooked: dict[str, Callable[[nn.Module], Any]] = {
        "reads": lambda module: module.register_forward_hook(
            lambda _m, _a, out: rows.append(float(out.detach().sum()))
        ),
        "bends": lambda module: module.register_forward_hook(lambda _m, _a, out: out * 1.5),
        "in place": lambda module: module.register_forward_hook(_in_place),
        "keywords": lambda module: module.register_forward_pre_hook(_with_a_keyword, with_kwargs=True),
        "keywords in place": lambda module: module.register_forward_pre_hook(_in_the_keywords, with_kwargs=True),
    }
    place = "model.layers.1.self_attn" if "keywords" in what else "model.layers.0.mlp.down_proj"
    for each in (truth, model):
        handle = hooked[what](each.get_submodule(place))
    original = [
        *truth.get_submodule(place)._forward_hooks.values(),
        *truth.get_submodule(place)._forward_pre_hooks.values(),
    ]
    with compute_in_fp64(), patch.object(hooks.logger, "warning", lambda text, *given: said.append(text % given)):
        expected = truth(**batch, use_cache=False).loss
        expected.backward()
        for _ in range(2):
            model.zero_grad()
            loss = causal_loss(model, batch, mesh)
            loss.backward()
    error = worst(model, mesh, "shard", truth, float(loss.detach()), float(expected.detach()))
    unbind(model)
    module = model.get_submodule(place)
    now = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    kinds = [type(hook) for hook in now] == [type(hook) for hook in original]
    handle.remove()
    gone = not any(isinstance(hook, hooks._CopyingHook) for hook in module._forward_hooks.values())
    return {"error": error, "said": said, "kinds": kinds, "gone": gone, "rows": len(rows)}


def _in_place(_module: nn.Module, _args: Any, output: Tensor) -> None:
    output.mul_(1.5)


def _with_a_keyword(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"hidden_states": kwargs["hidden_states"] * 1.5}


def _in_the_keywords(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    kwargs["hidden_states"] = kwargs["hidden_states"] * 1.5


@pytest.mark.parametrize("what", ["reads", "bends", "in place", "keywords", "keywords in place"])
def test_hooks_on_outputs_keep_working(what: str) -> None:
    found = run_ranks(2, _hooked, what)
    assert all(each["error"] < FP64 and each["kinds"] and each["gone"] for each in found)
    assert len(found[0]["said"]) == 1
    assert "is shown the tokens of its own rank alone" in found[0]["said"][0]
    assert found[1]["said"] == []
    assert {each["rows"] for each in found} == {3 if what == "reads" else 0}
