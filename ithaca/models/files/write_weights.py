"""`save_pretrained`: the folder that transformers would write, gathered and written layer by layer.

    every rank   layer 0 -> gather     layer 1 -> gather     ...
    rank 0                  convert               convert         -> pending tensors -> model-00001-of-00003.safetensors.part
    at the end   all .part files are renamed; older files of the model are removed

Names, file sizes and tied weights are those of transformers: its own conversion (fused experts back to one tensor each, for
instance) runs once on meta tensors to plan the files, and then on each gathered layer.

Invariant: rank 0 holds one file's tensors and one layer at most, and after a failure the older model is still there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ithaca.arguments import check_count, check_kind, named_arguments, shown
from ithaca.errors import ArgumentError, IthacaError, UnsupportedError
from ithaca.models.files.conversion import names_on_disk, not_written
from ithaca.models.files.safetensors_files import INDEX, modes_of_umask, write_tensors
from ithaca.quantities import parse_bytes
from ithaca.ranks import on_rank_0

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PART = ".part"
_ADAPTER = "adapter_config.json"


@named_arguments
def save_pretrained(model: nn.Module, folder: str | PathLike[str], *, max_shard_size: str | int = "50GB") -> None:
    """Write config and weights in the standard format; every rank calls this function. A PEFT model writes its adapter.

    Older files in the folder are replaced only once all new files are written; if rank 0 cannot write, every rank raises.
    """
    check_kind("model", model, nn.Module, "pass the model first, as in save_pretrained(model, folder)")
    check_kind("folder", folder, str | PathLike, "pass a path, as in save_pretrained(model, 'out')")
    if not str(folder):
        raise ArgumentError("folder is '': pass a path, as in save_pretrained(model, 'out')")
    limit = _read_size(max_shard_size)
    base: Any = model.module if isinstance(model, DistributedDataParallel) else model
    target = Path(folder)
    # FSDP2's state dict cannot be made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        if not hasattr(base, "config"):
            raise UnsupportedError(
                f"{type(base).__name__} has no config, so transformers could not load it: pass the transformers model itself"
            )
        if hasattr(base, "peft_config"):
            _on_rank_0(target, lambda: _prepare_folder(target))
            _save_adapter(base, target)
        else:
            write_model(base, target, lambda _, tensor: _gather(tensor), max_shard_size=limit)


def _read_size(given: object) -> int:
    """Return a file's largest size in bytes, from a number or a text such as "5GB"."""
    try:
        size = parse_bytes(given)
    except ValueError:
        size = None
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if size is None or isinstance(size, str):
        raise ArgumentError(f"max_shard_size={shown(given)}: pass an amount of memory such as '5GB', or bytes")
    check_count("max_shard_size", size, instead=", or a text such as '5GB'")
    return int(size)  # type: ignore[call-overload]


def write_model(
    base: Any,
    target: Path,
    fetch: Callable[[str, Tensor], Tensor],
    *,
    max_shard_size: str | int = "50GB",
    alone: bool = False,
) -> None:
    """Write `base` layer by layer; `fetch` returns a weight's whole tensor on the host of rank 0.

    `alone`: this rank writes by itself, without other ranks.
    """
    _on_rank_0(target, lambda: _prepare_folder(target, whole=True), alone)
    _describe(base)
    groups = _layers(base)
    plan, total = _plan_files(base, groups, max_shard_size)
    writer = _FileWriter(target, plan)
    for group in _as_filed(base, groups, plan):
        whole = {key: fetch(key, tensor) for key, tensor in group.items()}
        if alone or _rank() == 0:
            writer.take(base, whole)
        # Free this layer before the next one is gathered.
        del whole
    _on_rank_0(target, lambda: writer.finish(base, total), alone)


@dataclass(slots=True)
class _FileWriter:
    """Files on rank 0. `pending`: tensors whose file is incomplete. `failure`: an error to raise on all ranks at the end."""

    target: Path
    plan: dict[str, list[str]]
    pending: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    failure: Exception | None = None

    def take(self, base: Any, layer: dict[str, Tensor]) -> None:
        """Write the files that this layer completes."""
        if self.failure is not None:
            # The other ranks go on with their gathers and learn of the failure in `finish`.
            return
        try:
            self.pending |= names_on_disk(base, layer)
            layer.clear()
            for name, keys in self.plan.items():
                if name not in self.written and self.pending.keys() >= set(keys):
                    write_tensors(self.target / (name + _PART), {key: self.pending.pop(key) for key in keys})
                    self.written.add(name)
        except Exception as error:
            self.failure = error
            self.pending.clear()

    def finish(self, base: Any, total: int) -> None:
        """Replace the old files by the new ones, or raise the failure."""
        if self.failure is not None:
            for part in self.target.glob("model*" + _PART):
                part.unlink()
            raise self.failure
        assert self.written == set(self.plan), (self.written, list(self.pending))
        for name in self.plan:
            (self.target / (name + _PART)).replace(self.target / name)
        for old in self.target.iterdir():
            if _WEIGHTS.fullmatch(old.name) and old.name not in self.plan:
                old.unlink()
        (self.target / INDEX).unlink(missing_ok=True)
        _write_rest(base, self.target, self.plan, total)


