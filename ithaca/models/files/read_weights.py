"""`load_weights`: each rank reads its own part of a Hugging Face folder's safetensors, straight into its shards.

    model.safetensors                            rank 0            rank 1
      q_proj.weight [4096, 4096]          ->     rows 0:2048       rows 2048:4096     slices, 8 MiB at a time
      experts.0.w1 ... experts.7.w1       ->     experts 0:4       experts 4:8        stacked by transformers' conversion
      gate_proj, up_proj                  ->     fused whole, then this rank's rows

The model may be on the meta device and sharded already. Names and shapes are checked against the files' headers first, so
that a wrong folder is refused before anything is read (`weight_sources.py`).

Invariant: at no time does a rank hold more than its shards, one converted weight, and a few MiB of the files' pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.errors import CheckpointError
from ithaca.models.files.conversion import WeightConversion, copy_conversions
from ithaca.models.files.safetensors_files import TensorReader, read_headers
from ithaca.models.files.weight_sources import plan_groups
from ithaca.ranks import on_all_ranks
from ithaca.state.weights.finite import check_finite
from ithaca.state.weights.placement import device_of_weights
from ithaca.state.weights.shards import bounds

_PIECE = 8 * 2**20


def load_weights(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Fill `model` (empty or not, sharded or not, with adapters or not) with the folder's weights, in place.

    Missing, unexpected or misshapen weights raise CheckpointError before anything is read, and so do types that cannot be
    trained; NaN or infinity raise it when they are read. Adapters keep their values. Every rank calls this function, and
    an error on one rank is raised on all.
    """
    on_all_ranks(lambda: _load(model, folder))


def _load(model: nn.Module, folder: str | PathLike[str]) -> None:
    base = base_of(model)
    headers = read_headers(Path(folder))
    twin = plain_model_like(base)
    groups = plan_groups(twin, headers, Path(folder))
    copy_conversions(twin, base)
    read_generation(base, Path(folder))
    materialize(model)
    load = _WeightLoad(_targets_by_name(base), dict(twin.all_tied_weights_keys))
    with torch.no_grad(), TensorReader(headers) as reader:
        for group in groups:
            _fill(group, load, reader, twin)


def read_generation(base: Any, folder: Path) -> None:
    """Read the folder's generation config, which is saved again with the model; refuse one that cannot be saved."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not base.can_generate() or not file.is_file():
        return
    try:
        base.generation_config = GenerationConfig.from_pretrained(str(folder))
        # transformers reads settings that it refuses to write: without this line, training would end with the refusal.
        base.generation_config.validate(strict=True)
    except Exception as error:
        # transformers raises any exception for a wrong value.
        lines = [line.removeprefix("- ") for line in str(error).splitlines() if line.strip()]
        reason = lines[min(1, len(lines) - 1)] if lines else type(error).__name__
        raise CheckpointError(
            f"{file}: transformers could not save a model with it ({reason}): mend it, or delete it"
        ) from None


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill `model` with the random weights of `from_config` in one process after `torch.manual_seed(seed)`.

    Rank 0 draws all weights and broadcasts them one by one; every rank calls this function. Adapters keep their values.
    """
    base = base_of(model)
    materialize(model)
    targets_by_name = _targets_by_name(base)
    drawn: dict[str, Tensor] = {}
    if _rank() == 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = dict(plain_model_like(base, device="cpu").state_dict())
    with torch.no_grad():
        for key, weight in targets_by_name.items():
            # Broadcast on the mesh's device, even if the weight lives on the host: NCCL takes no host tensors.
            device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
            whole = drawn[key].to(device) if drawn else torch.empty(weight.shape, dtype=weight.dtype, device=device)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(whole, src=0)
            local(weight).copy_(whole[bounds(weight)])


def base_of(model: nn.Module) -> Any:
    """Return the transformers model itself, without a PEFT model around it."""
    inner: Any = model
    return inner.get_base_model() if hasattr(model, "peft_config") else inner


def plain_model_like(base: Any, device: str = "meta") -> Any:
    """Return a plain model of the same config and dtype, with transformers' own names, shapes and ties."""
    import copy

    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(base.config)
    dtype = next(p.dtype for p in base.parameters() if p.is_floating_point())
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def plain_name(key: str) -> str:
    """Return a weight's name without the prefix of adapters."""
    return key.replace(".base_layer.", ".")


