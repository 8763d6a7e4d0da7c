"""Checkpoints through accelerate's own FSDP2 functions, which Trainer and `save_state` call if they find a plugin.

The state is written shard by shard (DCP), so that a run can be resumed on another number of ranks. `save_model` writes
Hugging Face's format: Trainer does so only if the name of the state dict's type contains FULL_STATE_DICT.
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
    """A type equal to SHARDED_STATE_DICT, for checkpoints, with both types in its name, for `save_model`."""

    def __eq__(self, other: object) -> bool:
        return other is StateDictType.SHARDED_STATE_DICT

    def __hash__(self) -> int:
        return hash(StateDictType.SHARDED_STATE_DICT)

    def __str__(self) -> str:
        return "SHARDED_STATE_DICT for checkpoints, FULL_STATE_DICT for save_model"


def checkpoint_plugin() -> Any:
    """Return an FSDP2 plugin, by which Trainer and accelerate choose how to save and load."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    plugin.state_dict_type = ShardedAndWhole()
    return plugin


@dataclass(frozen=True)
class WriteTogether:
    """`model.save_pretrained` of sharded weights: every rank calls the method, rank 0 writes.

    `inside`: True for the model that a PEFT model wraps.
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
    """Let `save_pretrained` of a parallelized model, and of the model inside a PEFT model, write over all ranks."""
    handle = handle_of(model)
    assert handle is not None
    # After `merge_and_unload` the model inside is saved like any other.
    for saved in dict.fromkeys((model, base_model(model))):
        save: Any = saved.save_pretrained
        if not isinstance(save, ShardedSavePretrained):
            save = ShardedSavePretrained(save)
            handle.replace_method(saved, "save_pretrained", save)
        save.together = WriteTogether(saved, inside=saved is not model)
