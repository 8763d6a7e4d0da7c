"""Habits of the plain PyTorch loop that change a model's weights by torch's own tools: ties, new weights, parametrizations."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.nn.utils import parametrizations, prune

import ithaca
from ithaca.verify.small_models.features import small_batch
from tests.doors.habits import Habit, exact, refused
from tests.doors.loops import loss_of
from tests.doors.plain import parallel, trained, whole

DOOR = "plain loop, a changed model"
EXCHANGED = "was exchanged for another parameter, or tied to one, after parallelize"
MIXED = "mixed torch.Tensor and DTensor"
UNKNOWN = r"torch cannot do .*: take the whole weight with weight\.full_tensor\(\)"


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def tied_by_config(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()


def new_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def with_a_seed(change: Callable[[Any], object], model: Any) -> None:
    torch.manual_seed(3)
    change(model.model.layers[0].mlp.up_proj)


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.3)


def pruned_for_good(module: nn.Module) -> None:
    pruned(module)
    prune.remove(module, "weight")


def unit_norm(model: Any) -> Any:
    """A plain tensor beside a split weight, in a term of the loss."""
    return (model.lm_head.weight - torch.ones(61, 32, dtype=torch.float64)).pow(2).sum()


def averaged_whole(sp: int | None) -> dict[str, Any]:
    """An average of whole weights on every rank, which split weights are mixed into."""
    mean = [p.detach().clone() for p in parallel(None)[0].parameters()]
    model, _ = parallel(sp)
    with torch.no_grad():
        for one, parameter in zip(mean, model.parameters(), strict=True):
            one.lerp_(parameter, 0.3)
    return {"first": mean[0]}


def state_into_plain(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    plain, _ = parallel(None)
    plain.load_state_dict(model.state_dict())
    return {"head": whole(plain.lm_head.weight)}


def masked(model: Any) -> None:
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[weight.abs() < 0.01] = 0.0


def _stepped(sp: int | None) -> tuple[Any, torch.optim.Optimizer]:
    model, mesh = parallel(sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, small_batch(2, 23), mesh).backward()
    optimizer.step()
    return model, optimizer


def _read_back(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_state(sp: int | None) -> dict[str, Any]:
    return dict(_read_back(_stepped(sp)[0].state_dict()))


def saved_optimizer(sp: int | None) -> dict[str, Any]:
    return {"first": _read_back(_stepped(sp)[1].state_dict())["state"][0]["exp_avg"]}


def saved_whole(sp: int | None) -> dict[str, Any]:
    """As the refusal proposes; loaded into a plain model."""
    options = checkpoint.StateDictOptions(full_state_dict=True)
    weights, state = _read_back(checkpoint.get_state_dict(*_stepped(sp), options=options))
    plain, _ = parallel(None)
    plain.load_state_dict(weights)
    return {"head": plain.lm_head.weight, "average": state["state"]["lm_head.weight"]["exp_avg"]}


def formatted(sp: int | None) -> dict[str, Any]:
    """The loss as a log shows it."""
    model, mesh = parallel(sp)
    loss = loss_of(model, small_batch(2, 23), mesh)
    return {"shown": float(f"{loss:.6f}"), "list": loss.tolist(), "saved": _read_back({"loss": loss})["loss"]}


def other_weights(sp: int | None) -> dict[str, Any]:
    """A call with weights that are made of the model's, as meta learning does."""
    model, mesh = parallel(sp)
    batch = small_batch(2, 24)
    inputs = {"input_ids": batch["input_ids"]} if mesh is None else ithaca.shard_batch(batch, mesh).inputs
    made = {name: weight * 1.01 for name, weight in model.named_parameters()}
    return {"logits": torch.func.functional_call(model, made, (), inputs).logits}


def last_logits(sp: int | None) -> dict[str, Any]:
    model, mesh = parallel(sp)
    batch = small_batch(2, 24)
    inputs = {"input_ids": batch["input_ids"]} if mesh is None else ithaca.shard_batch(batch, mesh).inputs
    return {"logits": model(**inputs, logits_to_keep=1).logits}


def _on_up(tool: Callable[[Any], object]) -> Any:
    return partial(with_a_seed, tool)


HABITS: list[Habit] = [
    exact(DOOR, "tie head and embeddings before `parallelize`", partial(trained, before=tied)),
    refused(DOOR, "tie head and embeddings after", partial(trained, after=tied), says=EXCHANGED, note="tie before `parallelize`"),
    refused(
        DOOR, "`model.tie_weights()` after, newly tied", partial(trained, after=tied_by_config),
        says=EXCHANGED, note="tie before `parallelize`",
    ),
    refused(
        DOOR, "a new parameter in a weight's place between steps", partial(trained, between=new_head),
        says=EXCHANGED, note="use `weight.copy_(value)`",
    ),
    exact(DOOR, "`parametrizations.weight_norm` before", partial(trained, before=_on_up(parametrizations.weight_norm))),
    exact(DOOR, "`parametrizations.spectral_norm` before", partial(trained, before=_on_up(parametrizations.spectral_norm))),
    exact(DOOR, "`nn.utils.spectral_norm` before", partial(trained, before=_on_up(nn.utils.spectral_norm))),
    exact(DOOR, "`prune.l1_unstructured` before", partial(trained, before=_on_up(pruned))),
    exact(DOOR, "pruned, and made permanent, before", partial(trained, before=_on_up(pruned_for_good))),
    refused(
        DOOR, "`parametrizations.weight_norm` after", partial(trained, after=_on_up(parametrizations.weight_norm)),
        says="after parallelize: add", note="call it before `parallelize`",
    ),
    refused(
        DOOR, "`prune.l1_unstructured` after", partial(trained, after=_on_up(pruned)),
        says=UNKNOWN, note="call it before `parallelize`",
    ),
    refused(
        DOOR, "`weight.data` sorted or selected by a mask", partial(trained, between=masked),
        says=UNKNOWN, note="sort or select from `weight.full_tensor()`",
    ),
    refused(
        DOOR, "a plain tensor beside a split weight", partial(trained, penalty=unit_norm),
        says=MIXED, error="RuntimeError", note="torch raises; use `weight.full_tensor()`",
    ),
    refused(
        DOOR, "an average of whole weights, split weights mixed in", averaged_whole,
        says=MIXED, error="RuntimeError", note="torch raises; use `weight.full_tensor()`",
    ),
    refused(
        DOOR, "`state_dict` of split weights into a plain model", state_into_plain,
        says=MIXED, error="RuntimeError", note="torch raises; use `get_model_state_dict` with `full_state_dict=True`",
    ),
    refused(
        DOOR, "`torch.save(model.state_dict())`", saved_state,
        says="would write this rank's part alone", note="use `ithaca.save_pretrained`, or `get_model_state_dict`",
    ),
    refused(
        DOOR, "`torch.save(optimizer.state_dict())`", saved_optimizer,
        says="would write this rank's part alone", note="use `get_state_dict` with `full_state_dict=True`",
    ),
    exact(DOOR, "`torch.save` of `get_state_dict(..., full_state_dict=True)`", saved_whole),
    refused(DOOR, "`torch.func.functional_call` with weights of one's own", other_weights, says=EXCHANGED),
    exact(DOOR, "the loss formatted, `f\"{loss:.4f}\"`, and saved with `torch.save`", formatted),
    refused(
        DOOR, "`logits_to_keep` on a shard", last_logits,
        says="it counts tokens of a whole row", note="leave it out",
    ),
]  # fmt: skip
