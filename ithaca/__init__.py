"""Ithaca: Hugging Face language models, trained exactly on sequences of a million tokens and more.

Public names are imported from their modules at first use, so that `import ithaca` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ithaca.attention.kernels import KERNELS as KERNELS
    from ithaca.attention.ulysses import ulysses_attention as ulysses_attention
    from ithaca.errors import BatchError as BatchError
    from ithaca.errors import IthacaError as IthacaError
    from ithaca.errors import MeshError as MeshError
    from ithaca.errors import PeerError as PeerError
    from ithaca.errors import UnsupportedError as UnsupportedError
    from ithaca.integrations.config import UlyssesConfig as UlyssesConfig
    from ithaca.loss.causal import causal_loss as causal_loss
    from ithaca.loss.causal import count_tokens as count_tokens
    from ithaca.loss.reduce import reduce_mean as reduce_mean
    from ithaca.mesh import Mesh as Mesh
    from ithaca.mesh import init_mesh as init_mesh
    from ithaca.models.binding import unbind as unbind
    from ithaca.models.binding_state import unsharded as unsharded
    from ithaca.models.files.write_weights import save_pretrained as save_pretrained
    from ithaca.parallelize import parallelize as parallelize
    from ithaca.planning.memory_plan import MemoryPlan as MemoryPlan
    from ithaca.sequence.batch import Shard as Shard
    from ithaca.sequence.batch import shard_batch as shard_batch
    from ithaca.sequence.collate import SequenceCollator as SequenceCollator
    from ithaca.sequence.layout import SequenceLayout as SequenceLayout
    from ithaca.state.optimizer.build import build_optimizer as build_optimizer
    from ithaca.state.weights.placement import recover as recover

__version__ = "0.1.0"

_HOMES = {
    "KERNELS": "ithaca.attention.kernels",
    "ulysses_attention": "ithaca.attention.ulysses",
    "BatchError": "ithaca.errors",
    "IthacaError": "ithaca.errors",
    "MeshError": "ithaca.errors",
    "PeerError": "ithaca.errors",
    "UnsupportedError": "ithaca.errors",
    "UlyssesConfig": "ithaca.integrations.config",
    "Mesh": "ithaca.mesh",
    "init_mesh": "ithaca.mesh",
    "unbind": "ithaca.models.binding",
    "unsharded": "ithaca.models.binding_state",
    "MemoryPlan": "ithaca.planning.memory_plan",
    "Shard": "ithaca.sequence.batch",
    "shard_batch": "ithaca.sequence.batch",
    "SequenceCollator": "ithaca.sequence.collate",
    "SequenceLayout": "ithaca.sequence.layout",
    "build_optimizer": "ithaca.state.optimizer.build",
    "save_pretrained": "ithaca.models.files.write_weights",
    "recover": "ithaca.state.weights.placement",
    "reduce_mean": "ithaca.loss.reduce",
    "causal_loss": "ithaca.loss.causal",
    "count_tokens": "ithaca.loss.causal",
}
__all__ = ["__version__", "parallelize", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ithaca' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Package on which `ithaca.parallelize` is the function even after the module `ithaca.parallelize` was imported."""

    @property
    def parallelize(self) -> Any:
        return import_module("ithaca.parallelize").parallelize

    @parallelize.setter
    def parallelize(self, module: ModuleType) -> None:
        # The import system binds a submodule to its package's attribute; the function keeps the name.
        pass


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
