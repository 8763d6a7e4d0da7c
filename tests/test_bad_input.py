"""What a user can get wrong with a model: each is refused by name, on all ranks, before anything is computed wrongly.

And what no check foresees: a rank that dies or raises in the middle of a step ends the whole job in seconds.
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
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel, AutoModelForCausalLM

from ithaca.errors import IthacaError
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh, init_mesh
from ithaca.models import support
from ithaca.models.binding import unbind
from ithaca.parallelize import parallelize
from ithaca.planning.plan import MemoryPlan
from ithaca.sequence.batch import shard_batch
from ithaca.verify.small_models.features import small_batch, small_config, small_model
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
GOOD = small_batch(1, 12)


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except IthacaError as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def llama(**overrides: Any) -> Any:
    return small_model("llama", dtype=torch.float32, **overrides)


def tensor_parallel() -> Any:
    model = llama()
    model._tp_size = 2
    return model


def sharded_by_fsdp() -> Any:
    return fully_shard(llama())


def dispatched() -> Any:
    model = llama()
    model.model.layers[0]._hf_hook = object()
    return model


def compiled_in_place() -> Any:
    model = llama()
    model.compile(backend="eager")
    return model


def compiled_layer() -> Any:
    model = llama()
    model.model.layers[0].compile(backend="eager")
    return model


def compiled_inside() -> Any:
    model = llama()
    model.model = torch.compile(model.model, backend="eager")
    return model


def bound_already(weights: str) -> Any:
    return parallelize(llama(), init_mesh(sp=2), weights=weights, allow_untested=True)  # type: ignore[arg-type]


def unbound_but_sharded() -> Any:
    model = bound_already("shard")
    unbind(model)
    return model


def without_head() -> Any:
    return AutoModel.from_config(small_config("llama"))


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "weights": (llama, {"weights": "zero3"}, r"weights='zero3': choose one of shard, replicate, none"),
    "kernel": (llama, {"kernel": "flash4"}, r"no attention kernel is called 'flash4': use one of auto, cudnn, flash"),
    "on_host": (llama, {"on_host": ["x"]}, r"on_host=\['x'\]: choose one of nothing, everything"),
    "memory in a word": (llama, {"memory": "least"}, r"memory='least': pass 'auto', None, a dict of choices, or an"),
    "memory of another name": (
        llama,
        {"memory": {"tile": 4}},
        r"'tile' is nothing to decide of a memory plan: choose among layers, offload, mlp_tile, loss_tile, head_groups",
    ),
    "a mode for too few layers": (
        llama,
        {"memory": {"layers": ["save"] * 7}},
        r"layers has 7 entries, the model \d layers: give one a layer, or one",
    ),
    "a mode that is none": (
        llama,
        {"memory": {"layers": "kept"}},
        r"layer mode 'kept': choose among keep, save, rebuild",
    ),
    "kept and offloaded": (
        llama,
        {"memory": {"layers": "keep", "offload": True}},
        r"every layer keeps everything and is to be offloaded: use layers='save' or offload=False",
    ),
    "experts rebuilt by choice": (
        lambda: small_model("mixtral", dtype=torch.float32),
        {"memory": {"layers": ["save"] + ["rebuild"] * (small_model("mixtral").config.num_hidden_layers - 1)}},
        r"inputs cannot be rebuilt through expert layers: use 'save' or 'recompute' instead",
    ),
    "no names of layers, by choice": (
        lambda: small_model("biogpt", dtype=torch.float32, attention_probs_dropout_prob=0.0),
        {
            "verdicts": {
                "biogpt": {"verdict": "exact", "reason": "", "classes": "BioGptForCausalLM", "memory": "exact"}
            },
            "memory": {"offload": False},
        },
        r"BioGptForCausalLM does not name its layers, so no plan fits it: use memory=None",
    ),
    "budget in words": (
        llama,
        {"memory_budget": "a lot"},
        r"memory_budget='a lot': pass bytes above 0, such as 40e9 or",
    ),
    "budget of nothing": (llama, {"memory_budget": 0}, r"memory_budget=0: pass bytes above 0, .* or '40GB'"),
    "budget without a unit": (
        llama,
        {"memory_budget": "40"},
        r"memory_budget='40': 40 is taken as bytes: .* such as 40GB",
    ),
    "name of a model": (
        lambda: "my-llama",
        {},
        r"'my-llama' is a name: pass the model, AutoModelForCausalLM\.from_pre",
    ),
    "budget below nothing": (llama, {"memory_budget": "-1GB"}, r"memory_budget='-1GB': pass bytes above 0"),
    "budget that is true": (llama, {"memory_budget": True}, r"memory_budget=True: pass bytes above 0"),
    "budget of the host": (llama, {"host_budget": "most"}, r"host_budget='most': pass bytes above 0, such as 40e9"),
    "budget of nan": (llama, {"memory_budget": float("nan")}, r"memory_budget=nan: pass bytes above 0"),
    "dtype by name": (
        llama,
        {"compute_dtype": "bf16"},
        r"compute_dtype='bf16': pass one of torch\.bfloat16, torch\.float16, torch\.float32, torch\.float64, or None",
    ),
    "whole numbers": (llama, {"compute_dtype": torch.int8}, r"compute_dtype=torch\.int8: pass one of torch\.bfloat16"),
    "fuse": (llama, {"fuse": "no"}, r"fuse='no': pass True or False"),
    "allow_untested": (llama, {"allow_untested": "no"}, r"allow_untested='no': pass True or False"),
    "no names of layers": (
        lambda: small_model("biogpt", dtype=torch.float32, attention_probs_dropout_prob=0.0),
        {
            "verdicts": {
                "biogpt": {"verdict": "exact", "reason": "", "classes": "BioGptForCausalLM", "memory": "exact"}
            },
            "memory": MemoryPlan(("save",) * 3, (False,) * 3, 8, 8),
        },
        r"BioGptForCausalLM does not name its layers, so no plan fits it: use memory=None",
    ),
    "layers that are not run again": (
        llama,
        {
            "memory": MemoryPlan(("save",) * 3, (False,) * 3, 8, 8),
            "allow_untested": False,
            "verdicts": {"llama": {"verdict": "exact", "reason": "", "classes": "LlamaForCausalLM", "memory": "off"}},
        },
        r"layers run again are not exact for llama: off: use memory=None or 'auto'",
    ),
    "dropout": (lambda: llama(attention_dropout=0.1), {}, r"config.attention_dropout=0.1: .* set it to 0"),
    "output_attentions": (
        lambda: llama(output_attentions=True),
        {},
        r"config.output_attentions=True: .* set it to False",
    ),
    "return_dict": (lambda: llama(return_dict=False), {}, r"config.return_dict=False: .* set it to True"),
    "both directions": (
        lambda: small_model("bert", dtype=torch.float32, attention_probs_dropout_prob=0.0, hidden_size=64),
        {},
        r"bert\.encoder\.layer\.0\.attention\.self attends in both directions, .* set is_decoder=True",
    ),
    "heads": (
        lambda: llama(num_attention_heads=1, num_key_value_heads=1),
        {},
        r"1 heads over sp=2: .* use sp=1 with dp=2",
    ),
    "tensor parallel": (tensor_parallel, {}, r"LlamaForCausalLM is tensor-parallel: load it without tp_plan"),
    "DTensor": (
        sharded_by_fsdp,
        {},
        r"is sharded already \(model\.embed_tokens\.weight is a DTensor\): build or load it anew, and parallelize",
    ),
    "unbound": (unbound_but_sharded, {}, r"is sharded already .*: build or load it anew"),
    "device_map": (dispatched, {}, r"dispatched by a device_map \(model\.layers\.0\): load it without device_map"),
    "bound": (lambda: bound_already("none"), {}, r"LlamaForCausalLM is parallelized already: call ithaca\.unbind"),
    "bound and sharded": (
        lambda: bound_already("shard"),
        {},
        r": LlamaForCausalLM is parallelized already: build or load it anew",
    ),
    "DDP": (
        lambda: DistributedDataParallel(llama()),
        {},
        r"torch's DistributedDataParallel is already wrapped: pass the model inside it .* with weights='none'",
    ),
    "compiled": (
        lambda: torch.compile(llama()),
        {},
        r"torch's OptimizedModule is compiled: pass the model inside it, model\._orig_mod, parallelize itself compiles",
    ),
    "compiled in place": (compiled_in_place, {}, r"is compiled \(the model\): build it without torch\.compile"),
    "a compiled layer": (compiled_layer, {}, r"is compiled \(model\.layers\.0\): build it without torch\.compile"),
    "a compiled part": (compiled_inside, {}, r"is compiled \(model\): build it without torch\.compile"),
    "hand-written": (
        lambda: nn.Linear(3, 3),
        {},
        r"torch's Linear is not a transformers model: in a hand-written model call ithaca\.ulysses_attention",
    ),
    "untested": (
        llama,
        {"allow_untested": False, "verdicts": {"llama4": {"verdict": "exact", "reason": ""}}},
        r"the architecture 'llama' has no parity run behind it; nearest that are: llama4\. allow_untested=True lets it",
    ),
    "refused": (
        llama,
        {"verdicts": {"llama": {"verdict": "refused", "reason": "its layers mix tokens"}}},
        r"the architecture 'llama' is refused: its layers mix tokens",
    ),
    "no head": (
        without_head,
        {"verdicts": {"llama": {"verdict": "exact", "reason": "", "classes": "LlamaForCausalLM"}}},
        r"LlamaModel is no causal language model: pass the llama model with its head",
    ),
}


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
def test_model_that_would_not_be_exact_is_refused(what: str) -> None:
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


def test_model_with_a_tensor_parallel_plan_is_refused(tmp_path: Path) -> None:
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
    """What was said, and that the next step gives the loss it gave before."""
    model, mesh = bound(weights)
    inputs = shard_batch(GOOD, mesh).inputs
    before = float(causal_loss(model, GOOD, mesh).detach())
    message = said(lambda: CALLS[what][0](model, inputs))
    loss = causal_loss(model, GOOD, mesh)
    loss.backward()
    return message, before, float(loss.detach())


@pytest.mark.parametrize("weights", ["shard", "none"])
@pytest.mark.parametrize("what", CALLS)
def test_wrong_call_of_a_parallelized_model_is_refused(what: str, weights: str) -> None:
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
    "set_attn_implementation": (replace_attention, "0 of 2 layers"),
    "a skipped attention": (skip_attention, "1 of 2 layers"),
    "one layer's own config": (shadow_attention, "1 of 2 layers"),
}


def bypass(what: str, weights: str) -> str:
    model, mesh = bound(weights)
    BYPASSES[what][0](model)
    return said(lambda: causal_loss(model, GOOD, mesh))


@pytest.mark.parametrize("weights", ["shard", "none"])
@pytest.mark.parametrize("what", BYPASSES)
def test_attention_never_reached_raises(what: str, weights: str) -> None:
    for message in run_ranks(2, bypass, what, weights):
        assert re.search(f"{BYPASSES[what][1]} .* reached the bound attention: .* call parallelize last", message), (
            message
        )


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


def test_unbound_model_is_what_it_was() -> None:
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
def test_rank_ended_in_a_step_ends_the_job(how: str, tmp_path: Path) -> None:
    """Its peer waits in an all-to-all, which would last for half an hour."""
    script, stamp = tmp_path / "script.py", tmp_path / "failed"
    script.write_text(SCRIPT)
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in launch}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), how, str(stamp)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert stamp.exists(), done.stderr
    assert done.returncode != 0
    assert ("exitcode  : 3" if how == "dies" else "planted in the middle of a step") in done.stderr
