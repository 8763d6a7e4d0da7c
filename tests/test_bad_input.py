"""Tests of a user's mistakes with a model: each is refused by name, on all ranks, before anything is computed.

A rank that dies or raises within a step, which no check foresees, ends the whole job in seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from ithaca.errors import IthacaError
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh, init_mesh
from ithaca.models import support
from ithaca.models.binding import unbind
from ithaca.parallelize import parallelize
from ithaca.sequence.batch import shard_batch
from ithaca.verify.small_models.features import small_config
from tests.bad_models import GOOD, MODELS, bound_already, llama
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except IthacaError as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def refuse_model(what: str) -> str:
    mesh = init_mesh(sp=2)
    make, options, _ = MODELS[what]
    options = {"allow_untested": True, **options}
    table = options.pop("verdicts", {})
    with patch.object(support, "verdicts", lambda: table):
        model = make()
        return said(lambda: parallelize(model, mesh, **options))


@pytest.mark.few(22)
@pytest.mark.parametrize("what", MODELS)
def test_inexact_model_is_refused_by_name(what: str) -> None:
    for message in run_ranks(2, refuse_model, what):
        assert re.search(MODELS[what][2], message), message


def heeded(what: str) -> float:
    """A loss, after the refusal's advice was taken."""
    mesh = init_mesh(sp=2)
    model = bound_already("none") if what == "bound" else torch.compile(llama())
    if what == "bound":
        unbind(model)
    else:
        model = model._orig_mod
    return float(causal_loss(parallelize(model, mesh, allow_untested=True), GOOD, mesh).detach())


@pytest.mark.parametrize("what", ["bound", "compiled"])
def test_advice_of_a_refusal_works(what: str) -> None:
    assert all(loss > 0 for loss in run_ranks(2, heeded, what))


def load_with_tensor_parallelism(folder: str) -> str:
    from transformers.distributed import DistributedConfig

    mesh = init_mesh(sp=2)
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    return said(lambda: parallelize(model, mesh, allow_untested=True))


def test_tensor_parallel_model_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    for message in run_ranks(2, load_with_tensor_parallelism, str(tmp_path)):
        assert "LlamaForCausalLM is tensor-parallel: load it without tp_plan" in message


def accepted(verdict: str) -> str:
    row = {"verdict": verdict, "reason": "none", "classes": "LlamaForCausalLM"}
    with patch.object(support, "verdicts", lambda: {"llama": row}):
        return said(lambda: parallelize(llama(), init_mesh(sp=2)))


def test_exact_architecture_needs_no_permission() -> None:
    """The counterpart of the refusals: what is refused there passes here."""
    assert run_ranks(2, accepted, "exact") == ["no refusal"] * 2


def bound(weights: str = "shard") -> tuple[Any, Mesh]:
    mesh = init_mesh(sp=2)
    return parallelize(llama(), mesh, weights=weights, allow_untested=True), mesh  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "a whole batch": (
        lambda model, inputs: model(**GOOD),
        r"was called with a whole batch: use ithaca\.causal_loss\(model, batch, mesh\), or model\(\*\*ithaca\.shard_batch",
    ),
    "ids alone": (lambda model, inputs: model(GOOD["input_ids"]), r"was called with a whole batch"),
    "labels": (
        lambda model, inputs: model(**inputs, labels=GOOD["input_ids"]),
        r"labels was passed to a sharded forward: .* use ithaca\.causal_loss",
    ),
    "mask": (
        lambda model, inputs: model(**inputs, attention_mask=torch.ones(1, 6)),
        r"attention_mask was passed to a sharded forward: the layout already carries padding",
    ),
    "cache": (
        lambda model, inputs: model(**inputs, past_key_values=()),
        r"past_key_values was passed .* model\.generate",
    ),
    "weights": (lambda model, inputs: model(**inputs, output_attentions=True), r"output_attentions was passed"),
    "compiled": (
        lambda model, inputs: causal_loss(torch.compile(model), GOOD, init_mesh(sp=2)),  # type: ignore[arg-type]
        r"OptimizedModule was compiled after parallelize, .*: pass the model itself",
    ),
    "another mesh": (
        lambda model, inputs: causal_loss(model, GOOD, init_mesh(dp=2, sp=1)),
        r"MeshError: mesh is dp=2 x ring=1 x sp=1 on cpu, the model was parallelized over dp=1 .* pass the same mesh",
    ),
    "no mesh": (
        lambda model, inputs: causal_loss(model, GOOD, None),  # type: ignore[arg-type]
        r"MeshError: mesh=None: pass the ithaca\.Mesh that ithaca\.init_mesh\(sp=\.\.\.\) gives",
    ),
    "torch's mesh": (
        lambda model, inputs: causal_loss(model, GOOD, init_mesh(sp=2).device_mesh),  # type: ignore[arg-type]
        r"MeshError: mesh=a DeviceMesh: pass the ithaca\.Mesh",
    ),
    "no mesh to cut for": (
        lambda model, inputs: shard_batch(GOOD, None),  # type: ignore[arg-type]
        r"MeshError: mesh=None: pass the ithaca\.Mesh",
    ),
    "no mesh to count over": (
        lambda model, inputs: count_tokens([GOOD], None),  # type: ignore[arg-type]
        r"MeshError: mesh=None: pass the ithaca\.Mesh",
    ),
    "torch's mesh to parallelize": (
        lambda model, inputs: parallelize(llama(), init_mesh(sp=2).device_mesh),  # type: ignore[arg-type]
        r"MeshError: mesh=a DeviceMesh: pass the ithaca\.Mesh",
    ),
}


