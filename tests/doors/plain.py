"""Habits of the plain PyTorch loop around the model object: optimizers, freezing, copying, saving."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ithaca
from ithaca.verify.small_models.features import small_batch, small_model
from tests.doors.habits import Habit, exact, refused
from tests.doors.loops import loss_of, norm_of
from tests.tolerances import LOSS

DOOR = "plain loop"
Change = Callable[[Any], object]


def whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def nothing(model: Any) -> None:
    """The loop of the README."""


def trained(
    sp: int | None,
    *,
    before: Change = nothing,
    after: Change = nothing,
    between: Change = nothing,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    optimizer_first: bool = False,
    schedule: bool = False,
    clip: float | None = None,
    scaler: bool = False,
    penalty: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Losses, norms and a weight of three steps; `before` and `after` parallelize, `between` two steps."""
    model: Any = small_model("llama")
    before(model)
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    optimizer = make_optimizer(model) if optimizer_first else None
    if mesh is not None:
        model = ithaca.parallelize(model, mesh)
    after(model)
    optimizer = optimizer or make_optimizer(model)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if schedule else None
    scale = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(model, small_batch(2, 23, seed=step), mesh)
        if penalty is not None:
            loss = loss + penalty(model)
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        losses.append(float(loss.detach()))
        norms.append(norm_of(model))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        if rates is not None:
            rates.step()
        between(model)
    weights = {"head": whole(model.lm_head.weight), "norm": whole(model.model.norm.weight)}
    return {"losses": losses, "norms": norms, "weights": weights}


def adamw(model: Any) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    head, *rest = reversed(list(model.parameters()))
    return torch.optim.AdamW([{"params": [head], "weight_decay": 0.0}, {"params": rest}], lr=1e-2, weight_decay=0.1)


def freeze_layer(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)


def freeze_on_rank_1(model: Any) -> None:
    model.model.layers[0].requires_grad_(not (dist.is_initialized() and dist.get_rank() == 1))


def unfreeze_layer(model: Any) -> None:
    model.model.layers[0].requires_grad_(True)


def grow(model: Any) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(70, mean_resizing=False)


