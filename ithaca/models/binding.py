"""Binding: a Hugging Face model's attention goes through Ulysses, on that model alone.

transformers looks an attention function up by the name in `config._attn_implementation`. Binding registers one
function under a name of our own, once for the process, gives the model its own copy of its config with that name set,
and hangs the model's handle on every module that holds a config. Nothing else changes: weights, classes and other models
built from the same config object are untouched, and `unbind` puts the original config objects back.

The `SequenceLayout` travels as a model kwarg; for architectures that do not pass kwargs down to their attention
it is read off the `Binding`, which holds it for the time of one forward pass.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.arguments import named_arguments
from ithaca.attention.kernels import AttentionSpec
from ithaca.attention.tape import AttentionCall
from ithaca.attention.ulysses import attend_sharded
from ithaca.errors import UnsupportedError
from ithaca.handle import KEY, Handle
from ithaca.mesh import Mesh
from ithaca.models.bound import LAYOUT, NAME, Binding, binding_of
from ithaca.models.called_alone import watch_parts
from ithaca.models.experts import wants_auxiliary_loss
from ithaca.models.generate import WholeGenerate
from ithaca.models.handed_out import mark_output, with_gradient_times
from ithaca.models.layers.hooks import ShownToHooks
from ithaca.models.learned_positions import learned_positions, refuse_beyond_table
from ithaca.models.placed import Placed
from ithaca.models.refusals.calls import check_call, refuse_arguments, refuse_autocast, refuse_checkpointing
from ithaca.models.refusals.random_depth import watch_rates
from ithaca.models.rope import pin_length
from ithaca.sequence.layout import SequenceLayout


def bind(model: PreTrainedModel, mesh: Mesh, *, kernel: str = "auto") -> Binding:
    """Route this model's attention through Ulysses; `unbind` undoes it."""
    # Again: whoever exchanged it, as trials and tests do, did so for the models that were bound then.
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    handle = Handle.on(model, mesh)
    copies: dict[int, Any] = {}
    configs = {module: module.config for module in model.modules() if getattr(module, "config", None) is not None}
    signature = inspect.signature(model.forward)
    binding = Binding(
        handle,
        model,
        kernel,
        layers=model.config.get_text_config().num_hidden_layers,
        configs=configs,
        positions=learned_positions(model),
        takes_kwargs=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
    )
    handle.keep(binding)
    for module, config in configs.items():
        # One memo for all: modules that shared a config (or a part of it) still do.
        handle.replace(module, "config", copy.deepcopy(config, copies))
        handle.mark(module)
    for module in configs:
        module.config._attn_implementation = NAME
    binding.shown = ShownToHooks(model, partial(_is_reduced, binding))
    for step in (
        model.register_forward_pre_hook(_enter, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
        *watch_rates(model),
        # No closure: a copy of the model asks its own binding.
        *pin_length(model, partial(_layout_of, binding)),
        *watch_parts(model, binding),
        binding.shown,
    ):
        handle.add(step)
    handle.replace_method(model, "generate", WholeGenerate(binding, model.generate))
    return binding


def _layout_of(binding: Binding) -> SequenceLayout | None:
    """Of the pass in flight; None between two."""
    return None if binding.call is None else binding.call.layout


def _is_reduced(binding: Binding) -> bool:
    """True in a pass whose losses have to be reduced over ranks."""
    return binding.call is not None and binding.needs_reduction


@named_arguments
def unbind(model: nn.Module) -> None:
    """Take off what `parallelize` put on: the model computes what it did before, on whole sequences.

    Weights stay where parallelize put them. Where those are FSDP2's, gradients are now the mean over ranks, and what
    refuses wrong uses of sharded weights stays with them.
    """
    binding = binding_of(model)
    if binding.placement is not None:
        binding.placement.choose(summed=False)
    binding.handle.undo()


@dataclass(frozen=True)
class _GoingBack:
    """A hook on what a pass gave: its backward begins, and wants what its forward had.

    Ranks sum the gradients of shards, and average those of whole sequences.
    """

    binding: Binding
    sharded: bool
    replays: bool
    versions: tuple[int, ...]

    def __call__(self, gradient: Tensor) -> None:
        binding = self.binding
        if self.sharded and binding.handle.part(Binding) is not binding:
            raise UnsupportedError(
                "backward of a sharded pass was called after ithaca.unbind(model): call it before unbind"
            )
        if self.replays and self.sharded != binding.sharded:
            where = "outside" if self.sharded else "inside"
            raise UnsupportedError(
                f"backward runs layers again, and their forward ran {where} `with ithaca.unsharded(model):`: call "
                f"backward {where} the `with` too"
            )
        placed = binding.handle.part(Placed)
        if placed is not None:
            placed.refuse_changed(self.versions)
        if binding.placement is not None:
            binding.placement.choose(summed=self.sharded)


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
    placed = binding.handle.part(Placed)
    versions = () if placed is None else placed.versions()
    back = _GoingBack(binding, binding.sharded, binding.replays, versions)
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
    handle: Handle | None = module.__dict__.get(KEY)
    binding = None if handle is None else handle.part(Binding)
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
        groups=1 if binding.memory is None else binding.memory.groups,
        tape=call.tape,
    )
    return out_BLHE, None


# Once for the process, whatever comes and goes; models reach the function by the name in their own config alone.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
