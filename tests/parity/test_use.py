"""The same object in other uses: evaluation, generation, two models from one config, unbinding, isolation."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.files.write_weights import save_pretrained
from ithaca.parallelize import parallelize
from ithaca.sequence.batch import shard_batch
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import build, small_batch, small_config, small_model
from tests.batches import packed
from tests.parity.cases import worst
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import BF16_LOSS, FP64


def test_evaluation_stays_sharded() -> None:
    assert worst("llama", (1, 4), 2, ["plain", "packed", "left_padded"], evaluate=True) < FP64


def _evaluated() -> tuple[float, float, int]:
    """Loss without gradients, the reference's, and the longest row any attention saw."""
    mesh = init_mesh(sp=2)
    model = small_model("llama")
    batch = small_batch(2, 24)
    widths = []
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), [[batch]]).loss
        parallel = parallelize(model, mesh).eval()
        parallel.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
        with torch.no_grad():
            got = float(causal_loss(parallel, batch, mesh))
    return got, expected, max(widths)


def test_loss_without_gradients_is_the_same_and_sharded() -> None:
    for got, expected, width in run_ranks(2, _evaluated):
        assert abs(got - expected) < FP64
        assert width == 12


def _step_evaluate_step() -> tuple[float, float]:
    """An evaluation between backward and the optimizer step must not freeze any weights."""
    mesh = init_mesh(sp=2)
    batch = small_batch(1, 24)
    losses = []
    for evaluate in (False, True):
        model = parallelize(small_model("llama"), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        causal_loss(model, batch, mesh).backward()
        if evaluate:
            with torch.no_grad():
                causal_loss(model, batch, mesh)
        optimizer.step()
        losses.append(float(causal_loss(model, batch, mesh).detach()))
    return losses[0], losses[1]


def test_evaluation_between_backward_and_step_changes_nothing() -> None:
    for without, with_evaluation in run_ranks(2, _step_evaluate_step):
        assert without == with_evaluation


def _under_autocast(kind: str, memory: str | None, compute_dtype: torch.dtype | None, on: bool = True) -> float:
    mesh = init_mesh(sp=1)
    model = small_model(kind, dtype=torch.float32, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    model = parallelize(model, mesh, memory=memory, compute_dtype=compute_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        loss = causal_loss(model, small_batch(1, 24), mesh)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("memory", ["auto", None])
def test_autocast_is_refused(kind: str, memory: str | None) -> None:
    match = r"leave it out, and pass parallelize\(..., compute_dtype=torch.bfloat16\)"
    expect_refusal(1, _under_autocast, kind, memory, None, error="UnsupportedError", match=match)


def test_autocast_to_the_models_own_type_is_accepted() -> None:
    [got], [expected] = (run_ranks(1, _under_autocast, "llama", "auto", torch.bfloat16, on) for on in (True, False))
    assert got == pytest.approx(expected, rel=BF16_LOSS)


def _generated(weights: str) -> tuple[list[list[int]], list[list[int]], float]:
    mesh = init_mesh(sp=2)
    plain = small_model("llama", dtype=torch.float32).eval()
    prompt = small_batch(2, 7)["input_ids"]
    prompt[0, :3] = 0
    mask = (prompt != 0).long()
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    expected = plain.generate(prompt, **settings).tolist()
    model = parallelize(copy.deepcopy(plain), mesh, weights=weights)
    before = float(causal_loss(model, small_batch(1, 20), mesh).detach())
    got = model.generate(prompt, **settings).tolist()
    after = float(causal_loss(model, small_batch(1, 20), mesh).detach())
    return got, expected, abs(after - before)


@pytest.mark.parametrize("weights", ["shard", "none"])
def test_generate_works_unsharded(weights: str) -> None:
    for got, expected, change in run_ranks(2, _generated, weights):
        assert got == expected
        assert change == 0.0


def _in_inference_mode(first: str, folder: str) -> tuple[float, float]:
    """A training step's gradient norm after something was done in inference mode, and without that."""
    mesh, norms = init_mesh(sp=2), []
    for how in (first, "nothing"):
        model = parallelize(small_model("llama", dtype=torch.float32), mesh)
        with torch.inference_mode():
            if how == "evaluated":
                causal_loss(model, small_batch(1, 20), mesh)
            elif how == "generated":
                model.generate(small_batch(1, 5)["input_ids"], max_new_tokens=2, do_sample=False)
            elif how == "saved":
                save_pretrained(model, folder)
        causal_loss(model, small_batch(1, 20), mesh).backward()
        norms.append(float(torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()))
    return norms[0], norms[1]


@pytest.mark.parametrize("first", ["evaluated", "generated", "saved"])
def test_model_used_in_inference_mode_can_be_trained(first: str, tmp_path: Path) -> None:
    """FSDP2 keeps what it makes in its first pass."""
    for got, expected in run_ranks(2, _in_inference_mode, first, str(tmp_path)):
        assert got == expected


def _two_from_one_config() -> tuple[str, bool, float]:
    mesh = init_mesh(sp=2)
    config = small_config("llama")
    first = build(config)
    second = type(first)(config).double()
    second.load_state_dict(first.state_dict())
    first.config = second.config = config
    for module in (*first.modules(), *second.modules()):
        if hasattr(module, "config"):
            module.config = config
    config._attn_implementation = "eager"
    batch = small_batch(1, 16)
    before = second(**batch).loss
    parallelize(first, mesh)
    after = second(**batch).loss
    return second.config._attn_implementation, second.config is config, float((after - before).abs().detach())


def test_config_shared_by_two_models_is_untouched() -> None:
    for name, same, change in run_ranks(2, _two_from_one_config):
        assert (name, same, change) == ("eager", True, 0.0)


def _unbound() -> tuple[bool, bool, float, list[str]]:
    mesh = init_mesh(sp=2)
    model = small_model("llama")
    batch = small_batch(1, 16)
    state = {module: set(vars(module)) for module in model.modules()}
    hooks = {module: (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()}
    config, before = model.config, model(**batch).loss
    parallelize(model, mesh, weights="none")
    causal_loss(model, batch, mesh)
    unbind(model)
    left = [key for module in model.modules() for key in set(vars(module)) - state[module]]
    same_hooks = hooks == {m: (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    return model.config is config, same_hooks, float((model(**batch).loss - before).abs().detach()), left


@pytest.mark.slow
def test_unbind_restores_the_model() -> None:
    for same_config, same_hooks, change, left in run_ranks(2, _unbound):
        assert same_config
        assert same_hooks
        assert change == 0.0
        assert left == []


def _isolation(dtype: torch.dtype) -> list[tuple[bool, bool]]:
    """Per document that was not changed: is it bit-identical? And the changed one: did it change?"""
    mesh = init_mesh(sp=4)
    model = parallelize(small_model("llama", dtype=dtype), mesh)
    batch = packed(2, seed=3)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 4] = (other["input_ids"][0, 4] + 7) % 60
    with torch.no_grad():
        a, b = (_whole_logits(model, x, mesh) for x in (batch, other))
    layout = shard_batch(batch, mesh).layout
    return [
        (bool((a[row, start:end] == b[row, start:end]).all()), (row, start) == (0, 0))
        for row, spans in enumerate(layout.documents)
        for start, end in spans
    ]


def _whole_logits(model: torch.nn.Module, batch: dict[str, Tensor], mesh: object) -> Tensor:
    shard = shard_batch(batch, mesh)  # type: ignore[arg-type]
    logits = model(**shard.inputs).logits
    parts = [torch.empty_like(logits) for _ in range(4)]
    torch.distributed.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_document_with_a_changed_neighbour_is_bit_identical(dtype: torch.dtype) -> None:
    for documents in run_ranks(4, _isolation, dtype):
        assert len(documents) == 9
        for identical, changed in documents:
            assert identical != changed


def test_promotion_reaches_below_single_precision() -> None:
    """Without the mode transformers rounds to fp32 on the way, and fp64 parity could not be seen at all."""
    model = small_model("llama", dtype=torch.float64)
    batch = small_batch(1, 16)
    single = model(**batch).loss
    with compute_in_fp64():
        double = model(**batch).loss
    assert 1e-12 < relative_error(single, double) < 1e-5
