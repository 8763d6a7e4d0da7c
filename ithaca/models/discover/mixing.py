"""A trial of architectures that were never measured: nothing but attention may read another token.

Tokens are split over ranks, and attention alone is run over all of them. The model is run on a few tokens with a function
in attention's place that treats every token alone, and then

    mixing      a NaN in one token must stay in that token, in evaluation and in training (a batch norm, code that asks
                `self.training`): a convolution over tokens, a state that runs along them, or attention in code of its
                own carries it on, and the first module that does is named
    positions   the second half of the tokens, alone and with its own position_ids, must give what it gives in the whole

What stands in a mask alone (a window, chunks) is not seen here: the mask is for the function that is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh
from ithaca.models.discover.dependence import rounding
from ithaca.models.discover.random_weights import randomized
from ithaca.models.discover.roles import switched
from ithaca.models.refusals.foreign_code import foreign_within
from ithaca.planning.model.architectures import verdicts

_NAME = "ithaca-token-by-token"
_ROWS, _LENGTH, _MARKED = 2, 8, 3


def check_mixing(model: PreTrainedModel, layers: list[nn.Module], mesh: Mesh) -> None:
    """Try a model whose architecture was never measured, or that has code of the user's own where tokens are split."""
    foreign = foreign_within(model) if mesh.shards > 1 else None
    if foreign is not None or str(model.config.model_type) not in verdicts():
        with randomized(model, layers, torch.device("cpu")):
            refuse_mixing(model, foreign)


def refuse_mixing(model: PreTrainedModel, foreign: str | None = None) -> None:
    """Raise where a token's logits read other tokens by anything but attention, or its place by anything but position_ids.

    `foreign`: the module of the user's own for which a measured architecture is tried again.
    """
    embedding: Any = model.get_input_embeddings()
    kind = str(model.config.model_type)
    tried = f"the architecture {kind!r} was never measured" if foreign is None else f"{foreign} is code of your own"
    if foreign is None and "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{tried}, and the model's forward takes no position_ids: every shard would begin at position 0"
        )
    seen: list[str] = []
    handles: list[Any] = []
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with torch.no_grad(), switched(model, training=False), _token_by_token(model):
            whole, half = _logits(model, 0), _logits(model, _LENGTH // 2)
            handles = [embedding.register_forward_hook(_mark), *_watch(model, seen)]
            spread = _spread(_logits(model, 0))
            with switched(model, training=True), torch.enable_grad(), torch.random.fork_rng(devices=devices):
                spread |= _spread(_logits(model, 0))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedError(
            f"{tried}, and the model does not run with attention token by token "
            f"({type(error).__name__}: {error}): architectures that attend through transformers' interface do"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if spread:
        what = f"{seen[0]} reads" if seen else "something in it reads"
        raise UnsupportedError(
            f"{tried}, and {what} tokens of the row beside attention: on every shard "
            "but the first it would begin from nothing; architectures whose tokens meet in attention alone are exact"
        )
    alone, within = half.double(), whole[:, _LENGTH // 2 :].double()
    if float((alone - within).norm()) > rounding(model, whole) * float(within.norm()):
        raise UnsupportedError(
            f"{tried}, and the model counts positions from the start of what it is given rather "
            "than from position_ids: every shard would begin at position 0"
        )


def _logits(model: PreTrainedModel, start: int) -> Tensor:
    """Of the tokens from `start` on, at their own positions."""
    device = next(model.parameters()).device
    ids = torch.arange(3, 3 + _ROWS * _LENGTH, device=device).view(_ROWS, _LENGTH)
    positions = torch.arange(_LENGTH, device=device).expand(_ROWS, -1)
    vocabulary = int(model.config.get_text_config().vocab_size)
    output: Any = model(input_ids=ids[:, start:] % vocabulary, position_ids=positions[:, start:], use_cache=False)
    logits: Tensor = output.logits
    return logits


def _alone(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
    """In attention's place: `[B, H, L, D]` in, `[B, L, H, E]` out, of each token's own query, key and value."""
    copies = q.shape[1] // k.shape[1]
    weigh_D = torch.linspace(0.5, 1.5, q.shape[-1], device=q.device, dtype=q.dtype)
    turned = (q * weigh_D).mean(-1) + (k * weigh_D).mean(-1).repeat_interleave(copies, dim=1)
    out = v.repeat_interleave(copies, dim=1) + turned[..., None]
    return out.transpose(1, 2).contiguous(), None


# Once for the process, so that a trial leaves the registry as it was.
ALL_ATTENTION_FUNCTIONS.register(_NAME, _alone)


@contextmanager
def _token_by_token(model: PreTrainedModel) -> Iterator[None]:
    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _mark(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    marked = output.clone()
    marked[0, _MARKED] = torch.nan
    return marked


def _spread(x: Tensor) -> bool:
    """True if a token other than the marked one holds a mark; `[B, L, ...]`."""
    marks_BL = x.isnan().flatten(2).any(-1)
    marks_BL[0, _MARKED] = False
    return bool(marks_BL.any())


def _watch(model: nn.Module, seen: list[str]) -> list[Any]:
    """Hook every module; the first whose output is marked where its input is not goes into `seen`, by path and class."""

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [x for x in (*args, *kwargs.values()) if _of_tokens(x)]
            first = output[0] if isinstance(output, tuple) else output
            if not seen and given and _of_tokens(first) and _spread(first) and not any(map(_spread, given)):
                seen.append(f"{name} ({type(module).__name__})")

        return hook

    return [m.register_forward_hook(look(name), with_kwargs=True) for name, m in model.named_modules() if name]


def _of_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3 and x.shape[:2] == (_ROWS, _LENGTH)
