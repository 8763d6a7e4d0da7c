"""Refusal of positions beyond a table of learned positions, on all ranks.

Only the rank whose shard has such a position would fail, with an index error (on a GPU, a device assert), and the other
ranks would wait for it. The layout has the largest position of the whole batch, so every rank can check it.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ithaca.errors import BatchError
from ithaca.sequence.layout import SequenceLayout

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in the model's table; None if it has none."""
    config = model.config.get_text_config()
    lengths = {getattr(config, name, None) for name in _LENGTHS}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # Tables made after OPT's, such as BioGPT's, begin with `offset` rows that no position has.
    sizes = [table.num_embeddings - int(getattr(table, "offset", 0)) for table in tables]
    return min((size for size in sizes if size in lengths), default=None)


def refuse_beyond_table(positions: int | None, layout: SequenceLayout) -> None:
    """Refuse a batch with a position that is not in the table."""
    if positions is not None and layout.max_position >= positions:
        raise BatchError(
            f"the batch has the position {layout.max_position}, this model has learned {positions}: pass position_ids of "
            f"0 to {positions - 1}, or shorter rows"
        )
