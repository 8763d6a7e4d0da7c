"""The checks of `ithaca verify`, one generator each: a pair of models and a sample in, lines of the checklist out.

    check                 batch                                        sharded against one process
    first_step            the user's own rows                          loss, logits, every gradient
    documents             |aaaaaab|bbbbccccc|  packed documents        each document run alone; nothing leaks
    document_bounds       |abbbb|cdddd|  documents on shards' bounds   each document run alone
    padding               |__aaa|aaaaa|  left, right, whole shards     loss, logits, gradients
    positions             position ids from far on                     RoPE that depends on the length
    masked_shards, accumulation, evaluation, router_loss               the loss's divisor
    sharded               kernel calls, exchanges, saved bytes         attention is sharded at all
    saving, resuming      files                                        plain transformers and one process load them

Every check runs on all ranks and yields the same lines there. `resuming`, the last of `CHECKS`, changes weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ithaca.models.experts import adds_auxiliary_loss, has_experts
from ithaca.models.files.write_weights import save_pretrained
from ithaca.models.rope import depends_on_length
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.state.checkpoint.dcp import read_tensors
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.verify.batches import Batch, Sample
from ithaca.verify.fp64 import relative_error
from ithaca.verify.parity import Pair
from ithaca.verify.probes import recorded_attention, saved_for_backward
from ithaca.verify.reference import reference, runs_whole
from ithaca.verify.small_subject import has_adapters, load_adapters
from ithaca.verify.tolerances import SAVED_FACTOR, ParityLimits, limits_for

# A step that moves the loss, and yet stays where rounding is not amplified.
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the checklist: right if `figure` is at most `limit`."""

    name: str
    figure: float
    limit: float
    detail: str

    @property
    def ok(self) -> bool:
        return self.figure <= self.limit


@dataclass(frozen=True, slots=True)
class Case:
    """Models and batches of a check. `folder` is empty at first, and the same for all ranks."""

    pair: Pair
    sample: Sample
    folder: Path

    @property
    def limits(self) -> ParityLimits:
        dtype = next(self.pair.parallel.parameters()).dtype
        return limits_for(dtype, experts=has_experts(self.pair.config))

    def compare(self, name: str, batches: list[Batch], detail: str, **options: Any) -> Line:
        """Return the part of a comparison (loss, logits or a gradient) that is nearest to its limit."""
        part, error, limit = self.pair.compare(batches, **options).nearest_limit(self.limits)
        return Line(name, error, limit, f"{detail}; worst: {part}")


def first_step(case: Case) -> Iterator[Line]:
    """Compare loss, logits and every gradient on the user's own rows."""
    batches, limits = case.sample.plain, case.limits
    parity = case.pair.compare(batches)
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    rows = f"{len(batches)} row{'s' if len(batches) > 1 else ''} of {case.sample.origin}, {tokens} tokens"
    yield Line("loss", parity.loss, limits.loss, rows)
    yield Line("logits", parity.logits, limits.logits, "of every token")
    trains = [parameter.requires_grad for parameter in case.pair.parallel.parameters()]
    # A frozen weight has no gradient on either side, or the check is off.
    frozen = len(trains) - sum(trains)
    weights = f"of all {sum(trains)} weights{f' of adapters, none of {frozen} frozen ones' if frozen else ''}"
    name, error = parity.worst_gradient
    yield Line("gradients", error, limits.gradients, f"{weights}; worst: {name}")


def documents(case: Case) -> Iterator[Line]:
    """Check that packed documents train as if alone, and that no document sees another."""
    batch, spans, pair, limit = case.sample.packed, case.sample.spans, case.pair, case.limits.isolation
    yield case.compare("documents", [batch], f"{len(spans)} in a row, against each alone")
    end = spans[2][1]
    # The last token but one: the document's last token sees the change, and the next document begins right after.
    changed_at = end - 2
    other = batch["input_ids"].clone()
    other[0, changed_at] = (other[0, changed_at] + 1) % pair.config.vocab_size
    before, shard = pair.shard_logits(batch)
    after, _ = pair.shard_logits({**batch, "input_ids": other})
    tokens = torch.arange(shard.layout.padded)[shard.layout.shard(pair.mesh.sequence_rank)]
    inside = (tokens >= changed_at) & (tokens < end)
    outside = (tokens < changed_at) | ((tokens >= end) & (tokens < case.sample.length))
    moved = max(pair.gather(_largest(before - after, inside)))
    leaked = max(pair.gather(_largest(before - after, outside)))
    if not moved:
        detail = "nothing is shown: no logit moves where a token changes, so these weights look at no token"
        yield Line("isolation", inf, limit, detail)
        return
    exactness = "bit for bit" if not limit else "but for the order of experts' sums"
    detail = f"others unchanged {exactness} where a token of one changes (its own logits move by {moved:.1e})"
    yield Line("isolation", leaked, limit, detail)


def document_bounds(case: Case) -> Iterator[Line]:
    """Check documents that begin on, before and after the bounds of shards, differently in every row."""
    batch = case.sample.bounded(case.pair.mesh.shards, firsts=not runs_whole(case.pair.base))
    detail = "three rows of unequal bounds: on every shard's, one token beside it, one document over all shards"
    yield case.compare("document bounds", [batch], detail)


