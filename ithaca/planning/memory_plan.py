"""What a plan is made for, what is decided of it beforehand and what it says: `Job`, `Decided`, `MemoryPlan`, plain numbers.

Per decoder layer one mode:

    keep       nothing is run again, all that the autograd graph needs stays. Where the MLP runs in one tile
               (`mlp_tile` is the whole shard) its activations stay too; otherwise each tile is run again.
    save       the layer's input, the attention output and its lse are saved; token-wise work is run again
    rebuild    attention output and lse are saved; the input is made again from the last layer that saved its own.
               Such a chain is rebuilt in one go, its inputs held until their layers' backward; where its first
               layer is "recompute", the attention run for the rebuilding serves that layer's backward too.
    recompute  the layer's input is saved; attention runs twice
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from ithaca.arguments import named_arguments
from ithaca.errors import MemoryPlanError

LayerMode = Literal["keep", "save", "rebuild", "recompute"]
Optimizer = Literal["adamw", "adamw8bit", "bf16_sr", "none"]
Weights = Literal["shard", "replicate", "none"]
MODES: tuple[LayerMode, ...] = get_args(LayerMode)
# How large the pieces are that are worked on at once.
PIECES = ("mlp_tile", "loss_tile", "head_groups")
# What of a plan may be decided by hand.
CHOICES = ("layers", "offload", *PIECES)


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's share of a step. `length` is the whole sequence, `batch` the rows of one sequence group, which is cut
    into `sp` x `ring` shards.

    `weights`: "shard" (FSDP2 over the world, or over world / `replicas`), "replicate", or "none" (the model's own
    parameters, nothing gathered). `gradient_bytes`: of what is trained, and of its gradient. `adapter_bytes`: of what
    adapters compute with. `accumulate`: gradients of earlier micro-batches exist when a step begins. `fused`: token-wise
    work is compiled, and keeps less. `loss_in_place`: logits become their gradient where they are.
    `whole_logits`: the head does more than its weight says, and is not tiled.
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
        """Over how many ranks one copy of the weights is spread."""
        return self.world // self.replicas if self.weights == "shard" else 1

    @property
    def gathers(self) -> bool:
        """FSDP2 copies a layer's weights to use them, even where one rank has them all."""
        return self.weights != "none" or self.weights_on_host

    @property
    def tokens(self) -> int:
        """Tokens of one rank's shard, all rows: B * L."""
        return self.batch * -(-self.length // (self.sp * self.ring))

    @property
    def whole(self) -> int:
        """Tokens that a rank has queries of while it attends, padding included: B * S, of a ring its share."""
        return self.tokens * self.sp


def layers_from_roots(modes: Sequence[LayerMode]) -> tuple[int, ...]:
    """Return the number of layers between each layer and the root its input is rebuilt from; 0 where its own input is saved."""
    return tuple(accumulate(modes, lambda behind, mode: behind + 1 if mode == "rebuild" else 0, initial=0))[1:]


@named_arguments
@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is saved where, layer by layer, and how large the pieces are that are worked on at once."""

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
        """One line: '12 save, 20 recompute; 20 offloaded; MLP tile 2048, loss tile 2048, 1 head group'."""
        counts = Counter(self.layers)
        modes = ", ".join(f"{counts[mode]} {mode}" for mode in MODES if counts[mode])
        groups = "1 head group" if self.head_groups == 1 else f"{self.head_groups} head groups"
        return f"{modes}; {sum(self.offload)} offloaded; MLP tile {self.mlp_tile}, loss tile {self.loss_tile}, {groups}"


@dataclass(frozen=True, slots=True)
class Decided:
    """What of a plan is decided by hand; None is left to the choice.

    One mode or flag is for every layer; offload=True for every layer that saves something.
    """

    layers: LayerMode | tuple[LayerMode, ...] | None = None
    offload: bool | tuple[bool, ...] | None = None
    mlp_tile: int | None = None
    loss_tile: int | None = None
    head_groups: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Decided:
        """From the names above, as a caller or a run file has them."""
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
        """What is decided."""
        return tuple(name for name in CHOICES if getattr(self, name) is not None)

    def modes(self, count: int) -> tuple[LayerMode, ...] | None:
        """Of every one of `count` layers."""
        return (self.layers,) * count if isinstance(self.layers, str) else self.layers

    def flags(self, modes: Sequence[LayerMode]) -> tuple[bool, ...] | None:
        """Which of layers under these modes are offloaded; None where what is decided and a mode exclude each other."""
        if isinstance(self.offload, tuple):
            clash = any(flag and mode == "keep" for flag, mode in zip(self.offload, modes, strict=True))
            return None if clash else self.offload
        return tuple(bool(self.offload) and mode != "keep" for mode in modes)

    def spread(self, count: int) -> Decided:
        """The same for a model of `count` layers, which must be as many as are named."""
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
