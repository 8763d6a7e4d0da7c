"""The checks of `ithaca verify`, one function each: a pair of models and a sample in, lines of the checklist out.

Every function runs on all ranks alike and gives the same lines there. Those at the end of `CHECKS` change weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ithaca.models.experts import has_experts, wants_auxiliary_loss
from ithaca.models.files.write_weights import save_pretrained
from ithaca.models.rope import depends_on_length
from ithaca.state.checkpoint.checkpoints import Checkpoints
from ithaca.state.checkpoint.dcp import read_tensors
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.verify.adapters import has_adapters, load_adapters
from ithaca.verify.batches import Batch, Sample
from ithaca.verify.fp64 import relative_error
from ithaca.verify.pair import Pair
from ithaca.verify.parity import reference, runs_whole
from ithaca.verify.probes import kept_for_backward, watched
from ithaca.verify.tolerances import SHARE, Limits, limits_for

# A step that moves the loss, and yet stays where rounding is not blown up.
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the checklist: it is right where `figure` is at most `limit`."""

    name: str
    figure: float
    limit: float
    detail: str

    @property
    def ok(self) -> bool:
        return self.figure <= self.limit


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works on. `folder` is empty, and the same for all ranks."""

    pair: Pair
    sample: Sample
    folder: Path

    @property
    def limits(self) -> Limits:
        dtype = next(self.pair.parallel.parameters()).dtype
        return limits_for(dtype, experts=has_experts(self.pair.config))

    def parity(self, name: str, batches: list[Batch], detail: str, **options: Any) -> Line:
        """The part of a comparison that is nearest to its limit."""
        part, error, limit = self.pair.compare(batches, **options).worst(self.limits)
        return Line(name, error, limit, f"{detail}; worst: {part}")


def first_step(bench: Bench) -> Iterator[Line]:
    """Loss, logits and every gradient of the user's own rows."""
    batches = bench.sample.plain
    errors, limits = bench.pair.compare(batches), bench.limits
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    rows = f"{len(batches)} row{'s' if len(batches) > 1 else ''} of {bench.sample.origin}, {tokens} tokens"
    yield Line("loss", errors.loss, limits.loss, rows)
    yield Line("logits", errors.logits, limits.logits, "of every token")
    yield Line("gradients", errors.gradients, limits.gradients, f"{_trained(bench)}; worst: {errors.where}")


def _trained(bench: Bench) -> str:
    """Whose gradients are compared; what is frozen has none on either side, or it is off."""
    trains = [parameter.requires_grad for parameter in bench.pair.parallel.parameters()]
    frozen = len(trains) - sum(trains)
    return f"of all {sum(trains)} weights{f' of adapters, none of {frozen} frozen ones' if frozen else ''}"


def documents(bench: Bench) -> Iterator[Line]:
    """Packed documents learn as if alone, and see nothing of each other."""
    batch, spans = bench.sample.packed, bench.sample.spans
    yield bench.parity("documents", [batch], f"{len(spans)} in a row, against each alone")
    end = spans[2][1]
    # The last token but one: later tokens of the document see the change, and the next document begins right after.
    place = end - 2
    other = batch["input_ids"].clone()
    other[0, place] = (other[0, place] + 1) % bench.pair.config.vocab_size
    before, shard = bench.pair.own_logits(batch)
    after, _ = bench.pair.own_logits({**batch, "input_ids": other})
    tokens = torch.arange(shard.layout.padded)[shard.layout.shard(bench.pair.mesh.sequence_rank)]
    inside = (tokens >= place) & (tokens < end)
    outside = (tokens < place) | ((tokens >= end) & (tokens < bench.sample.length))
    changed = max(bench.pair.gathered(_largest(before - after, inside)))
    leaked = max(bench.pair.gathered(_largest(before - after, outside)))
    if not changed:
        detail = "nothing is shown: no logit moves where a token changes, so these weights look at no token"
        yield Line("isolation", float("inf"), bench.limits.isolation, detail)
        return
    kind = "bit for bit" if not bench.limits.isolation else "but for the order of experts' sums"
    detail = f"others unchanged {kind} where a token of one changes (its own logits move by {changed:.1e})"
    yield Line("isolation", leaked, bench.limits.isolation, detail)


def document_bounds(bench: Bench) -> Iterator[Line]:
    """Documents that begin on, before and after the bounds of shards, other ones in every row."""
    shards = bench.pair.mesh.shards
    batch = bench.sample.bounded(shards, firsts=not runs_whole(bench.pair.base))
    detail = "three rows of unequal bounds: on every shard's, one token beside it, one document over all shards"
    yield bench.parity("document bounds", [batch], detail)


