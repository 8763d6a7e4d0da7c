"""Refusals of model methods that need whole weights, for models with sharded weights.

Without the refusals these methods fail half-way with an error about DTensors. The refusals stay for as long as the
weights are sharded, so an unbound model has them too.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.errors import NOT_PICKLED, PART_NOT_PICKLED, UnsupportedError
from ithaca.handle import Handle
from ithaca.state.weights.partial_values import is_spread

_NO_RESIZING = (
    "resize_token_embeddings was called after parallelize, which spread the weights over ranks: resize the model before "
    "parallelize"
)


def refuse_whole_weights(handle: Handle, model: Any, base: Any) -> None:
    """Put the refusals on a model with sharded weights, and on the model inside it."""
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return
    put = partial(handle.replace_method, while_sharded=True)
    # The model inside an adapter's wrapper outlives the wrapper when the adapter is merged.
    for each in dict.fromkeys((model, base)):
        put(each, "load_state_dict", _LoadWhole(each, each.load_state_dict))
        put(each, "save_pretrained", ShardedSavePretrained(each.save_pretrained))
    put(base, "resize_token_embeddings", _Resize(base.resize_token_embeddings))
    copyreg.pickle(DTensor, _reduce_part)


def refuse_copy(model: nn.Module, _memo: Any) -> nn.Module:
    """Refuse `copy.deepcopy` of a sharded module."""
    raise UnsupportedError(
        f"{type(model).__name__} has weights that are spread over ranks, which copy.deepcopy cannot copy: copy the model "
        "before parallelize and parallelize the copy too (of an AveragedModel its .module), or copy the weights alone, "
        "[p.detach().clone() for p in model.parameters()]"
    )


def refuse_pickle(_model: nn.Module, _protocol: int) -> Any:
    """Refuse pickling of a sharded module."""
    raise UnsupportedError(NOT_PICKLED)


def _reduce_part(value: DTensor) -> Any:
    """Refuse to pickle a sharded weight, which would be written as this rank's part; pickle other DTensors as ever."""
    if is_spread(value):
        raise UnsupportedError(PART_NOT_PICKLED)
    return value.__reduce_ex__(2)


@dataclass(eq=False)
class ShardedSavePretrained:
    """Replacement of `save_pretrained`, which needs whole weights unless they are passed.

    `together`: function that saves from all ranks, if a caller has set one; else the call is refused.
    """

    original: Callable[..., None]
    together: Callable[..., None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("state_dict") is not None:
            # Weights that Trainer has gathered: one rank writes them.
            self.original(*args, **kwargs)
        elif self.together is not None:
            self.together(*args, **kwargs)
        else:
            raise UnsupportedError(
                "model.save_pretrained(folder) cannot read weights that are spread over ranks: call "
                "ithaca.save_pretrained(model, folder) on every rank"
            )


@dataclass(eq=False)
class _LoadWhole:
    """Replacement of `load_state_dict` that accepts sharded weights alone."""

    model: nn.Module
    original: Callable[..., Any]

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = self.model.state_dict()
        if any(
            _is_whole(state_dict[name]) and isinstance(own[name], DTensor) for name in own.keys() & state_dict.keys()
        ):
            raise UnsupportedError(
                "load_state_dict was given whole weights, and the model's are spread over ranks: load them before "
                "parallelize, or call torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True)) on every rank"
            )
        return self.original(state_dict, *args, **kwargs)


@dataclass(eq=False)
class _Resize:
    """Replacement of `resize_token_embeddings`; a call without a size just returns the embeddings."""

    original: Callable[..., Any]

    def __call__(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None and not args and not kwargs:
            return self.original()
        raise UnsupportedError(_NO_RESIZING)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)
