"""`causal_loss`: a whole batch in, the global token mean out.

Every rank sums the loss of its own targets; the one division, by the number of targets over micro-batches, ranks
and shards, is here. The value shown is reduced outside autograd, so it is the same on all ranks, while each rank's
gradient is its own part: FSDP2 sums the parts (`weights="shard"` and `"replicate"`); where the caller's own wrapper
averages over ranks (`weights="none"` under DDP, FSDP or DeepSpeed) the parts are scaled by the world size first.

`agree_on` and `micro_loss` are its two halves, for a loop that knows all micro-batches of a step beforehand: one
agreement for all of them, then one loss for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ithaca.arguments import check_kind, named_arguments, shown
from ithaca.errors import BatchError, PeerError, UnsupportedError
from ithaca.loss.by_position import LossByPosition
from ithaca.memory.replay import WHOLE_BACKWARD
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.bound import Binding, binding_of, check_same_mesh
from ithaca.models.refusals.compiled import refuse_compiled
from ithaca.models.shard_loss import CROSS_ENTROPY, TokenLoss, loss_inputs, loss_of, shown_sum
from ithaca.quantities import finite_or_nan
from ithaca.sequence.agree import CutBatch, agree, gather_rows
from ithaca.sequence.batch import Shard, count_targets, cut_batch, shard_batch
from ithaca.state.weights.placement import averages_gradients
from ithaca.state.weights.shardable import refuse_added

_HOST = torch.device("cpu")


@named_arguments
def causal_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    count: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    by_position: LossByPosition | None = None,
) -> Tensor:
    """The mean loss of a whole batch's targets over all ranks; call `.backward()` on it.

    Every rank of a sequence group passes the same whole batch, ranks of different `mesh.dp_rank` different ones.
    `count`, from `count_tokens`, is the number of targets over several micro-batches: their losses then add up to
    the mean over all. Without labels every token after a document's first is learned. `label_smoothing`: the share of
    each target that is spread over the vocabulary. `z_loss`: the weight of the squared log of the softmax's divisor.
    `by_position` gathers this rank's token losses by how far into its document a token is.
    """
    _check_options(count, label_smoothing, z_loss)
    if by_position is not None:
        check_kind("by_position", by_position, LossByPosition, "pass None, or a LossByPosition(length, device)")
    _refuse_items(batch, count)
    binding = _ready(model, mesh)
    vocabulary = binding.model.config.get_text_config().vocab_size
    cut = CutBatch.of(batch, partial(shard_batch, mesh=mesh, vocab_size=vocabulary))
    options = {"count": count, "label_smoothing": label_smoothing, "z_loss": z_loss}
    (targets,) = agree(mesh, [cut], model, options)
    assert cut.shard is not None
    if count is not None and targets and not count:
        raise BatchError(
            f"count={count!r} beside {targets} targets: pass what ithaca.count_tokens(batches, mesh) gives"
        )
    micro = MicroBatch(cut.shard, targets)
    divisor = targets if count is None else count
    return micro_loss(model, micro, mesh, divisor, TokenLoss(label_smoothing, z_loss), by_position)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """This rank's shard of a micro-batch, and the number of targets on all ranks."""

    shard: Shard
    targets: int


def agree_on(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    number: int,
    mesh: Mesh,
    options: Mapping[str, float] | None = None,
) -> list[MicroBatch]:
    """Cut the micro-batches of a step and compare them with all ranks at once; all ranks raise if one cannot.

    `number`: of micro-batches on every rank, for a rank that cannot read its own has no other way to know it. Shards
    stay on the host until `micro_loss` takes one.
    """
    binding = _ready(model, mesh)
    vocabulary = binding.model.config.get_text_config().vocab_size
    cut = partial(cut_batch, shards=mesh.shards, rank=mesh.sequence_rank, device=_HOST, vocab_size=vocabulary)
    cuts: list[CutBatch] = []
    try:
        cuts += [CutBatch.of(batch, cut) for batch in batches]
    except Exception as error:
        cuts = [CutBatch({}, error=error)] * number
    targets = agree(mesh, cuts, model, options)
    shards = [cut.shard for cut in cuts if cut.shard is not None]
    return [MicroBatch(shard, count) for shard, count in zip(shards, targets, strict=True)]


def micro_loss(
    model: nn.Module,
    micro: MicroBatch,
    mesh: Mesh,
    count: int,
    asked: TokenLoss = CROSS_ENTROPY,
    by_position: LossByPosition | None = None,
) -> Tensor:
    """Return the loss of a micro-batch that all ranks have agreed on, divided by `count` targets."""
    binding, shard = binding_of(model), micro.shard.on(mesh.device)
    if mesh.rank == 0:
        binding.warn_of_labels(shard.unlearned)
    if by_position is not None:
        asked = replace(asked, each=partial(by_position.add, shard))
    output = model(**loss_inputs(binding, shard, asked))
    routers = shard.inputs.get("output_router_logits")
    part = loss_of(binding, shard, output, asked=asked, routers=routers, weight=micro.targets)
    scale = mesh.world if averages_gradients(model) else 1
    return _accounted(shown_sum(part, mesh.world_group, binding, scale) / max(count, 1), binding)


