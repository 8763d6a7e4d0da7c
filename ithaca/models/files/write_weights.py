"""`save_pretrained`: the folder transformers would write, written shard by shard.

Rank 0 writes; at no time does it hold more than one file's tensors and one layer. Names, file cuts and tied weights
are those of transformers: its own conversion (fused experts back to one tensor each, for instance) is run once on
meta tensors to plan the files, and then layer by layer on the gathered weights.
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
    """Write config and weights in the standard format; every rank calls it. A PEFT model writes its adapter.

    What the folder held before is replaced only once all files are written; if rank 0 cannot write, every rank raises.
    """
    check_kind("model", model, nn.Module, "pass the model first, as in save_pretrained(model, folder)")
    check_kind("folder", folder, str | PathLike, "pass a path, as in save_pretrained(model, 'out')")
    if not str(folder):
        raise ArgumentError("folder is '': pass a path, as in save_pretrained(model, 'out')")
    limit = _read_size(max_shard_size)
    base: Any = model.module if isinstance(model, DistributedDataParallel) else model
    target = Path(folder)
    # Weights cannot be listed in inference mode.
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
    """Return the largest size of a file in bytes, from a number or a text such as "5GB"."""
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


def refuse_plain_save(model: Any, dress: Callable[[Any, Callable[..., Any]], None]) -> None:
    """`model.save_pretrained` of weights that are spread over ranks, which transformers cannot read, says what can.

    It stays on for as long as the weights are spread, so an unbound model has it too.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        instead = _PlainSave(model.save_pretrained)
        dress(instead, model.save_pretrained)
        model.__dict__["save_pretrained"] = instead


@dataclass(eq=False)
class _PlainSave:
    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise UnsupportedError(
                "model.save_pretrained(folder) cannot read weights that are spread over ranks: call "
                "ithaca.save_pretrained(model, folder) on every rank"
            )
        return self.original(*args, **kwargs)


def write_model(
    base: Any,
    target: Path,
    fetch: Callable[[str, Tensor], Tensor],
    *,
    max_shard_size: str | int = "50GB",
    alone: bool = False,
) -> None:
    """Write `base` layer by layer; `fetch` gives a weight's whole tensor, on the host of rank 0, when it is its turn.

    `alone`: this rank writes by itself, whatever other ranks there are.
    """
    _on_rank_0(target, lambda: _prepare_folder(target, whole=True), alone)
    _describe(base)
    groups = _layers(base)
    plan, total = _plan_files(base, groups, max_shard_size)
    writer = _Writer(target, plan)
    for group in _as_filed(base, groups, plan):
        whole = {key: fetch(key, tensor) for key, tensor in group.items()}
        if alone or _rank() == 0:
            writer.take(base, whole)
        # Or this layer would still be held while the next one is gathered.
        del whole
    _on_rank_0(target, lambda: writer.finish(base, total), alone)


@dataclass(slots=True)
class _Writer:
    """Rank 0's side: keeps tensors until their file is complete, and a failure until all ranks can hear of it."""

    target: Path
    plan: dict[str, list[str]]
    pending: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    failure: Exception | None = None

    def take(self, base: Any, layer: dict[str, Tensor]) -> None:
        """Write the files this layer completes. After a failure nothing more is kept, but the gathers go on."""
        if self.failure is not None:
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
        """Put the new files in the place of the old ones."""
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
    """Run `action` there, and raise on every rank if it fails: none waits for a writer that has given up."""

    def failed(error: Exception) -> Exception:
        advice = ": make room there, or name another folder" if isinstance(error, OSError | SafetensorError) else ""
        return IthacaError(f"could not write to {target}: {str(error) or type(error).__name__}{advice}")

    on_rank_0(action, failed=failed, alone=alone)


def _layers(base: Any) -> list[dict[str, Tensor]]:
    """The state dict in pieces: a decoder layer each, and each other weight alone."""
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
    """The groups in the order of the files they go to, which a conversion may have changed: few files wait at once."""
    place = {key: at for at, key in enumerate(key for keys in plan.values() for key in keys)}
    return sorted(groups, key=lambda group: min(place[key] for key in names_on_disk(base, _on_meta(group))))


def _on_meta(group: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in group.items()}


def _gather(tensor: Tensor) -> Tensor:
    """The whole tensor, on the host of the rank that writes; all ranks take part in the gather."""
    whole: Any = tensor
    if isinstance(tensor, DTensor):
        # Shards kept on the host go by way of the device: that is where ranks are joined.
        whole = tensor.to(tensor.device_mesh.device_type)
        whole = whole.full_tensor()
    return whole.detach().cpu() if _rank() == 0 else whole.detach().to("meta")


def _prepare_folder(target: Path, *, whole: bool = False) -> None:
    """Make the folder; `whole`: for a whole model, which transformers would not load from beside an adapter."""
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
    """Put into the config what transformers puts there when it saves."""
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
    """The names, in the model, of what PEFT writes for any of the model's adapters.

    PEFT is handed these names and not those of its files, which say no more which adapter a tensor belongs to.
    """
    from peft import get_peft_model_state_dict

    names = {id(tensor): key for key, tensor in state.items()}
    found: set[str] = set()
    for adapter in model.peft_config:
        for tensor in get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values():
            if id(tensor) not in names:
                # Made from others, of which nothing is known here.
                return set(state)
            found.add(names[id(tensor)])
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
