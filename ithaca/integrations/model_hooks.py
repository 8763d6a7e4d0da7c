"""Hooks on a parallelized model, which is then called like any other: whole batches in, loss or whole logits out.

    enter     whole batch ── shard ── agreement of all ranks ── this rank's shard ──> model.forward
    leave     loss over all ranks, or logits [B, L, V] gathered to [B, S, V]  <──────────────┘

Three kinds of call:

    labels          `loss`, and `logits` of whole sequences, computed when they are read (`late_logits.py`)
    no labels       `logits` [B, S, V] of whole sequences, for a caller's own loss, such as label smoothing
    fused_lm_head   TRL's: log-probabilities, entropies and so on of whole sequences, one number a token

Whole logits equal transformers' at padding too, where tokens attend although no loss uses them.

The loss is divided by `num_items_in_batch` if given, which is the contract of Trainer: the caller multiplies by the
number of data-parallel processes, over which gradients are averaged. Otherwise the loss is the token mean over all
ranks' batches, equal on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError, UnsupportedError
from ithaca.integrations.late_logits import LazyLogits, RandomState, Reading
from ithaca.integrations.targets import named_once
from ithaca.integrations.whole_tokens import whole_tokens
from ithaca.mesh import Mesh
from ithaca.models.bound import LAYOUT, Binding, binding_of
from ithaca.models.experts import load_balancing_loss
from ithaca.models.refusals.own_loss import refuse_own_loss
from ithaca.models.shard_loss import loss_inputs, loss_of, shown_sum
from ithaca.sequence.agree import CutBatch, agree
from ithaca.sequence.batch import Shard, shard_batch
from ithaca.sequence.layout import Padding

FUSED = "fused_lm_head"
_ITEMS = "num_items_in_batch"
_ROUTERS = "output_router_logits"
_LABELS = ("labels", "shift_labels")
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
# Arguments that request what a sharded pass does not return.
_NOT_GIVEN = ("output_hidden_states", "output_attentions", "past_key_values", "cache_position")
_CONFIG_OUTPUTS = ("output_hidden_states", "output_attentions")
# Trainer with Liger requests the loss alone, which is computed without logits anyway.
_DROPPED = ("skip_logits",)


@dataclass(eq=False, slots=True)
class Call:
    """One call between the two hooks. `targets`: on all ranks. `items`: the given `num_items_in_batch`.

    `random`: state of the generators before the call, if logits that are read later need the same dropout.
    """

    shard: Shard
    kind: str
    targets: int
    items: Tensor | int | None
    routers: bool | None
    batch: Mapping[str, Any]
    grad: bool
    random: RandomState | None


@dataclass(eq=False)
class WholeBatches:
    """The two hooks on one model, and the call in flight. `whole_logits`, `length`: of `Settings`."""

    model: nn.Module
    binding: Binding
    whole_logits: bool = False
    length: int | None = None
    call: Call | None = None
    # Flags of the last call with labels in training (True), and in evaluation (False).
    readings: dict[bool, Reading] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.binding.mesh

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a whole batch by this rank's shard, before the model's other hooks."""
        if not self.binding.sharded or LAYOUT in kwargs:
            return None
        kwargs = self._named(args) | kwargs
        _refuse_outputs(kwargs, self.binding.model.config)
        fused, items = bool(kwargs.pop(FUSED, False)), kwargs.pop(_ITEMS, None)
        batch = named_once({key: value for key, value in kwargs.items() if key not in _DROPPED})
        learned = any(batch.get(name) is not None for name in _LABELS)
        if learned and not fused:
            refuse_own_loss(self.model, self.binding.model)
        vocabulary = self.binding.model.config.get_text_config().vocab_size
        cut = CutBatch.of(batch, partial(shard_batch, mesh=self.mesh, vocab_size=vocabulary))
        shard = cut.shard
        error = cut.error or self._wrong_length(shard) or (_miscounted(batch, shard) if items is not None else None)
        (targets,) = agree(self.mesh, [replace(cut, error=error)], self.model)
        assert shard is not None
        kind = self._kind(learned, fused)
        # A model in evaluation draws no random numbers.
        random = RandomState.now(self.mesh.device) if kind == "loss" and self.model.training else None
        routers = batch.get(_ROUTERS)
        self.call = Call(shard, kind, targets, items, routers, batch, torch.is_grad_enabled(), random)
        return (), self._inputs(self.call)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Replace the output, after the model's other hooks; `output` is None if forward raised."""
        call, self.call = self.call, None
        if call is None or output is None:
            return None
        if call.kind == "fused":
            return self._fused(call, output)
        if call.kind == "logits":
            return CausalLMOutputWithPast(logits=self._whole(call, output.logits))
        reading = self.readings[self.model.training] = Reading()
        fetch = partial(self._logits_again, call) if call.kind == "loss" else partial(self._whole, call, output.logits)
        loss = self._loss(call, output)
        return CausalLMOutputWithPast(loss=loss, logits=self._lazy(call, fetch, reading))

    def _lazy(self, call: Call, fetch: Callable[[], Tensor], reading: Reading) -> LazyLogits:
        model, layout = self.binding.model, call.shard.layout
        shape = (layout.batch, layout.length, model.config.get_text_config().vocab_size)
        return LazyLogits(shape, model.dtype, self.mesh.device, fetch, reading)

    def _whole(self, call: Call, local_BLV: Tensor) -> Tensor:
        """Return logits [B, S, V] in the weights' dtype, as accelerate's mixed precision does."""
        with torch.set_grad_enabled(call.grad):
            whole = whole_tokens(local_BLV, self.mesh, call.shard.layout)
            return whole.to(torch.promote_types(whole.dtype, self.binding.model.dtype))

    def _logits_again(self, call: Call) -> Tensor:
        """Repeat a call without labels, and return its logits."""
        batch = {key: value for key, value in call.batch.items() if key not in (*_LABELS, _ROUTERS)}
        drawn = nullcontext() if call.random is None else call.random.again(self.mesh.device)
        with torch.set_grad_enabled(call.grad), drawn:
            logits: Tensor = self.model(**batch).logits
        return logits

    def _kind(self, learned: bool, fused: bool) -> str:
        if fused:
            return "fused"
        if not learned:
            return "logits"
        asked = self.whole_logits and not self.model.training
        before = self.readings.get(self.model.training)
        return "both" if asked or (before is not None and before.done) else "loss"

    def _inputs(self, call: Call) -> dict[str, Any]:
        if call.kind == "fused":
            return self._fused_inputs(call)
        if call.kind == "loss":
            return loss_inputs(self.binding, call.shard)
        # Router logits are needed for a loss only.
        inputs = {key: value for key, value in call.shard.inputs.items() if key != _ROUTERS or call.kind == "both"}
        return inputs | {LAYOUT: replace(call.shard.layout, padding=self._padding())}

    def _padding(self) -> Padding:
        """Return the output of padding's queries under the attention that the model had in transformers."""
        name = self.binding.original_attention
        if name == "eager":
            return "averaged"
        return "zero" if "flash" in name else "masked"

    def _loss(self, call: Call, output: Any) -> Tensor:
        own = call.items is None
        divisor = _divisor(call.targets if call.items is None else call.items)
        total = loss_of(self.binding, call.shard, output, routers=call.routers, weight=divisor)
        group = self.mesh.world_group if own else self.mesh.sequence.get_group()
        return shown_sum(total, group, self.binding, 1.0 if own else 1 / self.mesh.dp) / divisor

    def _fused_inputs(self, call: Call) -> dict[str, Any]:
        if call.routers and self.binding.memory is None:
            raise UnsupportedError(
                "the router's auxiliary loss with memory=None: TRL would take it over one shard; use memory='auto'"
            )
        inputs = {key: value for key, value in call.shard.inputs.items() if key != _ROUTERS}
        quiet = {_ROUTERS: False} if call.routers else {}
        return inputs | quiet | {FUSED: True, "shift_labels": call.shard.targets}

    def _fused(self, call: Call, output: Any) -> Any:
        layout = call.shard.layout
        for name in _PER_TOKEN:
            value = getattr(output, name, None)
            if value is not None:
                # TRL has no value for the last token, which has no successor.
                output[name] = whole_tokens(value, self.mesh, layout)[:, : max(layout.length - 1, 1)]
        output["loss"] = -output.log_probs.sum() / _divisor(
            output.label_mask.sum() if call.items is None else call.items
        )
        if call.routers:
            output["aux_loss"] = self._fused_auxiliary(call)
        return output

    def _fused_auxiliary(self, call: Call) -> Tensor:
        """Return the auxiliary loss without its coefficient, since TRL multiplies by its own."""
        model = self.binding.model
        term = load_balancing_loss(model, self.binding.router_logits, call.shard.real, self.mesh)
        return shown_sum(term, self.mesh.world_group, self.binding)

    def _named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if not args:
            return {}
        names = [name for name in inspect.signature(type(self.binding.model).forward).parameters if name != "self"]
        return dict(zip(names, args, strict=False))

    def _wrong_length(self, shard: Shard | None) -> Exception | None:
        if shard is None or self.length is None or shard.layout.length == self.length:
            return None
        return BatchError(
            f"the batch has {shard.layout.length} tokens a row, sp_handler promised sp_seq_length={self.length}: pass "
            "sp_seq_length_is_variable=True, any length is fine here"
        )


