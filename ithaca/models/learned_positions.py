"""Positions that are learned stand in a table: one beyond its end is refused on all ranks, not found by the last alone.

The rank whose shard has the position would end with an index error (on a GPU, with a device assert) and leave the
others waiting. The largest position of the whole batch is in the layout, so that every rank sees it.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ithaca.errors import BatchError
from ithaca.sequence.layout import SequenceLayout

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of positions that the model's table holds; None if it has none."""
    config = model.config.get_text_config()
    lengths = {getattr(config, name, None) for name in _LENGTHS}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # Tables of BioGPT, and of others made after OPT, begin with rows that no position has.
    sizes = [table.num_embeddings - int(getattr(table, "offset", 0)) for table in tables]
    return min((size for size in sizes if size in lengths), default=None)


def refuse_beyond_table(positions: int | None, layout: SequenceLayout) -> None:
    """Refuse a batch with a position that the table does not hold."""
    if positions is not None and layout.max_position >= positions:
        raise BatchError(
            f"the batch has the position {layout.max_position}, this model has learned {positions}: pass position_ids of "
            f"0 to {positions - 1}, or shorter rows"
        )