def refuse_call(what: str, weights: str) -> tuple[str, float, float]:
    """Return the refusal of a call, and the losses of a step before and after it."""
    model, mesh = bound(weights)
    inputs = shard_batch(GOOD, mesh).inputs
    before = float(causal_loss(model, GOOD, mesh).detach())
    message = said(lambda: CALLS[what][0](model, inputs))
    loss = causal_loss(model, GOOD, mesh)
    loss.backward()
    return message, before, float(loss.detach())


@pytest.mark.parametrize("weights", ["shard", "none"])
@pytest.mark.parametrize("what", CALLS)
def test_wrong_call_of_parallelized_model_is_refused(what: str, weights: str) -> None:
    for message, before, after in run_ranks(2, refuse_call, what, weights):
        assert re.search(CALLS[what][1], message), message
        assert before == after


def replace_attention(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def skip_attention(model: Any) -> None:
    model.model.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)


def shadow_attention(model: Any) -> None:
    """One layer's config alone says otherwise."""
    attention = model.model.layers[1].self_attn
    attention.config = small_config("llama")
    attention.config._attn_implementation = "sdpa"


BYPASSES: dict[str, tuple[Callable[[Any], None], str]] = {
    "set_attn_implementation": (replace_attention, "0 of 2 layers .* reached the bound attention: .* parallelize last"),
    "a skipped attention": (
        skip_attention,
        r"layers\.0\.self_attn was given a forward after parallelize: do so before it",
    ),
    "one layer's own config": (shadow_attention, "1 of 2 layers .* reached the bound attention: .* parallelize last"),
}


def bypass(what: str, weights: str) -> str:
    model, mesh = bound(weights)
    BYPASSES[what][0](model)
    return said(lambda: causal_loss(model, GOOD, mesh))


@pytest.mark.parametrize("weights", ["shard", "none"])
@pytest.mark.parametrize("what", BYPASSES)
def test_attention_never_reached_raises(what: str, weights: str) -> None:
    for message in run_ranks(2, bypass, what, weights):
        assert re.search(BYPASSES[what][1], message), message


def adapters_too_late(weights: str) -> tuple[str, str]:
    """Beside it the right order, which is taken."""
    from peft import LoraConfig, get_peft_model

    def adapted(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))

    model, mesh = bound(weights)
    late = adapted(model)
    early = parallelize(adapted(llama()), mesh, weights=weights, allow_untested=True)  # type: ignore[arg-type]
    return said(lambda: causal_loss(late, GOOD, mesh)), said(lambda: causal_loss(early, GOOD, mesh))


@pytest.mark.parametrize("weights", ["shard", "replicate"])
def test_adapters_added_after_parallelize_are_refused(weights: str) -> None:
    for late, early in run_ranks(2, adapters_too_late, weights):
        assert late == (
            "UnsupportedError: PeftModel got 4 parameters after parallelize: add adapters and the like before it"
        )
        assert early == "no refusal"


def unbound_again() -> bool:
    model, _ = bound("none")
    expected = llama()(GOOD["input_ids"]).logits
    unbind(model)
    return torch.equal(model(GOOD["input_ids"]).logits, expected)


def test_unbound_model_is_restored() -> None:
    assert run_ranks(2, unbound_again) == [True, True]


SCRIPT = """
import os, sys
import torch, ithaca
from ithaca.verify.small_models.features import small_batch, small_model

mesh = ithaca.init_mesh(sp=2)
model = ithaca.parallelize(small_model("llama", dtype=torch.float32), mesh, allow_untested=True)
causal = small_batch(1, 12)
ithaca.causal_loss(model, causal, mesh).backward()

def fail(module, args):
    if mesh.rank == 1:
        open(sys.argv[2], "w").close()
        if sys.argv[1] == "dies":
            os._exit(3)
        raise RuntimeError("planted in the middle of a step")

model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
ithaca.causal_loss(model, causal, mesh).backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_rank_ending_within_a_step_ends_the_job(how: str, tmp_path: Path) -> None:
    """Its peer waits in an all-to-all, which alone would outlast this test's limit by far."""
    script, reached = tmp_path / "script.py", tmp_path / "reached"
    script.write_text(SCRIPT)
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in launch}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), how, str(reached)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert reached.exists(), done.stderr
    assert done.returncode != 0
    assert ("exitcode  : 3" if how == "dies" else "planted in the middle of a step") in done.stderr
