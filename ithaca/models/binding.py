"""Binding: the attention of a Hugging Face model goes through Ulysses, on that model alone.

transformers looks its attention function up by a name in the config. The forward of every attention module ends in

    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]       # "eager", "sdpa", ... or "ithaca"
    out, _ = attend(self, q, k, v, attention_mask, scaling=..., sliding_window=..., **kwargs)

so `bind` needs no subclass and no copy of transformers' code:

    ALL_ATTENTION_FUNCTIONS["ithaca"] = _attention     once for the process
    every module's config                              a deep copy that says "ithaca"; other models keep theirs
    every module with a config                         carries the model's handle, where `_attention` finds the Binding
    the model                                          a hook before its forward (_enter) and one after it (_leave)

One forward pass on one rank of a sequence group:

    model(**shard.inputs)     input_ids [B, L] of this rank, sequence_layout
      _enter                  check the call; the layers get attention_call (the layout, and a layer's tape)
      layers                  transformers' own code on L tokens
        _attention            q, k, v [B, L, H, D] -> all-to-all -> [B, S, h, D], kernel, all-to-all -> [B, L, H, E]
      _leave                  check that every layer reached _attention; mark the outputs

A name without "flash", "sdpa" or "flex" takes none of transformers' special branches, so no S x S mask is built. An
architecture that passes no kwargs down to its attention reads the layout off the Binding instead.
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
from ithaca.models.binding_state import CALL, LAYOUT, NAME, Binding, binding_of
from ithaca.models.experts import adds_auxiliary_loss
from ithaca.models.generate import WholeGenerate
from ithaca.models.layers.hooks import CopyingHooks
from ithaca.models.learned_positions import learned_positions, refuse_beyond_table
from ithaca.models.partial_calls import refuse_partial_calls
from ithaca.models.reduction_marks import mark_output, with_gradient_times
from ithaca.models.refusals.calls import check_call, refuse_arguments, refuse_autocast, refuse_checkpointing
from ithaca.models.refusals.foreign_code import foreign_forwards
from ithaca.models.refusals.random_depth import watch_rates
from ithaca.models.rope import pin_length
from ithaca.models.weight_versions import WeightVersions
from ithaca.sequence.layout import SequenceLayout


def bind(model: PreTrainedModel, mesh: Mesh, *, kernel: str = "auto") -> Binding:
    """Route this model's attention through Ulysses; `unbind` undoes it."""
    # Also registered at import: trials and tests exchange the function, for models that are bound while they do.
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    handle = Handle.on(model, mesh)
    configs = {module: module.config for module in model.modules() if getattr(module, "config", None) is not None}
    parameters = inspect.signature(model.forward).parameters.values()
    binding = Binding(
        handle,
        model,
        kernel,
        layers=model.config.get_text_config().num_hidden_layers,
        configs=configs,
        forwards=foreign_forwards(model),
        positions=learned_positions(model),
        takes_kwargs=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    )
    handle.keep(binding)
    copies: dict[int, Any] = {}
    for module, config in configs.items():
        # One memo for all: modules that shared a config (or a part of one) still do.
        handle.replace(module, "config", copy.deepcopy(config, copies))
        handle.mark(module)
    for module in configs:
        module.config._attn_implementation = NAME
    # `partial`, not a closure: a deep copy of the model must ask the copy's own binding.
    binding.copying_hooks = CopyingHooks(model, partial(_needs_reduction_now, binding))
    for step in (
        model.register_forward_pre_hook(_enter, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
        *watch_rates(model),
        *pin_length(model, partial(_layout_of, binding)),
        *refuse_partial_calls(model, binding),
        binding.copying_hooks,
    ):
        handle.add(step)
    handle.replace_method(model, "generate", WholeGenerate(binding, model.generate))
    return binding


def _layout_of(binding: Binding) -> SequenceLayout | None:
    """Return the layout of the forward pass in progress; None between two."""
    return None if binding.call is None else binding.call.layout


def _needs_reduction_now(binding: Binding) -> bool:
    """True in a forward pass whose losses have to be reduced over ranks."""
    return binding.call is not None and binding.needs_reduction


@named_arguments
def unbind(model: nn.Module) -> None:
    """Take off what `parallelize` put on: the model computes what it did before, on whole sequences.

    Weights stay where parallelize put them. Where those are FSDP2's, gradients are now the mean over ranks, and what
    refuses wrong uses of sharded weights stays with them.
    """
    binding = binding_of(model)
    if binding.placement is not None:
        binding.placement.set_gradient_reduction(summed=False)
    binding.handle.undo()


@dataclass(frozen=True)
class _BackwardCheck:
    """A hook on the outputs: when backward starts, check that the model is still as it was in forward.

    It also sets the reduction of gradients: the sum over ranks for shards, the mean for whole sequences.
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
        weights = binding.handle.part(WeightVersions)
        if weights is not None:
            weights.refuse_changed(self.versions)
        if binding.placement is not None:
            binding.placement.set_gradient_reduction(summed=self.sharded)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check a call of the model before its forward, and put an AttentionCall in the place of the SequenceLayout."""
    binding = binding_of(model)
    binding.refuse_changed()
    if not binding.sharded:
        return args, kwargs | _check_whole_call(binding, kwargs)
    layout = kwargs.pop(LAYOUT, None)
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
            # causal_loss takes router logits from the layers and does not ask for them here.
            _refuse_router_logits(binding, kwargs)
        refuse_checkpointing(model)
        binding.memory.begin(layout)
    binding.call, binding.attended, binding.router_logits = AttentionCall(layout), 0, []
    if binding.copying_hooks is not None and binding.needs_reduction:
        binding.copying_hooks.begin(binding.mesh.rank)
    binding.begin_drawing()
    if binding.averages and kwargs.get("inputs_embeds") is not None:
        # Every rank gets the gradient of its whole sequence group, so a mean over all ranks counts it `shards` times.
        kwargs["inputs_embeds"] = with_gradient_times(kwargs["inputs_embeds"], 1 / binding.mesh.shards)
    return args, kwargs | {"use_cache": False} | ({CALL: binding.call} if binding.takes_kwargs else {})


def _check_whole_call(binding: Binding, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check a call inside `unsharded`; return the arguments to change."""
    if not (is_grad_enabled() and binding.replays):
        return {}
    _refuse_router_logits(binding, kwargs)
    if kwargs.get("past_key_values") is not None:
        raise UnsupportedError(
            "past_key_values was passed to a model whose layers are run again in backward: call it inside "
            "`with torch.no_grad():`, or use parallelize(..., memory=None)"
        )
    # A layer that is recomputed in backward would put its keys into the cache a second time.
    return {"use_cache": False}


def _refuse_router_logits(binding: Binding, kwargs: dict[str, Any]) -> None:
    """Refuse router logits that transformers records of tiled or recomputed layers: they have no graph."""
    if is_grad_enabled() and adds_auxiliary_loss(binding.model, kwargs.get("output_router_logits")):
        raise UnsupportedError(
            "router logits would have no gradient here, for layers are run in tiles or again: use ithaca.causal_loss, "
            "output_router_logits=False, torch.no_grad(), or parallelize(..., memory=None)"
        )


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """End a forward pass; refuse its result if a layer bypassed the bound attention."""
    binding = binding_of(model)
    ran_sharded = binding.call is not None
    binding.call = None
    binding.end_drawing()
    if binding.memory is not None:
        # The graph holds what backward needs; the links between layers must not keep it alive beyond that.
        binding.memory.begin()
    if output is None:
        # The forward raised: its error must not be hidden by another one, nor its graph be kept.
        binding.router_logits = []
    elif ran_sharded and binding.attended < binding.layers:
        raise UnsupportedError(
            f"{binding.attended} of {binding.layers} layers of {type(model).__name__} reached the bound attention: the "
            "others ran on their own shard alone, so this result is wrong. Something replaced the model's attention after "
            "parallelize; call parallelize last"
        )
    weights = binding.handle.part(WeightVersions)
    versions = () if weights is None else weights.now()
    check = _BackwardCheck(binding, binding.sharded, binding.replays, versions)
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(check)
    return mark_output(output) if ran_sharded and binding.needs_reduction else None


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
    """Attend over ranks; transformers calls it as one of its attention functions, and takes `[B, L, H, E]`."""
    handle: Handle | None = module.__dict__.get(KEY)
    binding = None if handle is None else handle.part(Binding)
    if binding is None:
        raise UnsupportedError(f"{type(module).__name__} was put into the model after parallelize: put it in before")
    call: AttentionCall | None = kwargs.pop(CALL, None) or binding.call
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
    binding.attended += 1
    binding.log_kernel(q_BLHD, k_BLKD, v_BLKE, spec)
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


# Never taken out again: a model reaches the function by the name in its own config alone.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
