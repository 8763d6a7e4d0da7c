"""Facts about types that are measured on a small model, or read from the type's config class.

    measured("gemma2")   {"slides_if_set": False, "norms_in_fp32": True, "centred": False, "one_norm": False, "gated": True}

A model of small sizes is built as the config's defaults have it. A norm runs on bf16, and the dtype of the product with
its weight is looked at; an MLP runs on a few tokens, and the widths of its linear maps are.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from ithaca.models.support import decoder_layers
from ithaca.planning.model.architectures import ArchitectureFacts
from ithaca.verify.small_models.features import build
from ithaca.verify.small_models.types import survey_config
from tools.survey.stated import stated

MEASURED = ("slides_if_set", "norms_in_fp32", "centred", "one_norm", "gated")


def facts_row(kind: str) -> dict[str, Any]:
    """Return the facts about a type that differ from Llama's: those measured, if plans count its parameters, and stated."""
    row = stated(kind)
    if is_measured(kind):
        llama = ArchitectureFacts()
        row |= {name: value for name, value in measured(kind).items() if value != getattr(llama, name)}
    return {field.name: row[field.name] for field in fields(ArchitectureFacts) if field.name in row}


def is_measured(kind: str) -> bool:
    """True if plans count the type's parameters. Configs of a model's other names ("gpt-sw3") give the type itself."""
    return bool(stated(kind).get("counted")) and AutoConfig.for_model(kind).model_type == kind


def measured(kind: str) -> dict[str, Any]:
    """Return the measured facts about a type."""
    # Twice an inner width is not the hidden size, so that widths tell the maps of an MLP apart.
    other = {"moe_intermediate_size": 12} if hasattr(survey_config(kind), "moe_intermediate_size") else {}
    model = build(survey_config(kind, **other), dtype=torch.float32)
    children = dict(decoder_layers(model)[-1].named_children())
    norms = [child for child in children.values() if is_norm(child)]
    block = next(
        child for name, child in children.items() if name in ("mlp", "feed_forward", "block_sparse_moe", "moe")
    )
    gated = is_gated(block, model.config.hidden_size)
    fp32, centred = arithmetic_of(norms[0])
    slides = hasattr(AutoConfig.for_model(kind), "use_sliding_window")
    return dict(zip(MEASURED, (slides, fp32, centred, len(norms) == 1, gated), strict=True))


def is_norm(module: nn.Module) -> bool:
    """True if the module has weights, and of one dimension alone, or is called a norm."""
    weights = list(module.parameters())
    return (bool(weights) and all(w.dim() == 1 for w in weights)) or "norm" in type(module).__name__.lower()


class _Products(TorchFunctionMode):
    """Record products with a norm's weight, differences from a mean, and widths of linear maps."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weights, self.means = ([] if weight is None else [weight]), []  # type: tuple[list[Tensor], list[Tensor]]
        self.fp32 = self.centred = False
        self.widths: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        of_weight = any(each is held for each in args for held in self.weights)
        if name in ("float", "to", "add", "radd") and of_weight:
            # Some norms store their weight less 1.
            self.weights.append(result)
        if name in ("mul", "rmul") and of_weight:
            self.fp32 = result.dtype == torch.float32
        if name == "mean":
            self.means.append(result)
        if name in ("sub", "rsub") and any(each is mean for each in args for mean in self.means):
            self.centred = True
        if name in ("linear", "addmm", "matmul", "bmm"):
            self.widths.append((args[name == "addmm"].shape[-1], result.shape[-1]))
        return result


def arithmetic_of(norm: nn.Module) -> tuple[bool, bool]:
    """Return whether a norm on bf16 multiplies fp32 by its weight, and whether it takes the mean off by an operation."""
    weight = next(norm.parameters(), None)
    if weight is None:
        return False, False
    norm.to(torch.bfloat16)
    with torch.no_grad(), _Products(weight) as seen:
        norm(torch.randn(1, 2, len(weight), dtype=torch.bfloat16))
    return seen.fp32, seen.centred


def is_gated(mlp: nn.Module, hidden: int) -> bool:
    """True if the maps into the inner width give twice that width."""
    with torch.no_grad(), _Products() as seen:
        mlp(torch.randn(1, 4, hidden))
    inner = [before for before, after in seen.widths if after == hidden]
    into = sum(after for before, after in seen.widths if before == hidden and after in (inner[0], 2 * inner[0]))
    return into == 2 * inner[0] * inner.count(inner[0])