def _on_rank_0(target: Path, action: Callable[[], object], alone: bool = False) -> None:
    """Run `action` on rank 0, and raise on every rank if it fails."""

    def failed(error: Exception) -> Exception:
        advice = ": make room there, or name another folder" if isinstance(error, OSError | SafetensorError) else ""
        return IthacaError(f"could not write to {target}: {str(error) or type(error).__name__}{advice}")

    on_rank_0(action, failed=failed, alone=alone)


def _layers(base: Any) -> list[dict[str, Tensor]]:
    """Return the state dict in pieces: each decoder layer, and each other weight alone."""
    left_out = not_written(base)
    state = {key: tensor for key, tensor in base.state_dict().items() if key not in left_out}
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _LAYER.match(key)
        groups.setdefault(match.group(1) if match else key, {})[key] = tensor
    return list(groups.values())


def _plan_files(
    base: Any, groups: list[dict[str, Tensor]], max_shard_size: str | int
) -> tuple[dict[str, list[str]], int]:
    from huggingface_hub import split_state_dict_into_shards_factory

    meta = {key: tensor for group in groups for key, tensor in _on_meta(group).items()}
    # The hub's own split of torch tensors does not see that meta tensors share a storage, as the pieces of a fused
    # tensor do: it would count the whole storage once for every piece.
    split = split_state_dict_into_shards_factory(
        names_on_disk(base, meta),
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors, split.metadata.get("total_size", 0)


def _as_filed(base: Any, groups: list[dict[str, Tensor]], plan: dict[str, list[str]]) -> list[dict[str, Tensor]]:
    """Return the groups in the order of their files, which a conversion may change: few files stay incomplete."""
    order = {key: at for at, key in enumerate(key for keys in plan.values() for key in keys)}
    return sorted(groups, key=lambda group: min(order[key] for key in names_on_disk(base, _on_meta(group))))


def _on_meta(group: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in group.items()}


def _gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on the host of rank 0, a meta tensor elsewhere; all ranks take part."""
    whole: Any = tensor
    if isinstance(tensor, DTensor):
        # Shards on the host go by way of the device: NCCL takes no host tensors.
        whole = tensor.to(tensor.device_mesh.device_type)
        whole = whole.full_tensor()
    return whole.detach().cpu() if _rank() == 0 else whole.detach().to("meta")


def _prepare_folder(target: Path, *, whole: bool = False) -> None:
    """Make the folder and remove unfinished files.

    `whole`: for a whole model, which transformers would not load from a folder with an adapter.
    """
    if target.is_file():
        raise IthacaError("it is a file, a folder is needed")
    target.mkdir(parents=True, exist_ok=True)
    if whole and (target / _ADAPTER).is_file():
        raise IthacaError(
            f"it holds the {_ADAPTER} of an adapter, whose own base from_pretrained would load instead of this model: name "
            "another folder, or remove the adapter"
        )
    for left in target.glob("model*" + _PART):
        left.unlink()


def _write_rest(base: Any, target: Path, plan: dict[str, list[str]], total: int) -> None:
    if len(plan) > 1:
        weight_map = {key: name for name, keys in plan.items() for key in keys}
        parameters = sum(p.numel() for p in base.parameters())
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    base.config.save_pretrained(target)
    if base.can_generate():
        base.generation_config.save_pretrained(target)


def _describe(base: Any) -> None:
    """Set the config's architectures and dtype, as transformers does when it saves."""
    base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
    base.config.dtype = str(next(p.dtype for p in base.parameters() if p.is_floating_point())).removeprefix("torch.")


def _save_adapter(model: Any, target: Path) -> None:
    state = model.state_dict()
    kept = _kept_by_adapters(model, state)
    whole = {key: _gather(tensor) if key in kept else tensor.to("meta") for key, tensor in state.items()}

    def write() -> None:
        with modes_of_umask(target, ("**/adapter_model*.safetensors",)):
            model.save_pretrained(target, state_dict=whole)

    _on_rank_0(target, write)


def _kept_by_adapters(model: Any, state: dict[str, Tensor]) -> set[str]:
    """Return the model's names of the tensors that PEFT writes for any of its adapters.

    Names in PEFT's files are of no use here: they do not contain the adapter's name.
    """
    from peft import get_peft_model_state_dict

    names = {id(tensor): key for key, tensor in state.items()}
    found: set[str] = set()
    for adapter in model.peft_config:
        for tensor in get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values():
            if id(tensor) not in names:
                # Computed from unknown tensors: keep all.
                return set(state)
            found.add(names[id(tensor)])
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
