"""`generate` after parallelize gives the plain model's tokens; replaced methods keep signature, name and documentation."""

from __future__ import annotations

import copy
import inspect
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import extract_model_from_parallel
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationMixin
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils.generic import can_return_loss, find_labels

from ithaca import handle
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.generate import _BEFORE_SYNCED
from ithaca.parallelize import parallelize
from ithaca.planning.plan import LayerMode, MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

TILE = 5
Memory = LayerMode | None | str
MEMORIES: list[Memory] = [None, "auto", "keep", "save", "rebuild", "recompute"]
NAMES = ("__name__", "__qualname__", "__doc__", "__module__")


def plan(memory: Memory) -> Any:
    if memory is None or memory == "auto":
        return memory
    first: Any = "save" if memory == "rebuild" else memory
    return MemoryPlan((first, memory), (False, False), TILE, 7)


def plain_model(kind: str, adapted: bool = False) -> Any:
    """In fp32: transformers' eager softmax of a masked row is NaN in fp64. Learned positions are of a size that shows."""
    model: Any = small_model(kind, dtype=torch.float32, **({"attn_pdrop": 0.0} if kind == "gpt2" else {})).eval()
    if kind == "gpt2":
        torch.manual_seed(2)
        nn.init.normal_(model.transformer.wpe.weight, std=0.5)
        # Of its own, or the last token is generated again and again.
        model.lm_head.weight = nn.Parameter(torch.randn(model.lm_head.weight.shape))
    if adapted:
        torch.manual_seed(3)
        targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=kind == "gpt2")
        model = get_peft_model(model, config).eval()
    return model


def requests() -> dict[str, dict[str, Any]]:
    """Ways to ask; prompts are longer than a tile, and one of two is padded on the left in most."""
    ids = torch.randint(3, 61, (2, 19), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    padded = ids.where(mask.bool(), 0)
    greedy = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    return {
        "greedy": {"inputs": ids, **greedy},
        "beams": {"inputs": padded, "attention_mask": mask, **greedy, "num_beams": 3},
        "sampled": {"inputs": padded, "attention_mask": mask, **greedy, "do_sample": True, "top_p": 0.9},
        "padded": {"inputs": padded, "attention_mask": mask, **greedy},
        "padded, no mask": {"inputs": padded, **greedy, "eos_token_id": 2},
        "no cache": {"inputs": padded, "attention_mask": mask, **greedy, "use_cache": False},
    }


def generated(model: Any) -> dict[str, list[list[int]]]:
    found = {}
    for name, request in requests().items():
        torch.manual_seed(7)
        found[name] = model.generate(**request).tolist()
    return found


def both(sp: int, kind: str, memory: Memory, adapted: bool = False, trained: bool = False) -> tuple[Any, Any]:
    """Return the tokens of one process and of this rank."""
    mesh, plain = init_mesh(sp=sp), plain_model(kind, adapted)
    model = parallelize(copy.deepcopy(plain), mesh, memory=plan(memory))
    for each in (plain, model) if trained else ():
        optimizer = torch.optim.SGD(each.parameters(), 0.05)
        batch = small_batch(2, 16)
        (each(**batch).loss if each is plain else causal_loss(each, batch, mesh)).backward()
        optimizer.step()
    return generated(plain), generated(model)


QUICK = [(1, "gpt2", "save"), (1, "llama", "auto"), (2, "llama", "recompute"), (2, "gpt2", None)]
CASES = [(sp, kind, memory) for sp in (1, 2) for kind in ("llama", "gpt2") for memory in MEMORIES]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sp", "kind", "memory"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_generate_gives_tokens_of_plain_model(sp: int, kind: str, memory: Memory) -> None:
    for expected, given in run_ranks(sp, both, sp, kind, memory):
        assert given == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("memory", [None, "auto"])
@pytest.mark.parametrize("trained", [False, True])
def test_generate_with_adapters_after_step_gives_tokens_of_plain_model(memory: Memory, trained: bool) -> None:
    for expected, given in run_ranks(2, both, 2, "llama", memory, True, trained):
        assert given == expected


def _hidden(sp: int, kind: str) -> tuple[Any, Any]:
    with patch.object(handle, "looks_like", lambda instead, original: None):
        return both(sp, kind, "save")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generate_planted_hidden_signature_is_seen(kind: str) -> None:
    [(expected, given)] = run_ranks(1, _hidden, 1, kind)
    assert given["padded, no mask"] != expected["padded, no mask"]


def _prompt_logits() -> list[int]:
    """Return the number of tokens with logits in each pass of a generation."""
    model = parallelize(plain_model("llama"), init_mesh(sp=1), memory=plan("save"))
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape[1]))
    model.generate(**requests()["greedy"])
    return seen


