"""An Accelerator whose processes are sequence groups.

                     rank 0        rank 1        rank 2        rank 3          sp_size=2 over 4 ranks
    tokens of row    A[0:S/2]      A[S/2:S]      B[0:S/2]      B[S/2:S]
    process_index    0             0             1             1               num_processes 2
    loader gives     row A         row A         row B         row B           whole rows; hooks shard them
    gather takes     yes           -             yes           -               a group counts once
    weights          1/4           1/4           1/4           1/4             FSDP2 over all ranks

`adopt` replaces the class of one Accelerator instance by a subclass with `UlyssesMethods` before its own class; no class
is patched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from ithaca.errors import MeshError, UnsupportedError
from ithaca.handle import handle_of
from ithaca.integrations.accelerate_state import checkpoint_plugin
from ithaca.integrations.late_logits import value_of
from ithaca.integrations.preparation import Preparation
from ithaca.integrations.settings import Settings
from ithaca.integrations.targets import LabelMasker
from ithaca.integrations.trainers import naming_sharded_weights
from ithaca.mesh import Mesh
from ithaca.state.weights.equal_weights import differing_of, digest


def adopt(accelerator: Any, mesh: Mesh, settings: Settings) -> None:
    """Make the processes of this Accelerator sequence groups; refuse settings that cannot be combined with that."""
    _refuse(accelerator, mesh)
    bf16 = accelerator.mixed_precision == "bf16"
    accelerator.ulysses = Preparation(mesh, settings, torch.bfloat16 if bf16 else None)
    own = type(accelerator)
    if not issubclass(own, UlyssesMethods):
        accelerator.__class__ = type(f"Ulysses{own.__name__}", (UlyssesMethods, own), {"__module__": own.__module__})
    if accelerator.shards_weights:
        accelerator.state.fsdp_plugin = checkpoint_plugin()


def _refuse(accelerator: Any, mesh: Mesh) -> None:
    state = accelerator.state
    if state.num_processes != mesh.world:
        raise MeshError(
            f"accelerate takes this for {state.num_processes} process of {mesh.world} that were started: on a machine "
            "without GPUs it has to be told, by use_cpu=True in the training arguments or Accelerator(cpu=True)"
        )
    if state.distributed_type == DistributedType.DEEPSPEED:
        raise UnsupportedError("DeepSpeed is set up beside UlyssesConfig, which needs none: leave deepspeed out")
    if state.distributed_type == DistributedType.FSDP and not isinstance(accelerator, UlyssesMethods):
        raise UnsupportedError("fsdp is set up beside UlyssesConfig, which shards the weights itself: leave fsdp out")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(f"mixed_precision={accelerator.mixed_precision!r}: use 'bf16' or 'no'")
    if state.dynamo_plugin.backend.value.lower() != "no":
        raise UnsupportedError("torch_compile=True: Ithaca compiles token-wise work on GPUs itself, leave it out")


class UlyssesMethods:
    """Methods and properties that replace accelerate's own, as the first base class."""

    ulysses: Preparation
    state: Any
    dataloader_config: Any
    flag_tensor: Tensor | None
    use_seedable_sampler: bool
    _models: list[Any]

    @property
    def shards_weights(self) -> bool:
        """True if the parameters are FSDP2's, which one process without mixed precision does not need."""
        return self.ulysses.mesh.world > 1 or self.ulysses.compute_dtype is not None

    @property
    def num_processes(self) -> int:
        """Number of sequence groups, over which loaders divide batches and by which Trainer multiplies its loss."""
        return self.ulysses.mesh.dp

    @property
    def process_index(self) -> int:
        """Number of this rank's sequence group, so that a sampler gives all ranks of a group the same rows."""
        return self.ulysses.mesh.dp_rank

    @property
    def is_last_process(self) -> bool:
        return bool(self.state.is_last_process)

    @property
    def distributed_type(self) -> Any:
        return DistributedType.FSDP if self.shards_weights else self.state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        return self.shards_weights

    @property
    def dispatch_batches(self) -> bool:
        """False: with one reader that hands out slices, ranks of a group would get different rows."""
        if self.dataloader_config.dispatch_batches:
            raise UnsupportedError("dispatch_batches=True hands ranks of one sequence different rows: leave it unset")
        return False

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models first, since an optimizer takes their sharded parameters; schedulers last."""
        upper: Any = super()
        places: list[Any] = [None] * len(args) if device_placement is None else device_placement
        done: dict[int, Any] = {}
        for at, thing in enumerate(args):
            if isinstance(thing, nn.Module):
                done[at] = self.prepare_model(thing)
        for first in (True, False):
            for at, thing in enumerate(args):
                if not isinstance(thing, nn.Module):
                    done[at] = upper._prepare_one(done.get(at, thing), first_pass=first, device_placement=places[at])
        result = tuple(done[at] for at in range(len(args)))
        for thing in result:
            if hasattr(thing, "__dict__") and not isinstance(thing, nn.Module):
                thing._is_accelerate_prepared = True
        return result if len(result) > 1 else result[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not any(model is known for known in self._models):
            self._models.append(self.ulysses.model(model))
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        upper: Any = super()
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            self.ulysses.optimizer(optimizer)
        # The state is on its parameters' device already; accelerate would load the state again to move it.
        return upper.prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        upper: Any = super()
        prepared = upper.prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler and not prepared.split_batches:
            prepared.__class__ = GroupScheduler
            prepared.groups = self.num_processes
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **kwargs: Any) -> Any:
        upper: Any = super()
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return upper.prepare_data_loader(data_loader, device_placement, **kwargs)
        self._share_order(data_loader)
        collate = data_loader.collate_fn
        # accelerate makes a new loader from this loader's attributes; this loader stays as it was.
        data_loader.collate_fn = LabelMasker(collate)
        try:
            return upper.prepare_data_loader(data_loader, device_placement, **kwargs)
        finally:
            data_loader.collate_fn = collate

    def _prepare_device_mesh(self) -> None:
        """Return no mesh: with a mesh a loader would divide `process_index` by the ranks of a group again."""

    def _share_order(self, loader: DataLoader[Any]) -> None:
        """Seed a loader's shuffle equally on all ranks; accelerate does not for a single data-parallel process.

        Ranks with equal seeds draw the same order as one process already, and keep it.
        """
        sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
        if getattr(sampler, "generator", 0) is not None or self.use_seedable_sampler:
            return
        mesh = self.ulysses.mesh
        if mesh.dp == 1 and not differing_of([digest(torch.get_rng_state().numpy().tobytes())], mesh):
            return
        seed = torch.empty((), dtype=torch.int64).random_().to(self.ulysses.mesh.device)
        dist.broadcast(seed, src=0)
        sampler.generator = torch.Generator().manual_seed(int(seed))  # type: ignore[union-attr]

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split inputs between sequence groups, where accelerate's own method splits between ranks."""
        groups = SimpleNamespace(
            num_processes=self.num_processes, process_index=self.process_index, device=self.ulysses.mesh.device
        )
        with PartialState.split_between_processes(groups, inputs, apply_padding) as mine:
            yield mine

    def gather(self, tensor: Any) -> Any:
        """Gather from the first rank of every group, since all ranks of a group hold the same."""
        upper: Any = super()
        mesh, tensor = self.ulysses.mesh, tree_map(value_of, tensor)
        return upper.gather(tensor) if mesh.shards == 1 else _first_of_groups(upper.gather(tensor), mesh)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        upper: Any = super()
        if use_gather_object or not _all_tensors(input_data):
            mine = input_data if self.ulysses.mesh.sequence_rank == 0 else []
            return upper.gather_for_metrics(mine, use_gather_object=True)
        return upper.gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        upper: Any = super()
        mine = reduction != "sum" or self.ulysses.mesh.sequence_rank == 0
        return upper.reduce(tensor if mine else _zeroed(tensor), reduction, scale)

    def check_trigger(self) -> bool:
        """Check the flag of every rank; `num_processes` would count the groups only."""
        upper: Any = super()
        flag = torch.tensor(0, device=self.ulysses.mesh.device) if self.flag_tensor is None else self.flag_tensor
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.flag_tensor = flag
        return bool(upper.check_trigger())

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        upper: Any = super()
        return upper.pad_across_processes(tree_map(value_of, tensor), dim, pad_index, pad_first)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward; an out-of-memory error gets the memory by kind."""
        upper: Any = super()
        handle = handle_of(self._models[-1]) if self._models else None
        with nullcontext() if handle is None else handle.accounting(), naming_sharded_weights():
            upper.backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep on reducing gradients: unreduced gradients would take the whole model's size on each rank."""
        yield


class GroupScheduler(AcceleratedScheduler):
    """A scheduler that steps once for every sequence group, where accelerate's own steps for every rank."""

    groups: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.groups):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)


def _first_of_groups(gathered: Any, mesh: Mesh) -> Any:
    if isinstance(gathered, Tensor):
        return gathered.unflatten(0, (mesh.world, -1))[:: mesh.shards].flatten(0, 1)
    return _map_nested(gathered, lambda part: _first_of_groups(part, mesh))


def _zeroed(nested: Any) -> Any:
    return torch.zeros_like(nested) if isinstance(nested, Tensor) else _map_nested(nested, _zeroed)


def _map_nested(nested: Any, change: Any) -> Any:
    if isinstance(nested, dict):
        return type(nested)({key: change(value) for key, value in nested.items()})
    if isinstance(nested, list | tuple):
        return type(nested)([change(value) for value in nested])
    return nested


def _all_tensors(nested: Any) -> bool:
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        return all(_all_tensors(value) for value in nested)
    return isinstance(nested, Tensor)
