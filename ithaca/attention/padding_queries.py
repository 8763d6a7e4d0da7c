"""Attention of the queries at padding, as transformers computes it: for losses that read logits at padding too.

No real token attends to padding, so attention at padding changes a loss only if the loss reads outputs there. A
layout's `padding` names the rule:

    zero       zeros: nothing is computed, and no gradient comes back (training on labels; flash-attention in transformers)
    masked     the row's document under the causal mask and the window, zeros where a query sees no key (sdpa)
    averaged   the same, but the mean of all values where a query sees no key (eager: its mask is a finite number, which
               hides the scores and lets their gradients pass)

A right-padded query sees the whole document, a left-padded one sees nothing:

    keys       . . a b c       a b c . .        . padding      x a query sees the key
    query 0    - - - - -       x - - - -
    query 4    - - x x x       x x x - -        rows without a mask have no padding, so no query here

Padding of a row of several documents belongs to none of them and stays zero, since transformers makes masks of packed
rows without padding. The computation is plain torch, block by block of queries: logits of whole rows take
[S, vocabulary] of memory, and a block's scores are small beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients
from ithaca.heads import HeadRange
from ithaca.sequence.layout import SequenceLayout, Span

# Number of queries whose scores are in memory at once.
BLOCK = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring queries at padding in one row, and their keys; `blind`: they see no key and average over all."""

    row: int
    queries: Span
    keys: Span
    blind: bool


@dataclass(frozen=True, slots=True)
class PaddingAttention:
    """Adds the attention at padding to the kernels' results of the documents, in forward and in backward."""

    layout: SequenceLayout
    spec: AttentionSpec
    runs: tuple[HeadRange, ...]
    with_sinks: bool

    def attend(self, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor) -> None:
        """Write `out` and `lse` at padding, which are zero before."""
        for block, run in self._blocks():
            queries, heads = slice(*block.queries), slice(*run.q)
            q_PkgD, k_NkD, v_NkE = self._read(block, run, qkv, lse_BhS.dtype)
            scores_PkgN = self._hidden(block, self._scores(q_PkgD, k_NkD)[0])
            lse_Pkg = scores_PkgN.logsumexp(-1)
            weights_PkgN = torch.exp(scores_PkgN - lse_Pkg.unsqueeze(-1))
            out_PhE = torch.einsum("pkgn,nke->pkge", weights_PkgN, v_NkE).flatten(1, 2)
            out_BShE[block.row, queries, heads] = out_PhE.to(out_BShE.dtype)
            lse_BhS[block.row, heads, queries] = lse_Pkg.flatten(1, 2).T

    def attend_backward(self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, grads: Gradients) -> None:
        """Add the gradients of q, k and v that come from padding."""
        dq_BShD, dk_BSkD, dv_BSkE = grads
        for block, run in self._blocks():
            queries, keys = slice(*block.queries), slice(*block.keys)
            heads, kv, group = slice(*run.q), slice(*run.kv), _group(run)
            q_PkgD, k_NkD, v_NkE = self._read(block, run, qkv, lse_BhS.dtype)
            dout_PkgE, out_PkgE = (
                x[block.row, queries, heads].to(lse_BhS.dtype).unflatten(1, (-1, group)) for x in (dout_BShE, out_BShE)
            )
            scores_PkgN, slope = self._scores(q_PkgD, k_NkD)
            lse_Pkg1 = lse_BhS[block.row, heads, queries].T.unflatten(1, (-1, group)).unsqueeze(-1)
            weights_PkgN = torch.exp(self._hidden(block, scores_PkgN) - lse_Pkg1)
            delta_Pkg1 = (dout_PkgE * out_PkgE).sum(-1, keepdim=True)
            dscores_PkgN = weights_PkgN * (torch.einsum("pkge,nke->pkgn", dout_PkgE, v_NkE) - delta_Pkg1)
            dscores_PkgN = dscores_PkgN * slope * self.spec.scale
            dq_PhD = torch.einsum("pkgn,nkd->pkgd", dscores_PkgN, k_NkD).flatten(1, 2)
            dq_BShD[block.row, queries, heads] = dq_PhD.to(dq_BShD.dtype)
            dk_BSkD[block.row, keys, kv] += torch.einsum("pkgn,pkgd->nkd", dscores_PkgN, q_PkgD).to(dk_BSkD.dtype)
            dv_BSkE[block.row, keys, kv] += torch.einsum("pkgn,pkge->nke", weights_PkgN, dout_PkgE).to(dv_BSkE.dtype)

    def _blocks(self) -> Iterator[tuple[Block, HeadRange]]:
        for row, documents in enumerate(self.layout.documents):
            if len(documents) > 1:
                continue
            for queries, blind in self._spans(documents[0] if documents else None):
                keys = (0, self.layout.length) if blind else documents[0]
                for start in range(*queries, BLOCK):
                    for run in self.runs:
                        yield Block(row, (start, min(start + BLOCK, queries[1])), keys, blind), run

    def _spans(self, document: Span | None) -> list[tuple[Span, bool]]:
        """Return the spans of padding up to the batch's length, each with True if its queries see no key."""
        total = self.layout.length
        start, end = document or (total, total)
        # `first`: the first query before the document that sees a key of it. `last`: the first after it that sees none.
        first, last = (start, end) if document is None or self.spec.causal else (0, total)
        if document is not None:
            window = total if self.spec.window is None else self.spec.window
            first, last = max(first, start - window + 1), min(total, end - 1 + window)
        spans = [((0, first), True), ((first, start), False), ((end, last), False), ((last, total), True)]
        # With a sink and no visible key the sink has all the weight, and the output is zero.
        averages = self.layout.padding == "averaged" and not self.with_sinks
        return [(span, blind) for span, blind in spans if span[0] < span[1] and (averages or not blind)]

    def _hidden(self, block: Block, scores_PkgN: Tensor) -> Tensor:
        """Return the masked scores; equal scores for blind queries."""
        if block.blind:
            return torch.zeros_like(scores_PkgN)
        if self.spec.window is None:
            return scores_PkgN
        queries, keys = (torch.arange(*span, device=scores_PkgN.device) for span in (block.queries, block.keys))
        outside_PN = (queries[:, None] - keys).abs() >= self.spec.window
        return scores_PkgN.masked_fill(outside_PN[:, None, None], -torch.inf)

    def _read(self, block: Block, run: HeadRange, qkv: QKV, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's queries, grouped by kv head, and its keys and values, in lse's precision."""
        q_PhD = qkv.q[block.row, slice(*block.queries), slice(*run.q)].to(exact)
        k_NkD, v_NkE = (x[block.row, slice(*block.keys), slice(*run.kv)].to(exact) for x in (qkv.k, qkv.v))
        return q_PhD.unflatten(1, (-1, _group(run))), k_NkD, v_NkE

    def _scores(self, q_PkgD: Tensor, k_NkD: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the scores before the mask, [P, k, g, N], and the derivative of the softcap."""
        scores_PkgN = torch.einsum("pkgd,nkd->pkgn", q_PkgD, k_NkD) * self.spec.scale
        cap = self.spec.softcap
        if cap is None:
            return scores_PkgN, 1.0
        bent_PkgN = torch.tanh(scores_PkgN / cap)
        return cap * bent_PkgN, 1 - bent_PkgN.square()


def _group(run: HeadRange) -> int:
    """Return the number of query heads of a kv head."""
    return (run.q[1] - run.q[0]) // (run.kv[1] - run.kv[0])