def _ready(model: nn.Module, mesh: Mesh) -> Binding:
    """Return the model's binding; refuse a model that was changed since `parallelize`, and another mesh."""
    binding = binding_of(model)
    refuse_compiled(model)
    refuse_added(model)
    check_same_mesh(binding.mesh, mesh)
    return binding


def _check_options(count: object, label_smoothing: object, z_loss: object) -> None:
    """Refuse what is no number, or none that a loss has; nan fails every comparison."""
    if count is not None and (not finite_or_nan(count) >= 0 or finite_or_nan(count) % 1):
        raise BatchError(f"count={shown(count)}: pass what ithaca.count_tokens(batches, mesh) gives")
    if not (0 <= finite_or_nan(label_smoothing) < 1 and finite_or_nan(z_loss) >= 0):
        raise BatchError(
            f"label_smoothing={shown(label_smoothing)}, z_loss={shown(z_loss)}: use 0 <= label_smoothing < 1 and z_loss >= 0"
        )


def _refuse_items(batch: object, count: object) -> None:
    """Refuse a number that plain transformers would divide by, where nothing else says what to divide by."""
    if count is None and isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        raise BatchError(
            "the batch has num_items_in_batch, which causal_loss does not divide by: leave it out, and over several "
            "micro-batches pass count=ithaca.count_tokens(batches, mesh)"
        )


class Loss(Tensor):
    """The loss, with a `backward` that refuses what would silently be wrong and names what held memory that ran out.

    A class, because torch has no other place for three things. With `inputs=`, weights of a layer that is run again are
    no nodes of the graph, so that no code of ours would run. A function set on the tensor itself would be lost with a
    temporary, `causal_loss(...).backward()`. And a term of sharded weights must be whole before it is added. All else
    that is computed from a loss is a plain tensor.
    """

    binding: Binding

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Terms made of sharded weights, such as an L2 norm, are added as the whole numbers that they stand for."""
        flat, tree = tree_flatten((args, kwargs or {}))
        if func is torch.autograd.grad:
            _refuse_shards(flat)
        terms = any(isinstance(value, DTensor) for value in flat)
        args, kwargs = tree_unflatten([_whole(value) for value in flat], tree) if terms else (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            given = func(*args, **kwargs)
        if terms and isinstance(given, Tensor) and given.ndim == 0 and given.requires_grad:
            # More terms may follow.
            given = _accounted(given, next(value for value in flat if isinstance(value, cls)).binding)
        return given

    def __format__(self, how: str) -> str:
        """torch formats plain tensors alone: `f"{loss:.4f}"`."""
        return self.detach().as_subclass(Tensor).__format__(how)

    def tolist(self) -> Any:
        """torch makes numbers of plain tensors alone."""
        return self.detach().as_subclass(Tensor).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled is a plain tensor: `torch.save({"step": step, "loss": loss}, file)`."""
        plain = self.detach().as_subclass(Tensor).requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        # Weights of a layer that is run again are no inputs of its node: autograd would find no way to them, and say nothing.
        if inputs is not None and self.binding.memory is not None and self.binding.replays:
            raise UnsupportedError(WHOLE_BACKWARD)
        _refuse_shards(tree_flatten(inputs)[0])
        if create_graph:
            raise UnsupportedError(
                "backward(create_graph=True): exchanges, tiles and layers that are run again have no second derivatives; "
                "use a model without parallelize for them"
            )
        with self.binding.handle.accounting():
            torch.autograd.backward([self], [gradient], retain_graph, inputs=inputs)


def _refuse_shards(inputs: list[Any]) -> None:
    """A shard is not what its layer computes with: autograd finds no way from a loss to it."""
    if any(isinstance(value, nn.Parameter) and isinstance(value, DTensor) for value in inputs):
        raise UnsupportedError(
            "torch.autograd.grad and backward(inputs=...) find no gradients of sharded weights: call loss.backward() and "
            "read weight.grad, with requires_grad_(False) on what shall have none"
        )


def _whole(value: Any) -> Any:
    """The sum over ranks of a sharded term; all ranks take part. What is on the host is joined on the device."""
    if not isinstance(value, DTensor):
        return value
    there: Any = value.to(value.device_mesh.device_type)
    return there.full_tensor()


def _accounted(loss: Tensor, binding: Binding) -> Tensor:
    # A rehearsal's fake tensors are of a class of their own.
    if not loss.requires_grad or type(loss) is not Tensor:
        return loss
    found = loss.as_subclass(Loss)
    found.binding = binding
    return found


@named_arguments
def count_tokens(batches: Iterable[Mapping[str, Any]], mesh: Mesh) -> int:
    """How many targets the micro-batches of all ranks have together; all ranks raise if one cannot count its own."""
    check_mesh(mesh)
    own, error = 0, None
    try:
        if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
            raise BatchError(f"batches is {shown(batches)}: pass a list of batches, as in count_tokens([batch], mesh)")
        own = sum(count_targets(batch) for batch in batches)
    except Exception as caught:
        error = caught
    # A sequence group has one batch: its first rank counts it.
    table = gather_rows(mesh, [own if mesh.sequence_rank == 0 else 0, int(error is not None)])
    if error is not None:
        raise error
    if any(failed for _, failed in table):
        raise PeerError("another rank could not count its batches and says why; all ranks stop alike")
    return sum(counted for counted, _ in table)