def take_whole_batches(model: nn.Module, *, whole_logits: bool = False, length: int | None = None) -> None:
    """Put the hooks on a parallelized model, around all hooks that it has."""
    binding = binding_of(model)
    hooks = WholeBatches(model, binding, whole_logits, length)
    binding.handle.add(model.register_forward_pre_hook(hooks.enter, prepend=True, with_kwargs=True))
    binding.handle.add(model.register_forward_hook(hooks.leave, with_kwargs=True, always_call=True))


def _refuse_outputs(kwargs: Mapping[str, Any], config: Any) -> None:
    """Refuse outputs that a sharded pass does not return, requested by the call or by the model's config."""
    for name in _NOT_GIVEN:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(
                f"{name} was passed to a model split over ranks, which does not give it: leave it out, or run the model "
                "whole inside `with ithaca.unsharded(model):`"
            )
    if kwargs.get("return_dict") is False:
        raise UnsupportedError("return_dict=False: outputs are read by name here, leave it out")
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError("logits_to_keep counts tokens of a whole row, a rank has a part of it: leave it out")
    for name in _CONFIG_OUTPUTS:
        if getattr(config, name, False) and kwargs.get(name) is None:
            raise UnsupportedError(
                f"{name}=True in the model's config: a model split over ranks does not give them; set "
                f"model.config.{name} = False, or run the model whole inside `with ithaca.unsharded(model):`"
            )


def _miscounted(batch: Mapping[str, Any], shard: Shard | None) -> Exception | None:
    """Return the error of a `num_items_in_batch` that counts labels which are no target; None if it is right."""
    labels = batch.get("labels")
    if shard is None or labels is None or batch.get("shift_labels") is not None:
        return None
    counted = int((labels[:, 1:] != IGNORE_INDEX).sum())
    if counted == shard.count:
        return None
    return BatchError(
        f"{counted} labels were counted in num_items_in_batch, {shard.count} are targets: the label of a document's first "
        "token, and of the first after padding, must be -100; loaders that went through accelerator.prepare see to it"
    )


def _divisor(items: Tensor | int) -> Tensor | int:
    return items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)
