"""Models that `parallelize` refuses: how each is made, the arguments of the call, and the refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel

from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.parallelize import parallelize
from ithaca.planning.plan import MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_config, small_model

GOOD = small_batch(1, 12)


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
