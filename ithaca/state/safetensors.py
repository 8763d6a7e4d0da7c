"""`save_pretrained`: the folder transformers would write, written shard by shard.

Rank 0 writes; at no time does it hold more than one file's tensors and one layer. Names, file cuts and tied weights
are those of transformers: its own conversion (fused experts back to one tensor each, for instance) is run once on
meta tensors to plan the files, and then layer by layer on the gathered weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.errors import IthacaError

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_INDEX = "model.safetensors.index.json"


def save_pretrained(model: nn.Module, folder: str | PathLike[str], *, max_shard_size: str | int = "50GB") -> None:
    """Write config and weights in the standard format; every rank calls it. A PEFT model writes its adapter."""
    if hasattr(model, "peft_config"):
        _save_adapter(model, Path(folder))
        return
    base: Any = model
    with _original_config(base):
        plan, total = _plan_files(base, max_shard_size)
        main = _rank() == 0
        target = Path(folder)
        if main:
            _prepare_folder(target)
        pending: dict[str, Tensor] = {}
        waiting = {name: set(keys) for name, keys in plan.items()}
        for group in _layers(base):
            whole = {key: _gather(tensor, keep=main) for key, tensor in group.items()}
            if not main:
                continue
            pending |= _convert(base, {key: tensor for key, tensor in whole.items() if tensor is not None})
            for name in [n for n, keys in waiting.items() if keys <= pending.keys()]:
                _write(target / name, {key: pending.pop(key) for key in plan[name]})
                del waiting[name]
        if main:
            assert not waiting and not pending, (waiting, list(pending))
            _write_rest(base, target, plan, total)
    _barrier()


def _layers(base: Any) -> Iterator[dict[str, Tensor]]:
    """The state dict in pieces: a decoder layer each, and each run of other weights between."""
    state = {key: tensor for key, tensor in base.state_dict().items() if key not in _tied(base)}
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _LAYER.match(key)
        groups.setdefault(match.group(1) if match else key, {})[key] = tensor
    yield from groups.values()


def _tied(base: Any) -> set[str]:
    """Names transformers drops because another name has the same tensor."""
    ignored = set(base._keys_to_ignore_on_save or ())
    return set(getattr(base, "all_tied_weights_keys", None) or {}) | ignored


def _plan_files(base: Any, max_shard_size: str | int) -> tuple[dict[str, list[str]], int]:
    from huggingface_hub import split_torch_state_dict_into_shards

    meta = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for group in _layers(base)
        for key, tensor in group.items()
    }
    split = split_torch_state_dict_into_shards(
        _convert(base, meta), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    return split.filename_to_tensors, split.metadata.get("total_size", 0)


def _convert(base: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """From transformers' names in memory to its names on disk."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(base, state)
    return converted


def _gather(tensor: Tensor, *, keep: bool) -> Tensor | None:
    """The whole tensor on the host of the rank that writes; all ranks take part in the gather."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if keep else None


def _prepare_folder(target: Path) -> None:
    if target.is_file():
        raise IthacaError(f"{target} is a file: save_pretrained needs a folder")
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob("model*.safetensors"), target / _INDEX):
        old.unlink(missing_ok=True)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # A tensor may be a view of a fused one: clone it, safetensors stores whole tensors only.
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _write_rest(base: Any, target: Path, plan: dict[str, list[str]], total: int) -> None:
    if len(plan) > 1:
        weight_map = {key: name for name, keys in plan.items() for key in keys}
        parameters = sum(p.numel() for p in base.parameters())
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    base.config.save_pretrained(target)
    if base.can_generate():
        base.generation_config.save_pretrained(target)


class _original_config:
    """While saving, the config says what transformers itself would have put there."""

    def __init__(self, base: Any) -> None:
        self.config = base.config
        self.after = {
            "architectures": [type(base).__name__.removeprefix("FSDP")],
            "dtype": str(next(p.dtype for p in base.parameters() if p.is_floating_point())).removeprefix("torch."),
        }

    def __enter__(self) -> None:
        for key, value in self.after.items():
            setattr(self.config, key, value)

    def __exit__(self, *_: object) -> None:
        return None


def _save_adapter(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(model)
    whole = {key: _gather(tensor, keep=True) for key, tensor in adapter.items()}
    if _rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=whole)
    _barrier()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
