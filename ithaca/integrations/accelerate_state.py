"""Checkpoints through accelerate's own FSDP2 functions, which Trainer and `save_state` call when they find a plugin.

The state is written shard by shard (DCP), so that it can be resumed on another number of ranks. `save_model` writes the
standard format besides: Trainer does that for full state dicts only, and asks by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

from ithaca.errors import UnsupportedError
from ithaca.handle import handle_of
from ithaca.models.files.write_weights import save_pretrained
from ithaca.models.support import base_model
from ithaca.state.weights.whole_weight_methods import ShardedSavePretrained


class ShardedAndWhole:
    """Equal to SHARDED_STATE_DICT, for the functions that write a checkpoint; named so that `save_model` works too."""

    def __eq__(self, other: object) -> bool:
        return other is StateDictType.SHARDED_STATE_DICT

    def __hash__(self) -> int:
        return hash(StateDictType.SHARDED_STATE_DICT)

    def __str__(self) -> str:
        return "SHARDED_STATE_DICT for checkpoints, FULL_STATE_DICT for save_model"


def checkpoint_plugin() -> Any:
    """FSDP2, for those who ask the Accelerator how its weights are placed."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    plugin.state_dict_type = ShardedAndWhole()
    return plugin


@dataclass(frozen=True)
class WriteTogether:
    """`model.save_pretrained` of a model whose weights may be spread over ranks: every rank calls it, rank 0 writes.

    `inside`: the model is the one that an adapter's wraps.
    """

    model: nn.Module
    inside: bool = False

    def __call__(self, save_directory: Any, *_args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        if self.inside and hasattr(self.model, "peft_config"):
            raise UnsupportedError(
                "save_pretrained of the model inside an adapter's: save the PEFT model, which writes the adapter, or call "
                "merge_and_unload() and save what it gives"
            )
        size = kwargs.get("max_shard_size")
        save_pretrained(self.model, save_directory, **({"max_shard_size": size} if size is not None else {}))


def save_together(model: nn.Module) -> None:
    """Let `save_pretrained` of a parallelized model, and of the one that an adapter's wraps, write over all ranks."""
    handle = handle_of(model)
    assert handle is not None
    # An adapter that is merged leaves the model inside, which is saved as any other.
    for saved in dict.fromkeys((model, base_model(model))):
        save: Any = saved.save_pretrained
        if not isinstance(save, ShardedSavePretrained):
            save = ShardedSavePretrained(save)
            handle.replace_method(saved, "save_pretrained", save)
        save.together = WriteTogether(saved, inside=saved is not model)
