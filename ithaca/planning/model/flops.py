"""FLOPs of a model's own work: the one count behind every "utilisation", TFLOP/s and price of work done again.

A product of a token with a weight is two FLOPs. The work of a step is what one pass over the data takes, however the
step is run: no credit for what memory plans run again.

    linear     2 * N a token forward; twice that backward, once where the weight is frozen (the input's gradient alone)
    adapters   2 * N a token forward, twice that backward
    attention  2 * (D + E) * H for every pair of a query and a key that it may see: half of the square of a document,
               or a window's share of it; 2.5 times that backward, because flash kernels form the scores again there
    head       as a linear layer of the vocabulary; the embedding is looked up and counts nothing

`N` counts the experts that a token goes to. Documents attend to themselves alone, so their lengths are what counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ithaca.planning.memory_plan import Job
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes

# Backward of attention forms the scores again: five products where forward has two.
ATTENTION_BACKWARD = 2.5


def token_flops(layer: LayerSizes, job: Job) -> int:
    """One forward of a layer's token-wise work on one rank."""
    return 2 * (layer.attention + layer.active) * job.tokens


def attention_flops(sizes: ModelSizes, layer: LayerSizes, job: Job) -> int:
    """One forward of a layer's attention on the rank with most heads, every row being one document."""
    heads, _ = sizes.split(job.sp).most
    # Keys of a token, twice their mean: the length itself but for a window.
    reach = job.length if layer.window is None else 2 * pairs(job.length, layer.window) / job.length
    return int(job.whole * reach * heads * (sizes.key_size + sizes.value_size))


def pairs(length: int, window: int | None) -> float:
    """Pairs of a query and a key in a causal document: half of the square, without those further apart than `window`."""
    beyond = 0 if window is None else max(0, length - window)
    return (length**2 - beyond**2) / 2


def model_flops(sizes: ModelSizes, documents: Mapping[int, int], tokens: int) -> float:
    """Forward and backward of the whole model over so many tokens, padding included, on however many ranks.

    `documents`: how often each length of a document occurs.
    """
    # Layers of equal sizes are asked about once: this is done every step.
    alike = Counter(sizes.layers)
    weights = sum(many * (layer.attention + layer.active) for layer, many in alike.items()) + sizes.embedding
    linear = 2 * weights * tokens
    seen = sum(
        many * often * pairs(length, layer.window)
        for layer, many in alike.items()
        for length, often in documents.items()
    )
    attention = 2 * sizes.heads * (sizes.key_size + sizes.value_size) * seen
    attention *= 1 + ATTENTION_BACKWARD
    if not sizes.adapters:
        return 3 * linear + attention
    in_layers = sizes.adapters - sizes.beside
    in_place = max(0, sizes.in_place - sizes.beside)
    # What is trained in place costs its own gradient; an adapter beside it is multiplied by besides.
    trained = 3 * (in_layers - in_place) + in_place + sizes.trained_head
    return 2 * linear + 2 * trained * tokens + attention


def utilisation(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """FLOPs of the whole job against what so many cards could have done meanwhile; `peak`: FLOP/s of one."""
    return flops / (seconds * ranks * peak)
