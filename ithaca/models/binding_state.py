"""`Binding`: the state of a bound model, which its attention, layers and head read in a forward pass.

`binding.py` makes one; it is a part of the model's handle, which hangs on every module that holds a config. So attention
finds it without a registry, and `binding_of` finds it inside any wrapper. `unsharded` runs whole sequences for a while.
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
from ithaca.models.layers.hooks import CopyingHooks
from ithaca.models.layers.installed_state import Installed
from ithaca.models.layers.module_attributes import dropping
from ithaca.models.refusals.calls import checkpoints
from ithaca.models.refusals.foreign_code import refuse_forward_put_on_later
from ithaca.state.weights.placement import Placement

NAME = "ithaca"
# Keyword arguments: a SequenceLayout from the caller to the model, an AttentionCall from the model to its attention.
LAYOUT = "sequence_layout"
CALL = "attention_call"
logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class Binding:
    """State of a bound model and of its forward pass in progress.

    `layers`: number of layers. `configs`: every module's config before. `forwards`: modules with a forward of the user's
    own, from `foreign_forwards`. `positions`: size of the table of learned
    positions. `attended`: attention calls of this pass. `shown`: copies of tensors for the caller's hooks.
    """

    handle: Handle
    model: PreTrainedModel
    kernel: str
    layers: int
    configs: dict[Any, Any]
    forwards: dict[nn.Module, set[str]] = field(default_factory=dict)
    positions: int | None = None
    takes_kwargs: bool = True
    copying_hooks: CopyingHooks | None = None
    sharded: bool = True

    call: AttentionCall | None = None
    attended: int = 0
    router_logits: list[Tensor] = field(default_factory=list)
    rng: ShardRng | None = None
    logged_kernels: set[AttentionSpec] = field(default_factory=set)
    warned_of_labels: bool = False

    @property
    def mesh(self) -> Mesh:
        return self.handle.mesh

    @property
    def memory(self) -> Installed | None:
        """The part that runs layers and head; None with `memory=None`, where plain autograd does."""
        return self.handle.part(Installed)

    @property
    def placement(self) -> Placement | None:
        """The placement of sharded weights; None with `weights="none"`."""
        return self.handle.part(Placement)

    @property
    def averages(self) -> bool:
        """True if a wrapper of the caller's averages gradients over ranks after backward."""
        return self.placement is None

    @property
    def original_attention(self) -> str:
        return self.configs[self.model]._attn_implementation or "sdpa"

    @property
    def needs_reduction(self) -> bool:
        """True if the mean over a rank's own tokens has the wrong gradient, and must be reduced over ranks.

        One process needs no reduction, nor does a wrapper that averages over ranks with whole rows of their own.
        """
        return self.sharded and self.mesh.world > 1 and not (self.averages and self.mesh.shards == 1)

    @property
    def replays(self) -> bool:
        """True if a forward pass made now recomputes layers in its backward."""
        ours = self.memory is not None and any(layer.mode != "keep" for layer in self.memory.layers)
        return ours or checkpoints(self.model)

    def refuse_changed(self) -> None:
        """Raise UnsupportedError if modules, settings or forwards changed since the model was parallelized."""
        if self.memory is not None:
            self.memory.refuse_replaced()
        if self.sharded and self.mesh.shards > 1:
            refuse_forward_put_on_later(self.model, self.forwards)

    def warn_of_labels(self, unlearned: int) -> None:
        """Warn once of labels that are left out here and that transformers would train on."""
        if unlearned and not self.warned_of_labels:
            self.warned_of_labels = True
            logger.warning(
                "%d labels of this batch stand on padding or on a document's first token and are not learned, where "
                "transformers alone would learn them: set them to -100 for the same loss in both",
                unlearned,
            )

    def begin_drawing(self) -> None:
        """Give this shard random numbers of its own until the forward pass ends."""
        self.end_drawing()
        if self.mesh.shards > 1:
            self.rng = ShardRng(self.mesh.device, self.mesh.sequence_rank)

    def end_drawing(self) -> None:
        """Restore the random generators, to the same state on all ranks of a sequence group."""
        rng, self.rng = self.rng, None
        if rng is not None:
            # With dropout in experts, a rank whose tokens chose none of them drew nothing, and other ranks drew.
            rng.end(drew=has_experts(self.model.config) and dropping(self.model) is not None)

    def log_kernel(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKE: Tensor, spec: AttentionSpec) -> None:
        """Log the kernel of each kind of attention in the model, once and on rank 0."""
        if spec in self.logged_kernels:
            return
        self.logged_kernels.add(spec)
        # Chosen on every rank, so that a kernel that cannot run is refused on every rank.
        kernel = choose(self.kernel, q_BLHD, v_BLKE, spec).name
        heads = [end - start for start, end in split_heads(q_BLHD.shape[2], k_BLKD.shape[2], self.mesh.sp).q]
        if self.mesh.rank == 0:
            window = f", window {spec.window}" if spec.window else ""
            logger.info("attention%s: %s kernel, %s, heads per rank %s", window, kernel, self.mesh, heads)


def binding_of(model: nn.Module) -> Binding:
    """Return the binding of a model, or of the model inside a wrapper (PEFT, DDP)."""
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
    """Run whole sequences on every rank with the model's original attention, inside the `with`.

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
