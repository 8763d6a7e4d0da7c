"""`Binding`: the part of a model's handle that its attention, layers and head ask in a forward pass.

`binding.py` makes one. The handle hangs on every module that holds a config, so that attention finds it without a
registry, and `binding_of` finds it in whatever wraps the model. `unsharded` has the model run whole sequences for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.arguments import named_arguments, shown
from ithaca.attention.kernels import AttentionSpec, choose
from ithaca.attention.tape import AttentionCall
from ithaca.errors import MeshError, UnsupportedError
from ithaca.handle import Handle, handle_of
from ithaca.heads import split_heads
from ithaca.memory.random_state import ShardRng
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.experts import has_experts
from ithaca.models.layers.hooks import ShownToHooks
from ithaca.models.layers.installed import Installed
from ithaca.models.layers.module_attributes import dropping
from ithaca.models.refusals.calls import checkpoints
from ithaca.state.weights.placement import Placement

NAME = "ithaca"
LAYOUT = "sequence_layout"
logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class Binding:
    """What a forward pass of one model needs, and the pass in flight. `configs`: every module's config before."""

    handle: Handle
    model: PreTrainedModel
    kernel: str
    layers: int
    configs: dict[Any, Any]
    positions: int | None = None
    takes_kwargs: bool = True
    shown: ShownToHooks | None = None
    sharded: bool = True

    call: AttentionCall | None = None
    calls: int = 0
    router_logits: list[Tensor] = field(default_factory=list)
    rng: ShardRng | None = None
    announced: set[AttentionSpec] = field(default_factory=set)
    warned_of_labels: bool = False

    @property
    def mesh(self) -> Mesh:
        return self.handle.mesh

    @property
    def memory(self) -> Installed | None:
        """What runs layers and head, None where memory is left to autograd."""
        return self.handle.part(Installed)

    @property
    def placement(self) -> Placement | None:
        return self.handle.part(Placement)

    @property
    def averages(self) -> bool:
        """True if gradients are averaged over ranks after backward, by a wrapper of the caller's."""
        return self.placement is None

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
    handle = handle_of(model)
    binding = None if handle is None else handle.part(Binding)
    if binding is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not parallelized: call ithaca.parallelize(model, mesh) first"
        )
    return binding


@named_arguments
@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs whole sequences on every rank with its original attention.

    Gradients are then the mean over ranks. Backward may come after the `with`, unless layers are run again in it.
    """
    binding = binding_of(model)
    before = binding.sharded
    name = binding.original_attention
    binding.sharded = False
    _set_attention(binding, name)
    try:
        yield
    finally:
        binding.sharded = before
        _set_attention(binding, NAME if before else name)


def _set_attention(binding: Binding, name: str) -> None:
    for module in binding.configs:
        module.config._attn_implementation = name


def check_same_mesh(bound: Mesh, mesh: Mesh) -> None:
    """Refuse a mesh that is not the one of `parallelize`."""
    check_mesh(mesh)
    if mesh.degrees != bound.degrees:
        raise MeshError(f"mesh is {mesh}, the model was parallelized over {bound}: pass the same mesh to both")