def noise(model: Any) -> None:
    """The same noise for a whole weight and for its shards."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def l2_of_weights(model: Any) -> Any:
    return 0.01 * sum(layer.mlp.up_proj.weight.pow(2).sum() for layer in model.model.layers)


def l2_by_steps(model: Any) -> Any:
    """A loss that grows term by term."""
    return model.lm_head.weight.norm() + 0.1 * model.model.norm.weight.abs().sum()


def parallel(sp: int | None, **options: Any) -> tuple[Any, ithaca.Mesh | None]:
    model: Any = small_model("llama")
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    return (model if mesh is None else ithaca.parallelize(model, mesh, **options)), mesh


def averaged(sp: int | None) -> dict[str, Any]:
    """AveragedModel made before, and the copy in it parallelized too."""
    model: Any = small_model("llama")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    if mesh is not None:
        ithaca.parallelize(model, mesh)
        ithaca.parallelize(average.module, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, small_batch(2, 23, seed=step), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        loss = float(loss_of(average.module, small_batch(2, 23), mesh))
    return {"loss": loss, "head": whole(average.module.lm_head.weight)}


def averaged_by_hand(sp: int | None) -> dict[str, Any]:
    model, mesh = parallel(sp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        loss_of(model, small_batch(2, 23, seed=step), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 0.3)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), mean, strict=True):
            parameter.copy_(value)
        return {"loss": float(loss_of(model, small_batch(2, 23), mesh))}


def averaged_after(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    return {"head": whole(AveragedModel(model).module.lm_head.weight)}


def copied(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    return {"head": whole(copy.deepcopy(model).lm_head.weight)}


def copied_unsharded(sp: int | None) -> dict[str, Any]:
    """Where the weights are not spread, the copy learns by itself."""
    model, mesh = parallel(sp, weights="none")
    other = copy.deepcopy(model)
    loss_of(other, small_batch(2, 23), mesh).backward()
    assert all(p.grad is None for p in model.parameters())
    return {"loss": float(loss_of(other, small_batch(2, 23), mesh).detach())}


def resized_after(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    grow(model)
    return {"rows": len(model.lm_head.weight)}


def decoder_alone(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    return {"hidden": whole(model.model(small_batch(2, 23)["input_ids"]).last_hidden_state)}


def head_alone(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    return {"logits": whole(model.lm_head(torch.ones(1, 2, 32, dtype=torch.float64)))}


def embeddings_alone(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    return {"embeds": whole(model.get_input_embeddings()(small_batch(2, 23)["input_ids"]))}


def hidden_states(sp: int | None) -> dict[str, Any]:
    """A loss on hidden states of whole sequences, as the refusals propose."""
    model, mesh = parallel(sp)
    batch = {"input_ids": small_batch(2, 23)["input_ids"], "output_hidden_states": True}
    if mesh is None:
        hidden = model(**batch, use_cache=False).hidden_states
        sum(h.pow(2).mean() for h in hidden).backward()
    else:
        with ithaca.unsharded(model):
            hidden = model(**batch).hidden_states
            sum(h.pow(2).mean() for h in hidden).backward()
    return {"hidden": whole(hidden[-1]), "norm": norm_of(model)}


def embeddings_gathered(sp: int | None) -> dict[str, Any]:
    """Values of parts alone, as the refusals propose; the model trains on."""
    model, mesh = parallel(sp)
    ids = small_batch(2, 23)["input_ids"]
    if mesh is not None:
        model.unshard()
    with torch.no_grad():
        hidden = model.get_input_embeddings()(ids)
        logits = model.lm_head(hidden)
    if mesh is not None:
        model.reshard()
    loss = loss_of(model, small_batch(2, 23), mesh)
    loss.backward()
    return {"logits": whole(logits), "loss": float(loss.detach()), "norm": norm_of(model)}


def loaded_after(sp: int | None) -> dict[str, Any]:
    saved = small_model("llama", seed=3).state_dict()
    model, _ = parallel(sp)
    model.load_state_dict(saved)
    return {"head": whole(model.lm_head.weight)}


def loaded_whole(sp: int | None) -> dict[str, Any]:
    """As the refusal proposes, and gathered again."""
    saved = small_model("llama", seed=3).state_dict()
    model, mesh = parallel(sp)
    options = checkpoint.StateDictOptions(full_state_dict=True)
    checkpoint.set_model_state_dict(model, saved, options=options)
    gathered = checkpoint.get_model_state_dict(model, options=options)
    loss = loss_of(model, small_batch(2, 23), mesh)
    return {"loss": float(loss.detach()), "weights": dict(gathered)}


def pickled(sp: int | None) -> dict[str, Any]:
    model, _ = parallel(sp)
    file = io.BytesIO()
    torch.save(model, file)
    return {"bytes": 0 * len(file.getvalue())}


def generated(sp: int | None) -> dict[str, Any]:
    """Sampled, between two steps."""
    model, mesh = parallel(sp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, small_batch(2, 23), mesh).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(7)
    tokens = model.generate(small_batch(1, 9)["input_ids"], max_new_tokens=5, do_sample=True, pad_token_id=0)
    return {"tokens": tokens, "loss": float(loss_of(model, small_batch(2, 23), mesh).detach())}


def clip_old_list(sp: int | None) -> dict[str, Any]:
    model: Any = small_model("llama")
    parameters = list(model.parameters())
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    if mesh is not None:
        ithaca.parallelize(model, mesh)
    loss_of(model, small_batch(2, 23), mesh).backward()
    return {"norm": float(nn.utils.clip_grad_norm_(parameters, 1.0))}


def adapters_after(sp: int | None) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    model, mesh = parallel(sp)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    return {"loss": float(loss_of(model, small_batch(2, 23), mesh).detach())}


HABITS: list[Habit] = [
    exact(DOOR, "train three steps", trained),
    exact(
        DOOR, "make the optimizer before `parallelize`", partial(trained, optimizer_first=True, make_optimizer=adamw),
        note="the optimizer and its state continue with the shards",
    ),
    exact(
        DOOR, "make optimizer and scheduler before", partial(trained, optimizer_first=True, schedule=True),
    ),
    exact(DOOR, "parameter groups with settings of their own", partial(trained, make_optimizer=adamw)),
    exact(DOOR, "a learning rate scheduler", partial(trained, schedule=True)),
    exact(DOOR, "`clip_grad_norm_`", partial(trained, clip=0.5)),
    refused(
        DOOR, "clip a list of parameters taken before `parallelize`", clip_old_list,
        says="take lists of parameters to clip", note="take the list after `parallelize`",
    ),
    exact(DOOR, "`torch.amp.GradScaler`", partial(trained, scaler=True, clip=0.5), within=LOSS),
    exact(DOOR, "freeze layers before `parallelize`", partial(trained, before=freeze_layer)),
    exact(DOOR, "freeze layers after `parallelize`", partial(trained, after=freeze_layer)),
    exact(DOOR, "freeze layers between steps", partial(trained, between=freeze_layer)),
    refused(
        DOOR, "freeze layers on one rank", partial(trained, between=freeze_on_rank_1),
        says="train different weights", note="freeze the same layers on all ranks",
    ),
    exact(DOOR, "unfreeze layers between steps", partial(trained, before=freeze_layer, between=unfreeze_layer)),
    exact(DOOR, "change weights in place", partial(trained, after=noise, between=noise)),
    exact(DOOR, "an L2 term on weights", partial(trained, penalty=l2_of_weights)),
    exact(DOOR, "norms of weights in the loss", partial(trained, penalty=l2_by_steps)),
    exact(DOOR, "`generate` between steps", generated),
    exact(DOOR, "resize the embeddings before `parallelize`", partial(trained, before=grow)),
    refused(
        DOOR, "resize the embeddings after `parallelize`", resized_after,
        says="resize the model before parallelize", note="resize before `parallelize`",
    ),
    refused(
        DOOR, "add adapters after `parallelize`", adapters_after,
        says="after parallelize: add adapters and the like before it", note="add adapters before `parallelize`",
    ),
    exact(
        DOOR, "`AveragedModel` made before `parallelize`", averaged,
        note="call `parallelize` on `averaged.module` too",
    ),
    refused(DOOR, "`AveragedModel` made after", averaged_after, says="of an AveragedModel its .module",
            note="make it before `parallelize`"),
    exact(DOOR, "an average of weights kept by hand", averaged_by_hand),
    refused(DOOR, "`copy.deepcopy` of the model", copied, says="copy the model before parallelize",
            note="copy before `parallelize`"),
    exact(DOOR, "`copy.deepcopy` with `weights=\"none\"`", copied_unsharded),
    refused(
        DOOR, "call `model.model(...)` by itself", decoder_alone,
        says="LlamaModel was called by itself, .* call the whole model", note="call the whole model",
    ),
    refused(DOOR, "call `model.lm_head(...)` by itself", head_alone, says="Linear was called by itself",
            note="call the whole model"),
    refused(DOOR, "call the embeddings by themselves", embeddings_alone, says="Embedding was called by itself",
            note="call the whole model"),
    exact(DOOR, "hidden states of whole sequences in a loss", hidden_states, note="inside `ithaca.unsharded(model)`"),
    exact(
        DOOR, "values of the embeddings and the head alone", embeddings_gathered,
        note="between `model.unshard()` and `model.reshard()`, without gradients",
    ),
    refused(
        DOOR, "`load_state_dict` of whole weights after `parallelize`", loaded_after,
        says="load them before parallelize", note="load before `parallelize`, or use `set_model_state_dict`",
    ),
    exact(DOOR, "`set_model_state_dict` and `get_model_state_dict` of whole weights", loaded_whole),
    refused(DOOR, "`torch.save(model)`", pickled, says="ithaca.save_pretrained",
            note="use `ithaca.save_pretrained(model, folder)`"),
]  # fmt: skip
