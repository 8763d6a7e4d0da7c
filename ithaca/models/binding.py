"""Binding: a Hugging Face model's attention goes through Ulysses, on that model alone.

transformers looks an attention function up by the name in `config._attn_implementation`. Binding registers one
function under a name of our own, gives the model its own copy of its config with that name set, and leaves a
`Binding` on every module that holds a config. Nothing else changes: weights, classes and other models built from
the same config object are untouched, and `unbind` puts the original config objects back.

The `SequenceLayout` travels as a model kwarg; for architectures that do not pass kwargs down to their attention
it is read off the `Binding`, which holds it for the time of one forward pass.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import OutOfMemoryError, Tensor, is_grad_enabled, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.attention.anchored import AttentionCall
from ithaca.attention.heads import split_heads
from ithaca.attention.kernels import AttentionSpec, choose
from ithaca.attention.ulysses import attend_sharded
from ithaca.errors import NOT_PICKLED, MeshError, UnsupportedError
from ithaca.memory.rng import ShardRng
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.alone import watch_parts
from ithaca.models.draws import watch_rates
from ithaca.models.experts import has_experts, wants_auxiliary_loss
from ithaca.models.generate import WholeGenerate
from ithaca.models.handed_out import mark_output, with_gradient_times
from ithaca.models.hooks import ShownToHooks
from ithaca.models.learned_positions import learned_positions, refuse_beyond_table
from ithaca.models.not_taken import check_call, checkpoints, refuse_arguments, refuse_autocast, refuse_checkpointing
from ithaca.models.rope import pin_length
from ithaca.models.settings import dropping
from ithaca.sequence.layout import SequenceLayout

NAME = "ithaca"
LAYOUT = "sequence_layout"
_BINDING = "_ithaca_binding"
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
    """How gradients are reduced over ranks; see state/weights.py."""

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
    announced: set[AttentionSpec] = field(default_factory=set)

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


def bind(model: PreTrainedModel, mesh: Mesh, *, kernel: str = "auto") -> Binding:
    """Route this model's attention through Ulysses; `unbind` undoes it."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    copies: dict[int, Any] = {}
    configs = {module: module.config for module in model.modules() if getattr(module, "config", None) is not None}
    layers = model.config.get_text_config().num_hidden_layers
    signature = inspect.signature(model.forward)
    binding = Binding(model, mesh, kernel, layers, configs, positions=learned_positions(model))
    binding.takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for module, config in configs.items():
        # One memo for all: modules that shared a config (or a part of it) still do.
        module.config = copy.deepcopy(config, copies)
        module.__dict__[_BINDING] = binding
    model.config._attn_implementation = NAME
    for module in configs:
        module.config._attn_implementation = NAME
    binding.handles += [
        model.register_forward_pre_hook(_enter, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
        *watch_rates(model),
        # No closure: a copy of the model asks its own binding.
        *pin_length(model, partial(_layout_of, binding)),
        *watch_parts(model, binding),
    ]
    model.__dict__["generate"] = WholeGenerate.of(binding, partial(unsharded, model))
    binding.shown = ShownToHooks(model, partial(_is_reduced, binding))
    binding.handles.append(binding.shown)
    return binding


def _layout_of(binding: Binding) -> SequenceLayout | None:
    """Of the pass in flight; None between two."""
    return None if binding.call is None else binding.call.layout


def _is_reduced(binding: Binding) -> bool:
    """True in a pass whose losses have to be reduced over ranks."""
    return binding.call is not None and binding.needs_reduction


def unbind(model: nn.Module) -> None:
    """Take off what `bind` put on: the model computes what it did before, on whole sequences.

    Weights stay where parallelize put them; where those are FSDP2's, gradients are now the mean over ranks.
    """
    binding = binding_of(model)
    if binding.reduction is not None:
        binding.reduction.choose(summed=False)
    if binding.memory is not None:
        binding.memory.remove()
    for handle in binding.handles:
        handle.remove()
    for module, config in binding.configs.items():
        module.config = config
        del module.__dict__[_BINDING]
    del binding.model.__dict__["generate"]


@contextmanager
def unbound_on_refusal(model: nn.Module) -> Iterator[None]:
    """Inside, a refusal leaves the model as it was before `bind`."""
    try:
        yield
    except UnsupportedError:
        unbind(model)
        raise


def binding_of(model: nn.Module) -> Binding:
    """The binding of a model or of what it wraps (PEFT, DDP)."""
    for module in model.modules():
        if _BINDING in module.__dict__:
            binding: Binding = module.__dict__[_BINDING]
            return binding
    raise UnsupportedError(f"{type(model).__name__} is not parallelized: call ithaca.parallelize(model, mesh) first")


def check_same_mesh(bound: Mesh, mesh: Mesh) -> None:
    """Refuse a mesh that is not the one of `parallelize`."""
    check_mesh(mesh)
    if mesh.degrees != bound.degrees:
        raise MeshError(f"mesh is {mesh}, the model was parallelized over {bound}: pass the same mesh to both")


def is_bound(model: nn.Module) -> bool:
    return any(_BINDING in module.__dict__ for module in model.modules())


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


@dataclass(frozen=True)
class _GoingBack:
    """A hook on what a pass gave: its backward begins, and wants what its forward had.

    Ranks sum the gradients of shards, and average those of whole sequences.
    """

    binding: Binding
    sharded: bool
    replays: bool

    def __call__(self, gradient: Tensor) -> None:
        binding = self.binding
        if self.sharded and binding.model.__dict__.get(_BINDING) is not binding:
            raise UnsupportedError(
                "backward of a sharded pass was called after ithaca.unbind(model): call it before unbind"
            )
        if self.replays and self.sharded != binding.sharded:
            where = "outside" if self.sharded else "inside"
            raise UnsupportedError(
                f"backward runs layers again, and their forward ran {where} `with ithaca.unsharded(model):`: call "
                f"backward {where} the `with` too"
            )
        if binding.reduction is not None:
            binding.reduction.choose(summed=self.sharded)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    binding = binding_of(model)
    if binding.memory is not None:
        binding.memory.refuse_replaced()
    if not binding.sharded:
        if binding.replays:
            _refuse_router_logits(binding, kwargs)
        return args, kwargs | _without_cache(binding, kwargs)
    layout = kwargs.get(LAYOUT)
    if layout is None:
        raise UnsupportedError(
            f"{type(model).__name__} is parallelized but was called with a whole batch: use ithaca.causal_loss(model, "
            "batch, mesh), or model(**ithaca.shard_batch(batch, mesh).inputs) with ithaca.reduce_mean for a loss of its "
            "logits, or run it whole inside `with ithaca.unsharded(model):`"
        )
    refuse_arguments(kwargs)
    refuse_beyond_table(binding.positions, layout)
    refuse_autocast(binding.model, binding.mesh.device.type)
    if binding.memory is not None:
        if kwargs.get("output_router_logits"):
            # A loss of ours has them from the layers, and does not ask for them.
            _refuse_router_logits(binding, kwargs)
        refuse_checkpointing(model)
        binding.memory.begin(layout)
    binding.call, binding.calls, binding.router_logits = AttentionCall(layout), 0, []
    if binding.shown is not None and binding.needs_reduction:
        binding.shown.begin(binding.mesh.rank)
    binding.begin_drawing()
    kwargs = {key: value for key, value in kwargs.items() if key != LAYOUT}
    if binding.averages and kwargs.get("inputs_embeds") is not None:
        # Every rank of the group is given the group's gradient, which a mean over all ranks then counts once.
        kwargs["inputs_embeds"] = with_gradient_times(kwargs["inputs_embeds"], 1 / binding.mesh.shards)
    return args, kwargs | {"use_cache": False} | ({LAYOUT: binding.call} if binding.takes_kwargs else {})


def _refuse_router_logits(binding: Binding, kwargs: dict[str, Any]) -> None:
    """Those that transformers gathers of layers in tiles or run again have no graph."""
    if is_grad_enabled() and wants_auxiliary_loss(binding.model, kwargs.get("output_router_logits")):
        raise UnsupportedError(
            "router logits would have no gradient here, for layers are run in tiles or again: use ithaca.causal_loss, "
            "output_router_logits=False, torch.no_grad(), or parallelize(..., memory=None)"
        )


def _without_cache(binding: Binding, kwargs: dict[str, Any]) -> dict[str, Any]:
    """For a whole pass whose layers run again in backward: each would put its keys into a cache a second time."""
    if not (is_grad_enabled() and binding.replays):
        return {}
    if kwargs.get("past_key_values") is not None:
        raise UnsupportedError(
            "past_key_values was passed to a model whose layers are run again in backward: call it inside "
            "`with torch.no_grad():`, or use parallelize(..., memory=None)"
        )
    return {"use_cache": False}


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    binding = binding_of(model)
    reached, ran = binding.calls, binding.call is not None
    binding.call = None
    binding.end_drawing()
    if binding.memory is not None:
        # The graph holds what backward needs; the links between layers are not to keep it alive beyond that.
        binding.memory.begin()
    # `output` is None only when the forward raised; that error must not be hidden by ours, nor its graph be kept.
    if output is None:
        binding.router_logits = []
    if ran and output is not None and reached < binding.layers:
        raise UnsupportedError(
            f"{reached} of {binding.layers} layers of {type(model).__name__} reached the bound attention: the others ran "
            "on their own shard alone, so this result is wrong. Something replaced the model's attention after "
            "parallelize; call parallelize last"
        )
    back = _GoingBack(binding, binding.sharded, binding.replays)
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(back)
    return mark_output(output) if ran and binding.needs_reduction else None


def _attention(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BKLD: Tensor,
    value_BKLE: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; `[B, H, L, D]` in, `[B, L, H, E]` out."""
    binding: Binding | None = module.__dict__.get(_BINDING)
    if binding is None:
        raise UnsupportedError(f"{type(module).__name__} was put into the model after parallelize: put it in before")
    call: AttentionCall | None = kwargs.pop(LAYOUT, None) or binding.call
    if call is None:
        raise UnsupportedError(
            f"{type(module).__name__} ran outside a sharded forward pass (transformers' gradient checkpointing re-runs "
            "layers in backward, and this architecture passes no layout down): switch gradient checkpointing off"
        )
    check_call(module, query_BHLD, key_BKLD, attention_mask, dropout, kwargs)
    q_BLHD, k_BLKD, v_BLKE = (x.transpose(1, 2) for x in (query_BHLD, key_BKLD, value_BKLE))
    spec = AttentionSpec(
        scale=q_BLHD.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=is_causal if is_causal is not None else bool(getattr(module, "is_causal", True)),
        window=sliding_window,
        softcap=softcap,
    )
    binding.calls += 1
    binding.announce(q_BLHD, k_BLKD, v_BLKE, spec)
    out_BLHE = attend_sharded(
        q_BLHD,
        k_BLKD,
        v_BLKE,
        binding.mesh,
        call.layout,
        spec,
        s_aux,
        binding.kernel,
        groups=binding.groups,
        tape=call.tape,
    )
    return out_BLHE, None