def padding(case: Case) -> Iterator[Line]:
    """Check that padding is not attended, and counts in no loss."""
    yield case.compare("left padding", [case.sample.left_padded], "two rows, a third of one")
    yield case.compare("right padding", [case.sample.right_padded], "two rows, a third of one", logits=False)
    batch = case.sample.padded_shards(case.pair.mesh.shards)
    yield case.compare("padded shards", [batch], "the whole first shard of one row, the whole last of another")


def positions(case: Case) -> Iterator[Line]:
    """Check that positions are global, and that a RoPE that depends on the length sees the whole sequence's."""
    config, length = case.pair.config, case.sample.length
    by_length = any(depends_on_length(module) for module in case.pair.parallel.modules())
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # All layers share one RoPE, or each kind of layer has its own.
    ropes = [each for each in rope.values() if isinstance(each, dict)] or ([rope] if rope else [])
    kinds = sorted({str(each.get("rope_type", "default")) for each in ropes}) or ["none"]
    first_positions = [min(max(longest - length, 0), 1000)]
    if by_length:
        # The first shard ends at a length after which frequencies change; the next shard is beyond that length.
        shard_length = -(-length // case.pair.mesh.shards)
        first_positions = [max(switch - shard_length, 0) for switch in _switching_lengths(config, ropes, longest)]
    lines = [
        case.compare(
            "positions",
            [case.sample.from_position(first)],
            f"RoPE {' and '.join(kinds)}{', which looks at the length' if by_length else ''}; positions from "
            f"{' and '.join(map(str, first_positions))}",
        )
        for first in first_positions
    ]
    yield max(lines, key=lambda line: line.figure)


def _switching_lengths(config: Any, ropes: list[dict[str, Any]], longest: int) -> list[int]:
    """Return every length at which transformers' RoPE may change its frequencies, in order.

    `dynamic` reads max_position_embeddings, `longrope` original_max_position_embeddings, which may stand in the config, in
    the parameters of all layers, or in those of one kind of layer.
    """
    name = "original_max_position_embeddings"
    lengths = [*(each.get(name) for each in ropes), getattr(config, name, None), longest]
    return sorted({int(length) for length in lengths if length})


def masked_shards(case: Case) -> Iterator[Line]:
    """Check that a shard without targets adds zero to the loss, and not NaN."""
    batch = case.sample.learned_at_the_end
    yield case.compare("masked shards", [batch], "targets on the last shard only", logits=False)


def accumulation(case: Case) -> Iterator[Line]:
    """Check gradient accumulation: the mean is over all targets, and not over means of micro-batches."""
    detail = "three micro-batches of unequal size, one token mean"
    yield case.compare("accumulation", case.sample.unequal, detail, logits=False)


def evaluation(case: Case) -> Iterator[Line]:
    """Check the loss in evaluation, and that attention is sharded there too."""
    with recorded_attention() as calls:
        parity = case.pair.compare([case.sample.packed], evaluate=True, logits=False)
    layers = case.pair.config.num_hidden_layers
    error = parity.loss if calls.exchanges == 2 * layers else inf
    detail = f"eval() and no_grad(): {calls.exchanges} exchanges in {_layers(layers)}"
    yield Line("evaluation", error, case.limits.loss, detail)


def router_loss(case: Case) -> Iterator[Line]:
    """Compare the auxiliary loss over the whole batch, with its gradient through the routers."""
    if not adds_auxiliary_loss(case.pair.base, True):
        return
    batch: Any = {**case.sample.right_padded, "output_router_logits": True}
    yield case.compare("router loss", [batch], "auxiliary loss of the whole batch", logits=False)


def sharded(case: Case) -> Iterator[Line]:
    """Check that every layer's kernel takes all tokens of some heads, and that backward saves a rank's share."""
    pair, batch = case.pair, case.sample.right_padded
    with recorded_attention() as calls, saved_for_backward(pair.parallel) as saved:
        pair.mean_loss([batch], backward=True)
    ranks, layers = pair.mesh.shards, pair.config.num_hidden_layers
    padded = -(-batch["input_ids"].shape[1] // ranks) * ranks
    everyone = pair.gather((calls.from_model, calls.in_kernel))
    # Rank by rank, then layer by layer; a layer is right if its heads on all ranks are the model's.
    by_rank = [list(zip(from_model, in_kernel, strict=False)) for from_model, in_kernel in everyone]
    wrong = sum(not _is_whole(layer, padded) for layer in zip(*by_rank, strict=True))
    missing = max(0, layers - min(len(in_kernel) for _, in_kernel in everyone))
    # Below the first adapter all is frozen, and nothing goes back through such a layer's attention.
    backward = calls.with_gradient if has_adapters(pair.parallel) else layers
    off = wrong + missing + abs(calls.exchanges - 2 * layers - 2 * backward)
    heads = ", ".join(str(in_kernel[0][1] if in_kernel else 0) for _, in_kernel in everyone)
    detail = f"{_layers(layers)}, all {padded} tokens of {heads} heads on a rank, {calls.exchanges} exchanges a step"
    yield Line("attention is sharded", float(off), 0.0, detail)
    yield _activation_memory(case, batch, max(pair.gather(saved.bytes)))


def _is_whole(layer: tuple[tuple[tuple[int, int], tuple[int, int]], ...], padded: int) -> bool:
    """True if the ranks of one layer share out all heads, and each has all tokens; pairs of (tokens, heads)."""
    tokens = all(own[0] * len(layer) == padded and in_kernel[0] == padded for own, in_kernel in layer)
    return tokens and sum(in_kernel[1] for _, in_kernel in layer) == layer[0][0][1]


def _activation_memory(case: Case, batch: Batch, most: int) -> Line:
    """Compare the bytes that a rank saves for backward with those of one process."""
    pair = case.pair

    def count_bytes(plain: PreTrainedModel) -> int:
        plain.set_attn_implementation("sdpa" if plain._supports_sdpa else "eager")
        with pair.precision(), saved_for_backward(plain) as saved:
            plain(**pair.placed(batch), use_cache=False)
        return saved.bytes

    whole = int(pair.on_rank_0(count_bytes))
    detail = f"{most / 2**20:.2f} MiB kept for backward on a rank, {whole / 2**20:.2f} MiB in one process"
    return Line("activation memory", most / max(whole, 1), SAVED_FACTOR / pair.mesh.shards, detail)


def saving(case: Case) -> Iterator[Line]:
    """Check that plain transformers loads what `save_pretrained` writes, with the same weights and logits."""
    pair, folder = case.pair, case.folder / "saved"
    save_pretrained(pair.parallel, folder)
    batch = {key: case.sample.right_padded[key] for key in ("input_ids", "attention_mask")}

    def compare_loaded(plain: PreTrainedModel) -> float:
        plain.set_attn_implementation("eager")
        loaded = _load_as_others_do(plain, folder).to(pair.mesh.device).train()
        own = plain.state_dict()
        if any(not torch.equal(tensor, own[key]) for key, tensor in loaded.state_dict().items()):
            return inf
        with pair.precision(), torch.no_grad():
            got, want = (model(**pair.placed(batch), use_cache=False).logits for model in (loaded, plain))
        return relative_error(got, want)

    by = "adapters saved by themselves, loaded by peft" if has_adapters(pair.parallel) else "loaded by transformers"
    detail = f"save_pretrained, {by}: every weight bit for bit, and the logits"
    yield Line("save", pair.on_rank_0(compare_loaded), case.limits.saved, detail)


def _load_as_others_do(plain: PreTrainedModel, folder: Path) -> Any:
    """Load a whole model with transformers, or adapters onto the base of `plain` with peft."""
    if has_adapters(plain):
        return load_adapters(plain, folder)
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = plain.config._experts_implementation
    dtype = next(plain.parameters()).dtype
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")


def resuming(case: Case) -> Iterator[Line]:
    """Check that one process resumes a checkpoint of all ranks: the same losses from there on."""
    pair = case.pair
    optimizer = build_optimizer(pair.parallel, lr=LEARNING_RATE)
    tensors = state_tensors(pair.parallel, optimizer)
    checkpoints = Checkpoints(case.folder / "checkpoints", 1, pair.mesh, background=False)
    batches = case.sample.unequal
    losses = []
    for number, batch in enumerate(batches):
        pair.parallel.zero_grad(set_to_none=True)
        losses.append(pair.mean_loss([batch], backward=True))
        optimizer.step()
        if number == 0:
            checkpoints.save(1, tensors, {}, wait=True)
    path = checkpoints.latest()
    assert path is not None

    def resume(plain: PreTrainedModel) -> list[float]:
        own = build_optimizer(plain, lr=LEARNING_RATE)
        read_tensors(path, state_tensors(plain, own), None)
        found = []
        for batch in batches[1:]:
            plain.zero_grad(set_to_none=True)
            with pair.precision():
                found.append(reference(plain, [[pair.placed(batch)]]).loss)
            own.step()
        return found

    found = pair.on_rank_0(resume)
    error = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses[1:], found, strict=True))
    detail = f"saved by {pair.mesh.world} ranks, taken up by one: the next {len(found)} losses"
    yield Line("resume", error, case.limits.steps, detail)


Check = Callable[[Case], Iterator[Line]]
CHECKS: tuple[Check, ...] = (
    first_step, documents, document_bounds, padding, positions, masked_shards, accumulation, evaluation, router_loss,
    sharded, saving, resuming,
)  # fmt: skip


def recomputed_layers(case: Case) -> Iterator[Line]:
    """Compare a pair whose layers are recomputed in backward (activation checkpointing), in tiles."""
    detail = "recomputed in backward from saved inputs and attention outputs, in tiles"
    yield case.compare("layers run again", [case.sample.packed], detail)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _largest(difference_BLV: torch.Tensor, where_L: torch.Tensor) -> float:
    """Return the largest absolute difference over some tokens; 0 without tokens."""
    kept = difference_BLV[:, where_L.to(difference_BLV.device)]
    return float(kept.abs().max()) if kept.numel() else 0.0
