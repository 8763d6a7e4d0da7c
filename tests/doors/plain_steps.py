"""Habits of the plain PyTorch loop around a step: optimizers of torch, numbers read off weights, numbers drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ithaca.verify.small_models.features import small_batch
from tests.doors.habits import Habit, exact, refused
from tests.doors.loops import loss_of
from tests.doors.plain import parallel, trained, whole

DOOR = "plain loop, steps and numbers"
READ = r"call \.full_tensor\(\) on it first"
DRAWN = "each rank draws numbers of its own"


def by_name(name: str, **options: Any) -> Callable[[Any], Optimizer]:
    kind: Any = getattr(torch.optim, name)
    return partial(_made, kind, options)


def _made(kind: Any, options: dict[str, Any], model: Any) -> Optimizer:
    parameters = [p for p in model.parameters() if p.ndim == 2] if kind is torch.optim.Muon else model.parameters()
    optimizer: Optimizer = kind(parameters, lr=1e-2, **options)
    return optimizer


def transformers_adafactor(model: Any) -> Optimizer:
    from transformers import Adafactor

    return Adafactor(model.parameters(), lr=1e-2, relative_step=False)


def with_closure(sp: int | None, *, kind: str) -> dict[str, Any]:
    """`optimizer.step(closure)`, with a scheduler and hooks of the user's own."""
    model, mesh = parallel(sp)
    optimizer = by_name(kind)(model)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1.0))
    optimizer.register_step_post_hook(lambda *_: seen.append(2.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, small_batch(2, 23, seed=len(seen)), mesh)
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        rates.step()
    return {"losses": losses, "hooks": seen, "head": whole(model.lm_head.weight)}


def after_backward(sp: int | None, *, look: Callable[[Any], Any]) -> dict[str, Any]:
    """What a look at the gradients of one step finds."""
    model, mesh = parallel(sp)
    loss_of(model, small_batch(2, 23), mesh).backward()
    return {"found": look(model)}


def written_norm(model: Any) -> float:
    return float(f"{nn.utils.clip_grad_norm_(model.parameters(), 1e9):.4f}")


def clipped_norm(model: Any) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def rows_kept(model: Any) -> Any:
    """Only some tokens' rows are to learn; the new ones start from the mean."""
    weight = model.lm_head.weight
    weight.grad[:50].zero_()
    with torch.no_grad():
        weight[55:] = weight[:55].mean(0, keepdim=True)
    return {"grad": whole(weight.grad), "weight": whole(weight)}


def masked_rows(model: Any) -> Any:
    weight = model.lm_head.weight
    mask = (torch.arange(len(weight)) > 9).to(weight.dtype)[:, None].expand(weight.shape).contiguous()
    if isinstance(weight, DTensor):
        mask = distribute_tensor(mask, weight.device_mesh, weight.placements)
    weight.grad.mul_(mask)
    return {"grad": whole(weight.grad)}


def norm_by_hand(model: Any) -> float:
    return float(sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5)


def whole_norm_by_hand(model: Any) -> Any:
    """Tensors all the way, clipped by them."""
    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(1 / (norm + 1e-6))
    return {"norm": whole(norm), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def largest(model: Any) -> float:
    return max(float(p.grad.abs().max()) for p in model.parameters())


def any_nan(model: Any) -> float:
    return float(any(torch.isnan(p.grad).any() for p in model.parameters()))


def clipped_values(model: Any) -> Any:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def weight_norm(model: Any) -> float:
    return float(model.lm_head.weight.norm())


def one_number(model: Any) -> float:
    return float(model.lm_head.weight[60, 3])


def noisy(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)
    return {name: whole(p) for name, p in model.named_parameters()}


def drawn_again(model: Any) -> Any:
    torch.manual_seed(5)
    for p in model.parameters():
        nn.init.normal_(p)
    return {name: whole(p) for name, p in model.named_parameters()}


def dropped(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        model.lm_head.weight.copy_(nn.functional.dropout(model.lm_head.weight, 0.5))
    return whole(model.lm_head.weight)


def exponential(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        model.lm_head.weight.exponential_()
    return whole(model.lm_head.weight)


def noise_cut(model: Any) -> Any:
    """As the refusal proposes."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, dtype=p.dtype)
            p.add_(
                distribute_tensor(drawn, p.device_mesh, p.placements) if isinstance(p, DTensor) else drawn, alpha=0.01
            )
    return {name: whole(p) for name, p in model.named_parameters()}


HABITS: list[Habit] = [
    *(
        exact(DOOR, f"`torch.optim.{name}`", partial(trained, make_optimizer=by_name(name)))
        for name in ("Adafactor", "Muon", "Rprop", "ASGD", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "Adamax")
    ),
    exact(DOOR, "Adafactor of transformers", partial(trained, make_optimizer=transformers_adafactor)),
    exact(
        DOOR, "Adafactor made before `parallelize`, with a scheduler",
        partial(trained, make_optimizer=by_name("Adafactor"), optimizer_first=True, schedule=True),
    ),
    exact(DOOR, "`optimizer.step(closure)` and hooks on the step, Adafactor", partial(with_closure, kind="Adafactor")),
    exact(DOOR, "`optimizer.step(closure)` and hooks on the step, AdamW", partial(with_closure, kind="AdamW")),
    refused(
        DOOR, "`torch.optim.LBFGS`", partial(with_closure, kind="LBFGS"),
        says="reads all weights as one vector", note="use another optimizer",
    ),
    refused(
        DOOR, "`torch.optim.SGD(fused=True)`", partial(trained, make_optimizer=by_name("SGD", fused=True)),
        says="pass foreach=True", note="use `foreach=True`; Adam's and AdamW's `fused=True` are exact",
    ),
    exact(DOOR, "`torch.optim.AdamW(fused=True)`", partial(trained, make_optimizer=by_name("AdamW", fused=True))),
    exact(DOOR, "`float(clip_grad_norm_(...))`", partial(after_backward, look=clipped_norm)),
    exact(DOOR, "rows of gradients and weights written to: `grad[:50].zero_()`, `weight[90:] = mean`",
          partial(after_backward, look=rows_kept)),
    exact(DOOR, "gradients masked by a mask cut as the weight is", partial(after_backward, look=masked_rows),
          note="split the mask: `distribute_tensor(mask, weight.device_mesh, weight.placements)`"),
    exact(DOOR, "`f\"{clip_grad_norm_(...):.4f}\"`", partial(after_backward, look=written_norm)),
    refused(
        DOOR, "a norm by hand, `p.grad.norm().item()`", partial(after_backward, look=norm_by_hand),
        says=READ, note="use `p.grad.norm().full_tensor()` on every rank",
    ),
    exact(DOOR, "a norm by hand, of tensors, and clipping by it", partial(after_backward, look=whole_norm_by_hand)),
    refused(
        DOOR, "the largest gradient, `p.grad.abs().max()`", partial(after_backward, look=largest),
        says=READ, note="call `.full_tensor()` first, on every rank",
    ),
    refused(DOOR, "`if p.grad.isnan().any()`", partial(after_backward, look=any_nan), says=READ,
            note="call `.full_tensor()` first, on every rank"),
    refused(DOOR, "`float(weight.norm())`", partial(after_backward, look=weight_norm), says=READ,
            note="call `.full_tensor()` first, on every rank"),
    exact(DOOR, "`float(weight[60, 3])`", partial(after_backward, look=one_number)),
    exact(DOOR, "`clip_grad_value_`", partial(after_backward, look=clipped_values)),
    refused(
        DOOR, "noise added to weights, `torch.randn_like(p)`", partial(after_backward, look=noisy),
        says=DRAWN, note="draw the whole tensor and split it with `distribute_tensor`",
    ),
    refused(
        DOOR, "weights drawn again, `nn.init.normal_(p)`", partial(after_backward, look=drawn_again),
        says=DRAWN, note="draw the whole tensor and split it with `distribute_tensor`",
    ),
    refused(DOOR, "weights dropped out by hand", partial(after_backward, look=dropped), says=DRAWN,
            note="draw the whole tensor and split it with `distribute_tensor`"),
    refused(DOOR, "a weight filled by `exponential_`", partial(after_backward, look=exponential), says=DRAWN,
            note="draw the whole tensor and split it with `distribute_tensor`"),
    exact(DOOR, "noise drawn whole and cut with `distribute_tensor`", partial(after_backward, look=noise_cut)),
]  # fmt: skip
