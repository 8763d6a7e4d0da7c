"""Scale and softcap of the logits, read from the model's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ithaca.loss.causal import causal_loss
from ithaca.memory.head_loss import LossSpec
from ithaca.mesh import init_mesh
from ithaca.models.layers.head import head_spec
from ithaca.parallelize import parallelize
from ithaca.verify.fp64 import promoted
from ithaca.verify.parity import gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import build, small_batch, small_config
from ithaca.verify.small_models.types import survey_config
from tests.ranks import run_ranks
from tests.tolerances import FP64

# A multiplier that a name would put on the other side of the fraction, caps, scales kept on the model, one before the head.
LOGITS: dict[str, tuple[dict[str, Any], LossSpec]] = {
    "llama": ({}, LossSpec()),
    "granite": ({"logits_scaling": 1.005}, LossSpec(scale=1 / 1.005)),
    "hyperclovax": ({"logits_scaling": 1.005}, LossSpec(scale=1.005)),
    "cohere": ({"logit_scale": 1.005}, LossSpec(scale=1.005)),
    "gemma2": ({"final_logit_softcapping": 7.0}, LossSpec(softcap=7.0)),
    "minicpm3": ({}, LossSpec(scale=4.0)),
    "gpt2": ({}, LossSpec()),
}


@pytest.mark.parametrize("kind", LOGITS)
def test_head_spec_surveyed_type_is_its_scale_and_cap(kind: str) -> None:
    settings, expected = LOGITS[kind]
    assert head_spec(build(survey_config(kind, **settings))) == expected


def _off(kind: str, settings: dict[str, Any], memory: str | None) -> tuple[float, float]:
    mesh, batch = init_mesh(sp=1), small_batch(2, 12)
    model = build(survey_config(kind, **settings))
    with promoted():
        expected = reference(copy.deepcopy(model), [[batch]])
        parallel = parallelize(model, mesh, memory=memory)  # type: ignore[arg-type]
        loss = causal_loss(parallel, batch, mesh)
        loss.backward()
    return abs(float(loss) - expected.loss), max(gradient_errors(parallel, expected.gradients).values())


@pytest.mark.parametrize("kind", ["hyperclovax", "granite"])
def test_loss_multiplier_near_one_equals_reference(kind: str) -> None:
    [(loss, gradients)] = run_ranks(1, _off, kind, {"logits_scaling": 1.005}, "auto")
    assert max(loss, gradients) < FP64


class Odd(LlamaForCausalLM):
    """Llama with an extra operation before or after its head."""

    before: Callable[[Any, Tensor], Tensor] = staticmethod(lambda self, hidden: hidden)
    after: Callable[[Any, Tensor], Tensor] = staticmethod(lambda self, logits: logits)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.0)

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.after(self, self.lm_head(self.before(self, hidden)))
        return CausalLMOutputWithPast(logits=logits)  # type: ignore[arg-type]


def odd(before: Any = None, after: Any = None) -> Odd:
    kind = type("OddForCausalLM", (Odd,), {})
    if before is not None:
        kind.before = staticmethod(before)  # type: ignore[attr-defined]
    if after is not None:
        kind.after = staticmethod(after)  # type: ignore[attr-defined]
    model: Odd = kind(small_config("llama"))
    return model.double().train()


def _doubled(self: Any, logits: Tensor) -> Tensor:
    logits[..., 0] *= 1.001
    return logits


FOLLOWED: dict[str, tuple[Any, Any, LossSpec]] = {
    "nothing": (None, None, LossSpec()),
    "in place": (None, lambda self, x: x.mul_(3.0).div_(2.0), LossSpec(scale=1.5)),
    "from the left": (None, lambda self, x: 2 * x.float(), LossSpec(scale=2.0)),
    "before the head": (lambda self, h: h / 4, None, LossSpec(scale=0.25)),
    "a cap of a scale": (None, lambda self, x: 6 * torch.tanh(x / 3), LossSpec(scale=2.0, softcap=6.0)),
}
REFUSED: dict[str, tuple[Any, Any]] = {
    "a weight": (None, lambda self, x: x * self.gain),
    "a dropout that is used in training": (lambda self, h: self.drop(h), None),
    "another norm": (lambda self, h: torch.nn.functional.rms_norm(h, h.shape[-1:]), None),
    "a number added": (None, lambda self, x: x + 1e-6),
    "one column": (None, _doubled),
    "two caps": (None, lambda self, x: torch.tanh(torch.tanh(x))),
    "less precision": (None, lambda self, x: x.bfloat16()),
    "the first tokens left out": (lambda self, h: h[:, 1:], None),
    "a hidden state written to": (lambda self, h: h.add_(1e-6), None),
    "a second head": (None, lambda self, x: x + self.lm_head(torch.zeros(32, dtype=x.dtype))),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_head_spec_numbers_around_head_are_found(what: str) -> None:
    before, after, expected = FOLLOWED[what]
    assert head_spec(odd(before, after)) == expected


@pytest.mark.parametrize("what", REFUSED)
def test_head_spec_other_operation_is_none(what: str) -> None:
    before, after = REFUSED[what]
    assert head_spec(odd(before, after)) is None


def test_head_spec_argument_added_by_forward_is_none() -> None:
    class Handing(Odd):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None] * 2, **kwargs)

    assert head_spec(Handing(small_config("llama")).double()) is None