def _targets_by_name(base: Any) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by transformers' names, each once."""
    targets_by_name: dict[str, Tensor] = {
        plain_name(key): p for key, p in base.named_parameters() if ".lora_" not in key
    }
    kept = base.state_dict().keys()
    return targets_by_name | {plain_name(key): buffer for key, buffer in base.named_buffers() if key in kept}


def materialize(model: nn.Module) -> None:
    """Allocate parameters and buffers that are on the meta device, uninitialized, on the device they belong to."""
    device = device_of_weights(model) or torch.device("cpu")
    sharded = any(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    if sharded:
        # `_apply` swaps DTensors in place, so tied weights stay tied, and FSDP2 sees the change.
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        return
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[parameter]  # type: ignore[assignment]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself; memory is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True, slots=True)
class _WeightLoad:
    """State of a load. `targets_by_name`: tensors to fill, by transformers' names. `tied`: other names of tied weights."""

    targets_by_name: dict[str, Tensor]
    tied: dict[str, str]
    filled: set[str] = field(default_factory=set)


def _fill(group: WeightConversion, load: _WeightLoad, reader: TensorReader, twin: Any) -> None:
    if group.converter is None:
        (target,) = group.targets
        _put(target, load, group.keys[0], reader)
        return
    within = _own_experts(group, load.targets_by_name)
    parts = [key for at, key in enumerate(group.keys) if within is None or group.ranks[at] in within]
    if not parts:
        return
    made = group.convert(twin, {key: reader.whole(key) for key in parts})
    for target, tensor in made.items():
        check_finite(tensor, target, reader.headers[parts[0]].file)
        weight = load.targets_by_name[load.tied.get(target, target)]
        local(weight).copy_(tensor[bounds(weight)] if within is None else tensor)


def _put(target: str, load: _WeightLoad, key: str, reader: TensorReader) -> None:
    """Read one plain weight; a tied weight that the files hold twice is compared with what was read first."""
    source = load.tied.get(target, target)
    weight = load.targets_by_name[source]
    own = local(weight)
    is_second = source in load.filled
    for at, where in _pieces(own, bounds(weight)):
        read = check_finite(reader.part(key, where), key, reader.headers[key].file)
        if not is_second:
            own[at].copy_(read)
        elif not torch.equal(own[at], read.to(own)):
            raise different_copies(source, load.tied)
    load.filled.add(source)


def different_copies(source: str, tied: dict[str, str]) -> CheckpointError:
    """Return the error for files that hold a tied weight twice with different values."""
    return CheckpointError(
        f"{' and '.join(tied_to(source, tied))} are one weight by the config, but the files hold different ones: "
        "set tie_word_embeddings to false in config.json"
    )


def _pieces(own: Tensor, where: tuple[slice, ...]) -> Iterator[tuple[Any, tuple[slice, ...]]]:
    """Yield blocks of rows of at most `_PIECE` bytes, as an index of the shard and one of the whole tensor."""
    if not where:
        yield ..., where
        return
    rows = max(1, _PIECE // max(1, own.shape[1:].numel() * own.element_size()))
    first = where[0]
    for at in range(0, own.shape[0], rows):
        end = min(at + rows, own.shape[0])
        yield slice(at, end), (slice(first.start + at, first.start + end), *where[1:])


def tied_to(source: str, tied: dict[str, str]) -> list[str]:
    """Return all names of one weight."""
    return [source, *(other for other, its in tied.items() if its == source)]


def _own_experts(group: WeightConversion, targets_by_name: dict[str, Tensor]) -> range | None:
    """Return the experts of this rank; None unless a stack of experts is sharded along the stack alone."""
    if not group.stacked:
        return None
    (target,) = group.targets
    first, *others = bounds(targets_by_name[target])
    whole = [slice(0, size) for size in targets_by_name[target].shape[1:]]
    return range(first.start, first.stop) if others == whole else None


class WholeWeights:
    """Weights of a folder by transformers' names, converted one at a time."""

    def __init__(self, twin: Any, folder: Path) -> None:
        self._twin = twin
        self._headers = read_headers(folder)
        groups = plan_groups(twin, self._headers, folder)
        self._groups = {target: group for group in groups for target in group.targets}

    def whole(self, key: str) -> Tensor:
        """Return the weight `key`, on the host."""
        group = self._groups[key]
        with TensorReader(self._headers) as reader:
            read = {key: reader.whole(key).clone() for key in group.keys}
        return next(iter(read.values())) if group.converter is None else group.convert(self._twin, read)[key]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
