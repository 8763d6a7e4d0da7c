"""`Binding`: all that is on one parallelized model, and what its forward pass in flight needs.

`binding.py` makes one and takes it off. It lies on every module that holds a config, under the name `MARK`, so that
attention, layers and head find it without a registry, and `binding_of` finds it in whatever wraps the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import OutOfMemoryError, Tensor, nn
from transformers import PreTrainedModel

from ithaca.arguments import shown
from ithaca.attention.kernels import AttentionSpec, choose
from ithaca.attention.tape import AttentionCall
from ithaca.errors import NOT_PICKLED, MeshError, UnsupportedError
from ithaca.heads import split_heads
from ithaca.memory.random_state import ShardRng
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.experts import has_experts
from ithaca.models.layers.hooks import ShownToHooks
from ithaca.models.layers.module_attributes import dropping
from ithaca.models.placed import Placed
from ithaca.models.refusals.calls import checkpoints
from ithaca.sequence.layout import SequenceLayout

NAME = "ithaca"
LAYOUT = "sequence_layout"
MARK = "_ithaca_binding"
logger = logging.getLogger("ithaca")


class Installed(Protocol):
    """What else is installed on a bound model; see layers.py."""

    @property
    def tiles_head(self) -> bool: ...

    @property
    def layers(self) -> Sequence[Any]: ...

    def begin(self, layout: SequenceLayout | None = None) -> None: ...

    def note_parts(self) -> None: ...

    def refuse_replaced(self) -> None: ...

    def remove(self) -> None: ...

    def out_of_memory(self, error: OutOfMemoryError) -> OutOfMemoryError: ...


class Reduction(Protocol):
    """How gradients are reduced over ranks; see state/weights/placement.py."""

    def choose(self, *, summed: bool) -> None: ...


@dataclass(eq=False)
class Binding:
    """What is installed on one model, and what its forward pass in flight needs."""

    model: PreTrainedModel
    mesh: Mesh
    kernel: str
    layers: int
    configs: dict[Any, Any]
    call: AttentionCall | None = None
    groups: int = 1
    memory: Installed | None = None
    reduction: Reduction | None = None
    router_logits: list[Tensor] = field(default_factory=list)
    calls: int = 0

    positions: int | None = None
    averages: bool = False
    sharded: bool = True
    takes_kwargs: bool = True
    handles: list[Any] = field(default_factory=list)
    shown: ShownToHooks | None = None
    rng: ShardRng | None = None
    placed: Placed | None = None
    announced: set[AttentionSpec] = field(default_factory=set)
    warned_of_labels: bool = False

    @property
    def original_attention(self) -> str:
        return self.configs[self.model]._attn_implementation or "sdpa"

    @property
    def needs_reduction(self) -> bool:
        """Whether the mean of a rank's own tokens is not what its gradients go by: alone, or under a wrapper that
        averages over ranks with rows of their own, it is."""
        return self.sharded and self.mesh.world > 1 and not (self.averages and self.mesh.shards == 1)

    @property
    def replays(self) -> bool:
        """Whether a pass made now runs layers again in its backward."""
        ours = self.memory is not None and any(layer.mode != "keep" for layer in self.memory.layers)
        return ours or checkpoints(self.model)

    def warn_of_labels(self, unlearned: int) -> None:
        """Say once that labels are left out which transformers would learn."""
        if unlearned and not self.warned_of_labels:
            self.warned_of_labels = True
            logger.warning(
                "%d labels of this batch stand on padding or on a document's first token and are not learned, where "
                "transformers alone would learn them: set them to -100 for the same loss in both",
                unlearned,
            )

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Running out of memory in here is told with what held it."""
        try:
            yield
        except OutOfMemoryError as error:
            if self.memory is None:
                raise
            raise self.memory.out_of_memory(error) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce__(self) -> Any:
        raise UnsupportedError(NOT_PICKLED)

    def begin_drawing(self) -> None:
        """Let this shard draw random numbers of its own until the pass ends."""
        self.end_drawing()
        if self.mesh.shards > 1:
            self.rng = ShardRng(self.mesh.device, self.mesh.sequence_rank)

    def end_drawing(self) -> None:
        rng, self.rng = self.rng, None
        if rng is not None:
            # A rank none of whose tokens chose an expert with a dropout drew nothing, where others did.
            rng.end(drew=has_experts(self.model.config) and dropping(self.model) is not None)

    def announce(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKE: Tensor, spec: AttentionSpec) -> None:
        """Say once for every kind of attention in the model, on rank 0, which kernel runs it."""
        if spec in self.announced:
            return
        self.announced.add(spec)
        kernel = choose(self.kernel, q_BLHD, v_BLKE, spec).name
        heads = [end - start for start, end in split_heads(q_BLHD.shape[2], k_BLKD.shape[2], self.mesh.sp).q]
        if self.mesh.rank == 0:
            window = f", window {spec.window}" if spec.window else ""
            logger.info("attention%s: %s kernel, %s, heads per rank %s", window, kernel, self.mesh, heads)


def binding_of(model: nn.Module) -> Binding:
    """The binding of a model or of what it wraps (PEFT, DDP)."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"the model is {shown(model)}: pass what ithaca.parallelize returned")
    for module in model.modules():
        if MARK in module.__dict__:
            binding: Binding = module.__dict__[MARK]
            return binding
    raise UnsupportedError(f"{type(model).__name__} is not parallelized: call ithaca.parallelize(model, mesh) first")


def is_bound(model: nn.Module) -> bool:
    return any(MARK in module.__dict__ for module in model.modules())


def check_same_mesh(bound: Mesh, mesh: Mesh) -> None:
    """Refuse a mesh that is not the one of `parallelize`."""
    check_mesh(mesh)
    if mesh.degrees != bound.degrees:
        raise MeshError(f"mesh is {mesh}, the model was parallelized over {bound}: pass the same mesh to both")
