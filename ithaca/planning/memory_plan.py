"""A job, the user's decisions and the memory plan made of them, in plain numbers: `Job`, `Decided`, `MemoryPlan`.

    MemoryPlan(layers=("save", "rebuild"), offload=(True, False), mlp_tile=2048, loss_tile=4096)

Every decoder layer has one mode:

    keep       no activation checkpointing: everything that the autograd graph needs stays. An MLP in one tile (`mlp_tile`
               is the whole shard) keeps its activations too; otherwise each tile runs again.
    save       checkpointing that saves attention: input, attention output and lse stay; token-wise work runs again
    rebuild    attention output and lse stay; the input is made again from the last layer that saved its own, the root.
               Such a chain is rebuilt at once, and its inputs stay until their layers' backward. Where the root is
               "recompute", the attention that runs for the rebuilding serves the root's backward too.
    recompute  full activation checkpointing: the input stays; attention runs twice
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from ithaca.arguments import named_arguments
from ithaca.errors import MemoryPlanError

LayerMode = Literal["keep", "save", "rebuild", "recompute"]
Optimizer = Literal["adamw", "adamw8bit", "bf16_sr", "none"]
Weights = Literal["shard", "replicate", "none"]
MODES: tuple[LayerMode, ...] = get_args(LayerMode)
# Sizes of what is computed at once.
PIECES = ("mlp_tile", "loss_tile", "head_groups")
# What a user may decide of a plan.
CHOICES = ("layers", "offload", *PIECES)


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's share of a step: `batch` rows of `length` tokens for a sequence group of `sp` x `ring` ranks.

    `weights`: "shard" (FSDP2 over the world, or over world / `replicas`), "replicate", or "none" (the model's own
    parameters, nothing gathered). `gradient_bytes`: of a trained value and of its gradient. `adapter_bytes`: of a value
    that adapters compute. `accumulate`: gradient accumulation, gradients exist when the step begins. `fused`: token-wise
    work is compiled, and saves less. `loss_in_place`: the gradient of the logits is written over them. `whole_logits`:
    the head is more than a linear map, and is not tiled.
    """

    length: int
    batch: int = 1
    sp: int = 1
    dp: int = 1
    ring: int = 1
    weights: Weights = "shard"
    replicas: int = 1
    weight_bytes: int = 2
    compute_bytes: int = 2
    gradient_bytes: int = 2
    adapter_bytes: int = 2
    optimizer: Optimizer = "adamw"
    accumulate: bool = False
    fused: bool = True
    loss_in_place: bool = False
    whole_logits: bool = False
    weights_on_host: bool = False
    gradients_on_host: bool = False
    optimizer_on_host: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "batch", "sp", "dp", "ring", "replicas"):
            if getattr(self, name) < 1:
                raise MemoryPlanError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.world % self.replicas:
            raise MemoryPlanError(f"replicas={self.replicas} over {self.world} ranks: a divisor of the world is needed")
        for name, kinds in (("optimizer", Optimizer), ("weights", Weights)):
            if getattr(self, name) not in get_args(kinds):
                raise MemoryPlanError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(get_args(kinds))}")

    @property
    def world(self) -> int:
        return self.sp * self.dp * self.ring

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.world // self.replicas if self.weights == "shard" else 1

    @property
    def gathers(self) -> bool:
        """True if FSDP2 gathers a layer's weights; one rank that has them all copies them too."""
        return self.weights != "none" or self.weights_on_host

    @property
    def tokens(self) -> int:
        """Tokens of one rank's shard in all rows: B * L."""
        return self.batch * -(-self.length // (self.sp * self.ring))

    @property
    def whole(self) -> int:
        """Tokens whose queries a rank has during attention, padding included: B * S, or a ring's share of B * S."""
        return self.tokens * self.sp


def layers_from_roots(modes: Sequence[LayerMode]) -> tuple[int, ...]:
    """Return the number of layers between each layer and the root its input is rebuilt from; 0 where its own input is saved."""
    behind, found = 0, []
    for mode in modes:
        behind = behind + 1 if mode == "rebuild" else 0
        found.append(behind)
    return tuple(found)


@named_arguments
@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The mode of every layer, the layers to offload, and the sizes of tiles and head groups."""

    layers: tuple[LayerMode, ...]
    offload: tuple[bool, ...]
    mlp_tile: int
    loss_tile: int
    head_groups: int = 1

    def __post_init__(self) -> None:
        for name, example in (("layers", "('save', 'recompute')"), ("offload", "(True, False)")):
            if not isinstance(value := getattr(self, name), tuple | list):
                raise MemoryPlanError(f"{name}={value!r}: one entry a layer is needed, such as {example}")
        _check_modes(self.layers)
        _check_flags(self.offload)
        _check_pairs(self.layers, self.offload)
        for name in PIECES:
            _check_piece(name, getattr(self, name))

    @property
    def chain(self) -> tuple[int, ...]:
        """Layers between each layer and the root its input is rebuilt from; 0 where its own input is saved."""
        return layers_from_roots(self.layers)

    def summary(self) -> str:
        """Return one line: '12 save, 20 recompute; 20 offloaded; MLP tile 2048, loss tile 2048, 1 head group'."""
        counts = Counter(self.layers)
        modes = ", ".join(f"{counts[mode]} {mode}" for mode in MODES if counts[mode])
        groups = "1 head group" if self.head_groups == 1 else f"{self.head_groups} head groups"
        return f"{modes}; {sum(self.offload)} offloaded; MLP tile {self.mlp_tile}, loss tile {self.loss_tile}, {groups}"


@dataclass(frozen=True, slots=True)
class Decided:
    """The user's decisions about a plan; the search decides what is None.

    One mode or flag holds for every layer; offload=True for every layer that is not kept.
    """

    layers: LayerMode | tuple[LayerMode, ...] | None = None
    offload: bool | tuple[bool, ...] | None = None
    mlp_tile: int | None = None
    loss_tile: int | None = None
    head_groups: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Decided:
        """Return the decisions in a mapping, as a caller or a run file has them."""
        for name in given:
            if name not in CHOICES:
                raise MemoryPlanError(
                    f"{name!r} is nothing to decide of a memory plan: choose among {', '.join(CHOICES)}"
                )
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
        return cls(**values)

    def __post_init__(self) -> None:
        layers, offload = self.layers, self.offload
        if layers is not None:
            if not isinstance(layers, str | tuple):
                raise MemoryPlanError(f"layers={layers!r}: a mode, or one a layer, is needed, such as 'save'")
            _check_modes((layers,) if isinstance(layers, str) else layers)
        if offload is not None:
            _check_flags(offload if isinstance(offload, tuple) else (offload,))
        if isinstance(layers, tuple) and isinstance(offload, tuple):
            _check_pairs(layers, offload)
        elif offload is True and layers is not None and set(self.modes(1) or ()) == {"keep"}:
            raise MemoryPlanError(
                "every layer keeps everything and is to be offloaded: use layers='save' or offload=False"
            )
        for name in PIECES:
            if getattr(self, name) is not None:
                _check_piece(name, getattr(self, name))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the decisions."""
        return tuple(name for name in CHOICES if getattr(self, name) is not None)

    def modes(self, count: int) -> tuple[LayerMode, ...] | None:
        """Return the decided modes of `count` layers; None if modes are left to the search."""
        return (self.layers,) * count if isinstance(self.layers, str) else self.layers

    def flags(self, modes: Sequence[LayerMode]) -> tuple[bool, ...] | None:
        """Return the layers to offload under these modes; None if a kept layer is to be offloaded."""
        if isinstance(self.offload, tuple):
            clash = any(flag and mode == "keep" for flag, mode in zip(self.offload, modes, strict=True))
            return None if clash else self.offload
        return tuple(bool(self.offload) and mode != "keep" for mode in modes)

    def spread(self, count: int) -> Decided:
        """Return the decisions with a mode for each of `count` layers, of which tuples must have as many entries."""
        for name, given in (("layers", self.layers), ("offload", self.offload)):
            if isinstance(given, tuple) and len(given) != count:
                raise MemoryPlanError(
                    f"{name} has {len(given)} entries, the model {count} layers: give one a layer, or one"
                )
        return replace(self, layers=self.modes(count))


# A plan that is left to the search altogether.
UNDECIDED = Decided()


def _check_modes(modes: Sequence[LayerMode]) -> None:
    for mode in modes:
        if mode not in MODES:
            raise MemoryPlanError(f"layer mode {mode!r}: choose among {', '.join(MODES)}")
    for before, mode in pairwise(("keep", *modes)):
        if mode == "rebuild" and before == "keep":
            raise MemoryPlanError(
                'a "rebuild" layer must follow a layer that is "save", "recompute" or "rebuild", and the first layer '
                'follows none: begin with "save" (layers=("save", "rebuild", ...))'
            )


def _check_flags(flags: Sequence[bool]) -> None:
    for flag in flags:
        if not isinstance(flag, bool):
            raise MemoryPlanError(f"offload flag {flag!r}: True or False is needed")


def _check_pairs(modes: Sequence[LayerMode], flags: Sequence[bool]) -> None:
    if len(modes) != len(flags):
        raise MemoryPlanError(f"{len(modes)} layer modes, {len(flags)} offload flags: one each is needed")
    for index, (mode, flag) in enumerate(zip(modes, flags, strict=True)):
        if mode == "keep" and flag:
            raise MemoryPlanError(
                f"layer {index} keeps everything and is to be offloaded: what autograd keeps stays on the device, use "
                '"save" or False'
            )


def _check_piece(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MemoryPlanError(f"{name}={value!r}: a whole number of at least 1 is needed")