def padding(bench: Bench) -> Iterator[Line]:
    """Padding is not attended, and counts in no loss."""
    yield bench.parity("left padding", [bench.sample.left_padded], "two rows, a third of one")
    yield bench.parity("right padding", [bench.sample.right_padded], "two rows, a third of one", logits=False)
    batch = bench.sample.padded_shards(bench.pair.mesh.shards)
    yield bench.parity("padded shards", [batch], "the whole first shard of one row, the whole last of another")


def positions(bench: Bench) -> Iterator[Line]:
    """Positions are global, and a RoPE that looks at the length sees the whole sequence's."""
    config, length = bench.pair.config, bench.sample.length
    by_length = any(depends_on_length(module) for module in bench.pair.parallel.modules())
    most = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = sorted({str(one.get("rope_type", "default")) for one in _ropes(rope)}) or ["none"]
    # Where the length counts, the first shard ends at a length after which the frequencies change, the next one beyond.
    shard = -(-length // bench.pair.mesh.shards)
    firsts = [max(turn - shard, 0) for turn in _turns(config, rope, most)]
    firsts = firsts if by_length else [min(max(most - length, 0), 1000)]
    lines = [
        bench.parity(
            "positions",
            [bench.sample.from_position(first)],
            f"RoPE {' and '.join(kinds)}{', which looks at the length' if by_length else ''}; positions from "
            f"{' and '.join(map(str, firsts))}",
        )
        for first in firsts
    ]
    yield max(lines, key=lambda line: line.figure)


def _ropes(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of every RoPE in a config: of all layers, or of each kind of layer."""
    return [one for one in rope.values() if isinstance(one, dict)] or ([rope] if rope else [])


def _turns(config: Any, rope: dict[str, Any], most: int) -> list[int]:
    """Every length at which transformers' RoPE may change its frequencies, in order: `dynamic` goes by
    max_position_embeddings, `longrope` by original_max_position_embeddings, which may stand in three places."""
    name = "original_max_position_embeddings"
    given = [one.get(name) for one in _ropes(rope)] + [getattr(config, name, None), most]
    return sorted({int(turn) for turn in given if turn})


def masked_shards(bench: Bench) -> Iterator[Line]:
    yield bench.parity(
        "masked shards", [bench.sample.learned_at_the_end], "targets on the last shard only", logits=False
    )


def accumulation(bench: Bench) -> Iterator[Line]:
    detail = "three micro-batches of unequal size, one token mean"
    yield bench.parity("accumulation", bench.sample.unequal, detail, logits=False)


def evaluation(bench: Bench) -> Iterator[Line]:
    """The same loss, and still on shards."""
    batches = [bench.sample.packed]
    with watched() as seen:
        errors = bench.pair.compare(batches, evaluate=True, logits=False)
    layers = bench.pair.config.num_hidden_layers
    sharded = seen.exchanges == 2 * layers
    error = errors.loss if sharded else float("inf")
    detail = f"eval() and no_grad(): {seen.exchanges} exchanges in {layers} layer{'s' * (layers > 1)}"
    yield Line("evaluation", error, bench.limits.loss, detail)


def router_loss(bench: Bench) -> Iterator[Line]:
    """The auxiliary loss over the whole batch, its gradient through the routers included."""
    if not wants_auxiliary_loss(bench.pair.base, True):
        return
    batch: Any = {**bench.sample.right_padded, "output_router_logits": True}
    yield bench.parity("router loss", [batch], "auxiliary loss of the whole batch", logits=False)


def sharded(bench: Bench) -> Iterator[Line]:
    """Every layer's kernel saw all tokens of some heads, and backward keeps a rank's share."""
    pair = bench.pair
    batch = bench.sample.right_padded
    with watched() as seen, kept_for_backward(pair.parallel) as kept:
        pair.loss([batch], backward=True)
    ranks, padded = pair.mesh.shards, -(-batch["input_ids"].shape[1] // pair.mesh.shards) * pair.mesh.shards
    everyone = pair.gathered((seen.brought, seen.attended))
    layers = pair.config.num_hidden_layers
    wrong = sum(
        1
        for layer in zip(*(list(zip(brought, attended, strict=False)) for brought, attended in everyone), strict=True)
        if not _is_whole(list(layer), ranks, padded)
    )
    missing = max(0, layers - min(len(attended) for _, attended in everyone))
    heads = [attended[0][1] if attended else 0 for _, attended in everyone]
    each = ", ".join(map(str, heads))
    detail = f"{layers} layer{'s' * (layers > 1)}, all {padded} tokens of {each} heads on a rank"
    detail += f", {seen.exchanges} exchanges a step"
    # Where all is frozen up to a layer's attention, as below the first adapter, nothing goes back through it.
    back = seen.learned if has_adapters(pair.parallel) else layers
    off = wrong + missing + abs(seen.exchanges - 2 * layers - 2 * back)
    yield Line("attention is sharded", float(off), 0.0, detail)
    yield _share_kept(bench, batch, max(pair.gathered(kept.bytes)))


def _share_kept(bench: Bench, batch: Batch, most: int) -> Line:
    """A rank's saved bytes as a share of what one process saves."""
    pair = bench.pair

    def alone(plain: PreTrainedModel) -> int:
        plain.set_attn_implementation("sdpa" if plain._supports_sdpa else "eager")
        with pair.mode(), kept_for_backward(plain) as kept:
            plain(**pair.placed(batch), use_cache=False)
        return kept.bytes

    whole = int(pair.on_rank_0(alone))
    detail = f"{most / 2**20:.2f} MiB kept for backward on a rank, {whole / 2**20:.2f} MiB in one process"
    return Line("activation memory", most / max(whole, 1), SHARE / pair.mesh.shards, detail)


def saving(bench: Bench) -> Iterator[Line]:
    """What `save_pretrained` writes loads in plain transformers to the same logits."""
    pair, folder = bench.pair, bench.folder / "saved"
    save_pretrained(pair.parallel, folder)
    batch = {key: bench.sample.right_padded[key] for key in ("input_ids", "attention_mask")}

    def load(plain: PreTrainedModel) -> float:
        plain.set_attn_implementation("eager")
        loaded = _load(plain, folder).to(pair.mesh.device).train()
        own = plain.state_dict()
        if any(not torch.equal(tensor, own[key]) for key, tensor in loaded.state_dict().items()):
            return float("inf")
        with pair.mode(), torch.no_grad():
            got, want = (model(**pair.placed(batch), use_cache=False).logits for model in (loaded, plain))
        return relative_error(got, want)

    by = "adapters saved by themselves, loaded by peft" if has_adapters(pair.parallel) else "loaded by transformers"
    detail = f"save_pretrained, {by}: every weight bit for bit, and the logits"
    yield Line("save", pair.on_rank_0(load), bench.limits.saved, detail)


def _load(plain: PreTrainedModel, folder: Path) -> Any:
    """What stands in `folder`, as others read it: a whole model, or adapters for the base of `plain`."""
    if has_adapters(plain):
        return load_adapters(plain, folder)
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = plain.config._experts_implementation
    dtype = next(plain.parameters()).dtype
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")


def resuming(bench: Bench) -> Iterator[Line]:
    """A checkpoint of all ranks, taken up by one process: the same losses from there on."""
    pair = bench.pair
    optimizer = build_optimizer(pair.parallel, lr=LEARNING_RATE)
    tensors = state_tensors(pair.parallel, optimizer)
    keeper = Checkpoints(bench.folder / "checkpoints", 1, pair.mesh, background=False)
    batches = bench.sample.unequal
    losses = []
    for number, batch in enumerate(batches):
        pair.parallel.zero_grad(set_to_none=True)
        losses.append(pair.loss([batch], backward=True))
        optimizer.step()
        if number == 0:
            keeper.save(1, tensors, {}, wait=True)
    path = keeper.latest()
    assert path is not None

    def take_up(plain: PreTrainedModel) -> list[float]:
        own = build_optimizer(plain, lr=LEARNING_RATE)
        read_tensors(path, state_tensors(plain, own), None)
        found = []
        for batch in batches[1:]:
            plain.zero_grad(set_to_none=True)
            with pair.mode():
                found.append(reference(plain, [[pair.placed(batch)]]).loss)
            own.step()
        return found

    found = pair.on_rank_0(take_up)
    error = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses[1:], found, strict=True))
    detail = f"saved by {pair.mesh.world} ranks, taken up by one: the next {len(found)} losses"
    yield Line("resume", error, bench.limits.steps, detail)


Check = Callable[[Bench], Iterator[Line]]
CHECKS: tuple[Check, ...] = (
    first_step, documents, document_bounds, padding, positions, masked_shards, accumulation, evaluation, router_loss,
    sharded, saving, resuming,
)  # fmt: skip


def run_again(bench: Bench) -> Iterator[Line]:
    """For a pair whose layers are run again in backward, in tiles."""
    yield bench.parity("layers run again", [bench.sample.packed], "from saved inputs and anchors, in tiles")


def _largest(difference: torch.Tensor, where: torch.Tensor) -> float:
    kept = difference[:, where.to(difference.device)]
    return float(kept.abs().max()) if kept.numel() else 0.0


def _is_whole(layer: list[tuple[tuple[int, int], tuple[int, int]]], ranks: int, padded: int) -> bool:
    """Of one layer on all ranks: (tokens, heads) brought and attended."""
    tokens = all(brought[0] * ranks == padded and attended[0] == padded for brought, attended in layer)
    return tokens and sum(attended[1] for _, attended in layer) == layer[0][0][1]
