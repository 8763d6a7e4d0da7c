"""`causal_loss`: the mean loss of a whole batch's targets over all ranks.

    whole batch [B, S], equal on the ranks of a sequence group
        │ shard      each rank takes L = S / shards tokens; labels are shifted before, so no target is lost at an edge
        │ agree      one small collective: same batch in a group, same options; returns the targets of all ranks
        │ forward    model(**inputs): attention exchanges heads, all else works on L tokens
        │ sum        `loss_of`: the loss summed over this rank's targets
        │ divide     `shown_sum` adds the sums of all ranks; one division by all targets of the step
    loss, a number equal on all ranks; its gradient on a rank is that of the rank's own sum

The sum over ranks is outside autograd. The gradients of the ranks' own sums are added up by FSDP2
(`weights="shard"` and `"replicate"`); where a wrapper averages gradients instead (`weights="none"` under DDP, FSDP or
DeepSpeed), each rank's gradient is multiplied by the number of ranks.

For gradient accumulation, `agree_on` does the first two lines for all micro-batches of a step with one collective, and
`micro_loss` the last three for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.arguments import check_kind, named_arguments, shown
from ithaca.errors import BatchError, PeerError
from ithaca.handle import handle_of
from ithaca.loss.by_position import LossByPosition
from ithaca.loss.loss_tensor import as_loss
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.binding_state import Binding, binding_of, check_same_mesh
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
    """Return the mean loss of a whole batch's targets over all ranks; call `.backward()` on the result.

    Every rank of a sequence group passes the same whole batch, and ranks of different `mesh.dp_rank` different batches.
    Without labels every token after a document's first is learned. `count`: number of targets over several
    micro-batches, from `count_tokens`; their losses then add up to the mean over all. `label_smoothing`: the share of
    each target that is spread over the vocabulary. `z_loss`: the weight of the squared log of the softmax's divisor.
    `by_position`: adds this rank's token losses up by position in the document.
    """
    check_mesh(mesh)

    def checked_shard(batch: Mapping[str, Any]) -> Shard:
        _check_options(batch, count, label_smoothing, z_loss)
        if by_position is not None:
            check_kind("by_position", by_position, LossByPosition, "pass None, or a LossByPosition(length, device)")
        binding = _check_model(model, mesh)
        return shard_batch(batch, mesh, vocab_size=binding.model.config.get_text_config().vocab_size)

    # A refusal on one rank alone, of an option as of the batch, must reach the other ranks: they wait in `agree`.
    cut = CutBatch.of(batch, checked_shard)
    options = {"count": count, "label_smoothing": label_smoothing, "z_loss": z_loss}
    (targets,) = agree(_agreed_mesh(model, mesh), [cut], model, options)
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
    """This rank's shard of a micro-batch, and the number of the micro-batch's targets on all ranks."""

    shard: Shard
    targets: int


def agree_on(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    number: int,
    mesh: Mesh,
    options: Mapping[str, float] | None = None,
) -> list[MicroBatch]:
    """Shard the micro-batches of a step and compare them with all ranks at once; if one rank cannot, all raise.

    `number`: micro-batches on every rank, which a rank that cannot read its batches does not know otherwise. Shards stay
    on the host until `micro_loss` moves them to the device one by one.
    """
    cuts: list[CutBatch] = []
    try:
        vocabulary = _check_model(model, mesh).model.config.get_text_config().vocab_size
        cut = partial(cut_batch, shards=mesh.shards, rank=mesh.sequence_rank, device=_HOST, vocab_size=vocabulary)
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
    """Return the loss of a micro-batch that all ranks have agreed on, divided by `count`, the targets of the step."""
    binding, shard = binding_of(model), micro.shard.on(mesh.device)
    if mesh.rank == 0:
        binding.warn_of_labels(shard.unlearned)
    if by_position is not None:
        asked = replace(asked, each=partial(by_position.add, shard))
    output = model(**loss_inputs(binding, shard, asked))
    routers = shard.inputs.get("output_router_logits")
    part = loss_of(binding, shard, output, asked=asked, routers=routers, weight=micro.targets)
    scale = mesh.world if averages_gradients(model) else 1
    return as_loss(shown_sum(part, mesh.world_group, binding, scale) / max(count, 1), binding)


def _check_model(model: nn.Module, mesh: Mesh) -> Binding:
    """Return the model's binding; refuse a model that was changed since `parallelize`, and another mesh."""
    binding = binding_of(model)
    refuse_compiled(model)
    refuse_added(model)
    check_same_mesh(binding.mesh, mesh)
    binding.refuse_changed()
    return binding


def _agreed_mesh(model: nn.Module, mesh: Mesh) -> Mesh:
    """Return the mesh of `parallelize`, over which the ranks with the right mesh agree; `mesh` if there is none."""
    handle = handle_of(model) if isinstance(model, nn.Module) else None
    return mesh if handle is None else handle.mesh


def _check_options(batch: object, count: object, label_smoothing: object, z_loss: object) -> None:
    """Refuse options that are no number or out of range; NaN fails every comparison."""
    if count is not None and (not finite_or_nan(count) >= 0 or finite_or_nan(count) % 1):
        raise BatchError(f"count={shown(count)}: pass what ithaca.count_tokens(batches, mesh) gives")
    if not (0 <= finite_or_nan(label_smoothing) < 1 and finite_or_nan(z_loss) >= 0):
        raise BatchError(
            f"label_smoothing={shown(label_smoothing)}, z_loss={shown(z_loss)}: use 0 <= label_smoothing < 1 and z_loss >= 0"
        )
    # Plain transformers would divide by this number of the batch.
    if count is None and isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        raise BatchError(
            "the batch has num_items_in_batch, which causal_loss does not divide by: leave it out, and over several "
            "micro-batches pass count=ithaca.count_tokens(batches, mesh)"
        )


@named_arguments
def count_tokens(batches: Iterable[Mapping[str, Any]], mesh: Mesh) -> int:
    """Return the number of targets in the micro-batches of all ranks; if one rank cannot count, all ranks raise."""
    check_mesh(mesh)
    own, error = 0, None
    try:
        if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
            raise BatchError(f"batches is {shown(batches)}: pass a list of batches, as in count_tokens([batch], mesh)")
        own = sum(count_targets(batch) for batch in batches)
    except Exception as caught:
        error = caught
    # The ranks of a sequence group have the same batch: the first rank counts.
    table = gather_rows(mesh, [own if mesh.sequence_rank == 0 else 0, int(error is not None)])
    if error is not None:
        raise error
    if any(failed for _, failed in table):
        raise PeerError("another rank could not count its batches and says why; all ranks stop alike")
    return sum(counted for counted, _ in table)