def test_generate_computes_logits_of_one_token_a_pass() -> None:
    assert set(run_ranks(1, _prompt_logits)[0]) == {1}


def _unequal_prompts() -> bool:
    """Ranks with rows of their own end at different times; each gather of weights takes them all."""
    mesh, plain = init_mesh(sp=1), plain_model("llama")
    first = plain.generate(**requests()["greedy"])
    # The token that rank 0 generates first ends its generation; rank 1 may not meet it.
    request = {**requests()["greedy"], "eos_token_id": int(first[0, 19]), "max_new_tokens": 9}
    request["inputs"] = request["inputs"][mesh.dp_rank : mesh.dp_rank + 1]
    expected = plain.generate(**request).tolist()
    model = parallelize(plain, mesh)
    return bool(model.generate(**request).tolist() == expected)


def test_generate_ranks_end_at_different_tokens_without_hanging() -> None:
    assert all(run_ranks(2, _unequal_prompts))


def bare(method: Any) -> Any:
    """The function at the bottom of what wraps it."""
    unwrapped: Any = inspect.unwrap(method)
    return inspect.unwrap(getattr(unwrapped, "__func__", unwrapped))


def _looks(sp: int, kind: str, memory: Memory) -> list[str]:
    """Names of methods whose looks are others than before."""
    model = plain_model(kind)
    methods = [(name, module, "forward") for name, module in model.named_modules()]
    methods += [("", model, each) for each in ("generate", "save_pretrained", "load_state_dict")]
    methods += [("", model, "resize_token_embeddings")]
    before = [(getattr(module, each), inspect.signature(getattr(module, each))) for _, module, each in methods]
    types = [type(module).__name__ for module in model.modules()]
    labels, places = find_labels(type(model)), type(model).__module__
    parallelize(model, init_mesh(sp=sp), memory=plan(memory), fuse=memory == "auto")
    assert [type(module).__name__ for module in model.modules()] == types
    assert (find_labels(type(model)), type(model).__module__, can_return_loss(type(model))) == (labels, places, False)
    wrong = []
    for (name, module, each), (method, signature) in zip(methods, before, strict=True):
        now = getattr(module, each)
        same = all(getattr(now, key, None) == getattr(method, key, None) for key in NAMES)
        if not same or inspect.signature(now) != signature or bare(now) is not bare(method):
            wrong.append(f"{name}.{each}")
    return wrong


@pytest.mark.parametrize(("sp", "memory"), [(1, "auto"), (2, "save"), (2, None)])
def test_replaced_methods_keep_signature_and_name(sp: int, memory: Memory) -> None:
    assert run_ranks(sp, _looks, sp, "qwen3", memory)[0] == []


def _columns() -> tuple[list[str], list[str]]:
    """Return the columns that Trainer's collator keeps of an example, before and after."""
    found = []
    for model in (plain := plain_model("llama"), parallelize(copy.deepcopy(plain), init_mesh(sp=1))):
        columns = list(inspect.signature(model.forward).parameters)
        collator = RemoveColumnsCollator(lambda examples: examples, columns)
        found.append(
            sorted(collator([dict.fromkeys(("input_ids", "labels", "logits_to_keep", "text", "kwargs"), 0)])[0])
        )
    return found[0], found[1]


def test_trainer_collator_keeps_columns_of_plain_model() -> None:
    [(before, after)] = run_ranks(1, _columns)
    assert before == after != []


def _unwrapped() -> bool:
    """accelerate takes its casts off again by the look of the forward."""
    from accelerate.utils import convert_outputs_to_fp32

    mesh = init_mesh(sp=1)
    model = parallelize(plain_model("llama"), mesh, memory=plan("save"))
    expected = float(causal_loss(model, small_batch(2, 16), mesh))
    model._original_forward, forward = model.forward, model.forward
    model.forward = convert_outputs_to_fp32(forward.__func__ if hasattr(forward, "__func__") else forward).__get__(
        model
    )
    bare = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    return float(causal_loss(bare, small_batch(2, 16), mesh)) == expected


def test_model_unwrapped_by_accelerate_runs_as_before() -> None:
    assert run_ranks(1, _unwrapped) == [True]


def _taken_off() -> bool:
    model = plain_model("llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    unbind(parallelize(model, init_mesh(sp=1), memory=plan("save")))
    return all("forward" not in module.__dict__ for module in model.modules()) and "generate" not in before[""]


def test_unbind_restores_replaced_methods() -> None:
    assert run_ranks(1, _taken_off) == [True]


def test_generate_of_transformers_takes_synced_gpus_where_expected() -> None:
    parameters = list(inspect.signature(GenerationMixin.generate).parameters)
    assert parameters.index("synced_gpus") == _BEFORE_SYNCED + 1, "after self; change ithaca/models/generate.py"
