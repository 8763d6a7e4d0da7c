"""A trial of architectures that were never measured: no module but attention may read another token.

Tokens are split over ranks, and attention alone is exchanged between ranks. The trial runs the model on a few tokens, with
an attention function that computes each token's output from the token's own query, key and value. Two tests:

    mixing      a NaN in one token must stay in that token, in evaluation and in training mode (batch norm, or code that
                reads `self.training`). A convolution over tokens, a recurrent state or attention in code of its own
                carries the NaN to other tokens, and the error names the first such module
    positions   the second half of the tokens, alone and with its own position_ids, must give the same logits as inside
                the whole row

The trial does not see a limit that exists in a mask alone (a window, chunks): the replaced function ignores masks.
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
from ithaca.models.discover.dependence import rounding_tolerance
from ithaca.models.discover.random_weights import randomized
from ithaca.models.discover.roles import training_mode
from ithaca.models.refusals.foreign_code import foreign_within
from ithaca.planning.model.architectures import verdicts

_NAME = "ithaca-token-by-token"
_ROWS, _LENGTH, _MARKED = 2, 8, 3


def check_mixing(model: PreTrainedModel, layers: list[nn.Module], mesh: Mesh) -> None:
    """Refuse a mixing model if its architecture was never measured, or if its modules have code of the user's own.

    User code on a single rank is not tried: that rank has all tokens.
    """
    foreign = foreign_within(model) if mesh.shards > 1 else None
    if foreign is not None or str(model.config.model_type) not in verdicts():
        with randomized(model, layers, torch.device("cpu")):
            refuse_mixing(model, foreign)


def refuse_mixing(model: PreTrainedModel, foreign: str | None = None) -> None:
    """Raise UnsupportedError if a token's logits depend on other tokens beside attention, or on its index in the input.

    `foreign`: the user's module because of which a measured architecture is tried again.
    """
    embedding: Any = model.get_input_embeddings()
    kind = str(model.config.model_type)
    tried = f"the architecture {kind!r} was never measured" if foreign is None else f"{foreign} is code of your own"
    if foreign is None and "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{tried}, and the model's forward takes no position_ids: every shard would begin at position 0"
        )
    mixing: list[str] = []
    handles: list[Any] = []
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with torch.no_grad(), training_mode(model, training=False), _tokenwise_attention(model):
            whole, half = _logits(model, 0), _logits(model, _LENGTH // 2)
            handles = [embedding.register_forward_hook(_mark_one_token), *_find_mixing(model, mixing)]
            spread = _reaches_others(_logits(model, 0))
            with training_mode(model, training=True), torch.enable_grad(), torch.random.fork_rng(devices=devices):
                spread |= _reaches_others(_logits(model, 0))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedError(
            f"{tried}, and the model does not run with attention token by token "
            f"({type(error).__name__}: {error}): architectures that attend through transformers' interface do"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if spread:
        what = f"{mixing[0]} reads" if mixing else "something in it reads"
        raise UnsupportedError(
            f"{tried}, and {what} tokens of the row beside attention: on every shard "
            "but the first it would begin from nothing; architectures whose tokens meet in attention alone are exact"
        )
    alone, within = half.double(), whole[:, _LENGTH // 2 :].double()
    if float((alone - within).norm()) > rounding_tolerance(model, whole) * float(within.norm()):
        raise UnsupportedError(
            f"{tried}, and the model counts positions from the start of what it is given rather "
            "than from position_ids: every shard would begin at position 0"
        )


def _logits(model: PreTrainedModel, start: int) -> Tensor:
    """Return the logits of the tokens from `start` on, run with their positions in the whole row."""
    device = next(model.parameters()).device
    ids = torch.arange(3, 3 + _ROWS * _LENGTH, device=device).view(_ROWS, _LENGTH)
    positions = torch.arange(_LENGTH, device=device).expand(_ROWS, -1)
    vocabulary = int(model.config.get_text_config().vocab_size)
    output: Any = model(input_ids=ids[:, start:] % vocabulary, position_ids=positions[:, start:], use_cache=False)
    logits: Tensor = output.logits
    return logits


def _attend_to_self(
    module: nn.Module, q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention's `[B, L, H, E]` output, each token's from the token's own query, key and value."""
    copies = q_BHLD.shape[1] // k_BKLD.shape[1]
    weights_D = torch.linspace(0.5, 1.5, q_BHLD.shape[-1], device=q_BHLD.device, dtype=q_BHLD.dtype)
    shift_BHL = (q_BHLD * weights_D).mean(-1) + (k_BKLD * weights_D).mean(-1).repeat_interleave(copies, dim=1)
    out_BHLE = v_BKLE.repeat_interleave(copies, dim=1) + shift_BHL[..., None]
    return out_BHLE.transpose(1, 2).contiguous(), None


# Registered at import rather than in the trial, so that a trial leaves the registry unchanged.
ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend_to_self)


@contextmanager
def _tokenwise_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's attention layers call `_attend_to_self`."""
    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _mark_one_token(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    marked = output.clone()
    marked[0, _MARKED] = torch.nan
    return marked


def _reaches_others(x: Tensor) -> bool:
    """True if any token of `[B, L, ...]` other than the marked one has a NaN."""
    marks_BL = x.isnan().flatten(2).any(-1)
    marks_BL[0, _MARKED] = False
    return bool(marks_BL.any())


def _find_mixing(model: nn.Module, mixing: list[str]) -> list[Any]:
    """Hook every module; the first that carries the NaN to another token is appended to `mixing`, by path and class."""

    def compare(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [x for x in (*args, *kwargs.values()) if _is_per_token(x)]
            first = output[0] if isinstance(output, tuple) else output
            if (
                not mixing
                and given
                and _is_per_token(first)
                and _reaches_others(first)
                and not any(map(_reaches_others, given))
            ):
                mixing.append(f"{name} ({type(module).__name__})")

        return hook

    return [m.register_forward_hook(compare(name), with_kwargs=True) for name, m in model.named_modules() if name]


def _is_per_token(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3 and x.shape[:2] == (_ROWS, _LENGTH)
