"""FLOPs of a model's own work: the one count behind every utilisation, TFLOP/s and price of recomputed work.

A product of a token with a weight is two FLOPs. A step's work is one forward and backward over its data, however the
step runs: recomputed work earns no credit.

    linear     2 * N a token forward; twice that backward, once for a frozen weight (only the input's gradient)
    adapters   2 * N a token forward, twice that backward
    attention  2 * (D + E) * H for every visible pair of a query and a key: half of the square of a document, or the part
               of it inside the window; 2.5 times that backward, because flash kernels compute the scores again there
    head       as a linear layer of the vocabulary; the embedding is a lookup and counts nothing

`N` counts the experts that a token visits. Tokens attend within their own document, so the count depends on the lengths
of documents, not of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ithaca.planning.memory_plan import Job
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes

# Attention's backward has five matrix products (one computes the scores again), its forward two.
ATTENTION_BACKWARD = 2.5


def token_flops(layer: LayerSizes, job: Job) -> int:
    """Return the FLOPs of a layer's token-wise work in one forward on one rank."""
    return 2 * (layer.attention + layer.active) * job.tokens


def attention_flops(sizes: ModelSizes, layer: LayerSizes, job: Job) -> int:
    """Return the FLOPs of a layer's attention in one forward on the rank with most heads; every row is one document."""
    heads, _ = sizes.split(job.sp).most
    # Twice the mean number of visible keys: the whole length without a window.
    keys = job.length if layer.window is None else 2 * visible_pairs(job.length, layer.window) / job.length
    return int(job.whole * keys * heads * (sizes.key_size + sizes.value_size))


def visible_pairs(length: int, window: int | None) -> float:
    """Return the number of visible pairs of a query and a key in a causal document, within `window` tokens if given."""
    beyond = 0 if window is None else max(0, length - window)
    return (length**2 - beyond**2) / 2


def model_flops(sizes: ModelSizes, documents: Mapping[int, int], tokens: int) -> float:
    """Return the FLOPs of the whole model's forward and backward over `tokens` tokens, summed over all ranks.

    `tokens` includes padding. `documents`: the number of documents of each length.
    """
    # Equal layers are counted once, as this function runs every step.
    layers = Counter(sizes.layers)
    weights = sum(count * (layer.attention + layer.active) for layer, count in layers.items()) + sizes.embedding
    linear = 2 * weights * tokens
    pairs = sum(
        layer_count * document_count * visible_pairs(length, layer.window)
        for layer, layer_count in layers.items()
        for length, document_count in documents.items()
    )
    attention = 2 * sizes.heads * (sizes.key_size + sizes.value_size) * pairs
    attention *= 1 + ATTENTION_BACKWARD
    if not sizes.adapters:
        return 3 * linear + attention
    in_layers = sizes.adapters - sizes.beside
    in_place = max(0, sizes.in_place - sizes.beside)
    # A model weight that is trained adds its gradient (its forward is in `linear`); an adapter adds all three products.
    trained = 3 * (in_layers - in_place) + in_place + sizes.trained_head
    return 2 * linear + 2 * trained * tokens + attention


def utilisation(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the whole job's FLOPs as a share of `ranks` devices' peak in that time; `peak`: FLOP/s of one device."""
    return flops / (seconds * ranks * peak)
