"""Habits of the plain PyTorch loop around a batch: positions, embeddings, hooks, own losses, metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ithaca
from ithaca.verify.small_models.features import small_batch, small_model
from tests.doors.habits import Habit, exact, refused
from tests.doors.loops import loss_of, norm_of

DOOR = "plain loop, batches and losses"
LENGTH = 16
REDUCE = r"without a reduction over ranks: sum .* ithaca\.reduce_mean"
Made = tuple[Any, "ithaca.Mesh | None"]


def _made(sp: int | None, **options: Any) -> Made:
    model = small_model("llama")
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    return (model if mesh is None else ithaca.parallelize(model, mesh, **options)), mesh


def _step(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    loss.backward()
    return {"loss": float(loss.detach()), "norm": norm_of(model)}


def _of_shard(batch: dict[str, Any], mesh: ithaca.Mesh | None) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the model is called with, the shifted targets, and where tokens are no padding."""
    if mesh is None:
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        return inputs, targets, torch.ones_like(batch["input_ids"], dtype=torch.bool)
    shard = ithaca.shard_batch(batch, mesh)
    return shard.inputs, shard.targets, shard.real


def positions(sp: int | None, *, ids: list[int], masked: bool, first: int | None = None) -> dict[str, Any]:
    model, mesh = _made(sp)
    batch: dict[str, Any] = small_batch(2, LENGTH) | {"position_ids": torch.tensor(ids).expand(2, LENGTH)}
    if masked:
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    if first is not None:
        batch["labels"][:, first] = -100
    return _step(model, loss_of(model, batch, mesh))


def collated(sp: int | None) -> dict[str, Any]:
    """Packed rows with padding, from the collator."""
    model, mesh = _made(sp)
    examples = [{"input_ids": [3 + (7 * i + t) % 50 for t in range(n)]} for i, n in enumerate((9, 4, 6, 11))]
    batch = ithaca.SequenceCollator(pack=True, length=LENGTH)(examples)
    return _step(model, loss_of(model, batch, mesh))


def embeddings(sp: int | None, *, prompt: bool) -> dict[str, Any]:
    """Noise on embeddings, or a soft prompt of three tokens before them; the gradient that their optimizer sees."""
    model, mesh = _made(sp)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(2, LENGTH - 3, 32, generator=generator, dtype=torch.float64)
    trained = torch.randn((3 if prompt else LENGTH, 32), generator=generator, dtype=torch.float64).requires_grad_()
    embeds = torch.cat([trained[:3].expand(2, -1, -1), tokens + (0 if prompt else trained[3:])], 1)
    batch = {"inputs_embeds": embeds, "labels": small_batch(2, LENGTH)["labels"]}
    return _step(model, loss_of(model, batch, mesh)) | {"gradient": _gradient(trained)}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradient_of_embeddings(sp: int | None, *, again: bool) -> dict[str, Any]:
    """`torch.autograd.grad` in place of backward; `again`: layers are run again in it."""
    plan = ithaca.MemoryPlan(("save", "save"), (False, False), 8, 8) if again else None
    model, mesh = _made(sp, memory=plan)
    noise = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    loss = loss_of(model, {"inputs_embeds": noise, "labels": small_batch(2, LENGTH)["labels"]}, mesh)
    return {"gradient": torch.autograd.grad(loss, [noise])[0]}


def hook(sp: int | None, *, reduced: bool | None) -> dict[str, Any]:
    """A hook on the last norm: looked at only (None), or a mean square of it added to the loss."""
    model, mesh = _made(sp)
    seen: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, _args, output: seen.append(output))
    batch = small_batch(2, LENGTH)
    loss = loss_of(model, batch, mesh)
    sizes = seen[-1].square().mean(-1)
    if reduced is None:
        return _step(model, loss)
    if mesh is None or not reduced:
        return _step(model, loss + sizes.mean())
    return _step(model, loss + ithaca.reduce_mean(model, sizes.sum(), sizes.numel(), mesh))


def halved(sp: int | None, *, within: str) -> dict[str, Any]:
    """A hook that halves the gradient of a module's output."""
    model, mesh = _made(sp)

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 2)

    model.model.get_submodule(within).register_forward_hook(hook)
    return _step(model, loss_of(model, small_batch(2, LENGTH), mesh))


def steered(sp: int | None, *, owned: bool, within: str = "layers.0.mlp", again: bool = False) -> dict[str, Any]:
    """A trained vector that a hook adds; `owned`: it is a parameter of the hooked module."""
    torch.manual_seed(0)
    vector = nn.Parameter(torch.randn(32, dtype=torch.float64))
    plain = small_model("llama")
    module = plain.model.get_submodule(within)
    if owned:
        module.register_parameter("vector", vector)
    module.register_forward_hook(lambda inner, _args, output: output + (inner.vector if owned else vector))
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    plan = ithaca.MemoryPlan(("save", "save"), (False, False), 8, 8) if again else None
    model = plain if mesh is None else ithaca.parallelize(plain, mesh, memory=plan)
    return _step(model, loss_of(model, small_batch(2, LENGTH), mesh))


def gradients_asked(sp: int | None, *, by_backward: bool) -> dict[str, Any]:
    """Gradients of some weights alone."""
    model, mesh = _made(sp, memory=None)
    weights = list(model.model.layers[1].parameters())
    loss = loss_of(model, small_batch(2, LENGTH), mesh)
    if by_backward:
        loss.backward(inputs=weights)
        return {"gradient": _gradient(weights[0])}
    return {"gradient": torch.autograd.grad(loss, weights)[0]}


def number_of_items(sp: int | None) -> dict[str, Any]:
    """What transformers' own loss divides by, if it is there."""
    model, mesh = _made(sp)
    return _step(model, loss_of(model, small_batch(2, LENGTH) | {"num_items_in_batch": 7}, mesh))


def number_by_rank(sp: int | None) -> dict[str, Any]:
    """Each rank divides by a number of its own."""
    model, mesh = _made(sp)
    batch = small_batch(2, LENGTH)
    if mesh is None:
        return _step(model, loss_of(model, batch, mesh))
    return _step(model, ithaca.causal_loss(model, batch, mesh, count=44 + mesh.rank))


def own_loss(sp: int | None, *, reduced: bool) -> dict[str, Any]:
    """A focal loss over logits, whose tokens are not all learned."""
    model, mesh = _made(sp)
    inputs, targets, _ = _of_shard(small_batch(2, LENGTH), mesh)
    logits, learned = model(**inputs).logits, targets != -100
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    losses = losses * (1 - (-losses).exp()).square()
    if mesh is None or not reduced:
        return _step(model, losses[learned].mean())
    return _step(model, ithaca.reduce_mean(model, losses[learned].sum(), learned.sum(), mesh))


def hidden_states(sp: int | None) -> dict[str, Any]:
    """A penalty on `outputs.hidden_states` beside a reduced loss of the logits."""
    model, mesh = _made(sp)
    inputs, _, real = _of_shard(small_batch(2, LENGTH), mesh)
    outputs = model(**inputs, output_hidden_states=True)
    sizes = outputs.logits.square().mean(-1)
    main = sizes.mean() if mesh is None else ithaca.reduce_mean(model, sizes.sum(), real.sum(), mesh)
    return _step(model, main + outputs.hidden_states[-1].square().mean())


def metrics(sp: int | None) -> dict[str, Any]:
    """Accuracy and perplexity from logits, without gradients."""
    model, mesh = _made(sp)
    model.eval()
    with torch.no_grad():
        inputs, targets, _ = _of_shard(small_batch(2, LENGTH), mesh)
        logits, learned = model(**inputs).logits, targets != -100
        hits = ((logits.argmax(-1) == targets) & learned).double().sum()
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum()
        if mesh is None:
            means = [hits / learned.sum(), losses / learned.sum()]
        else:
            means = [ithaca.reduce_mean(model, x, learned.sum(), mesh) for x in (hits, losses)]
    return {"accuracy": float(means[0]), "perplexity": float(means[1].exp())}


_COUNT = list(range(LENGTH))
_HALVES = [t % 8 for t in _COUNT]
_SPACED = [2 * t for t in _COUNT]

HABITS: list[Habit] = [
    exact(DOOR, "positions with gaps beside an `attention_mask`", partial(positions, ids=_SPACED, masked=True),
          note="the positions are used as given; a row is one document, as in transformers' eager attention"),
    refused(DOOR, "positions with gaps and no `attention_mask`", partial(positions, ids=_SPACED, masked=False),
            says="go from 0 to 2 at token 1", error="BatchError",
            note="every token would be a document: pass a mask of ones, or `document_ids`"),
    exact(DOOR, "packed rows: positions that restart, no mask", partial(positions, ids=_HALVES, masked=False, first=8)),
    refused(DOOR, "positions that restart beside an `attention_mask`", partial(positions, ids=_HALVES, masked=True),
            says="restart beside an attention_mask", error="BatchError",
            note="ambiguous (one document to eager attention, several to flash attention): leave the mask out, or pass "
            "`document_ids`"),
    exact(DOOR, "pack with `ithaca.SequenceCollator`, padding and all", collated),
    exact(DOOR, "train a soft prompt in `inputs_embeds`", partial(embeddings, prompt=True),
          note="with several sequence groups, sum its gradients over the groups yourself"),
    exact(DOOR, "gradients of noise on embeddings", partial(embeddings, prompt=False)),
    exact(DOOR, "`torch.autograd.grad(loss, embeddings)`, `memory=None`", partial(gradient_of_embeddings, again=False)),
    refused(DOOR, "`torch.autograd.grad(loss, embeddings)`, layers run again", partial(gradient_of_embeddings, again=True),
            says="call loss.backward", note="use `loss.backward()` and `embeddings.grad`, or `memory=None`"),
    exact(DOOR, "a hook that looks at activations", partial(hook, reduced=None), note="the hook sees this rank's tokens"),
    exact(DOOR, "a hook that changes the gradient of a layer's part", partial(halved, within="layers.0.self_attn.o_proj")),
    exact(DOOR, "a hook that changes the gradient of the last norm", partial(halved, within="norm")),
    refused(DOOR, "an auxiliary loss from a hook, its mean taken there", partial(hook, reduced=False), says=REDUCE),
    exact(DOOR, "an auxiliary loss from a hook through `ithaca.reduce_mean`", partial(hook, reduced=True)),
    exact(DOOR, "a hook that adds a parameter of its module", partial(steered, owned=True),
          note="register the parameter before `parallelize`"),
    exact(DOOR, "a parameter added by a hook, layers run again", partial(steered, owned=True, again=True)),
    refused(DOOR, "a hook that brings in a trained tensor", partial(steered, owned=False),
            says="give it to that module before", note="make the tensor a parameter of the module"),
    refused(DOOR, "a trained tensor from a hook, layers run again", partial(steered, owned=False, again=True),
            says="give it to that module before", note="make the tensor a parameter of the module"),
    refused(DOOR, "`torch.autograd.grad(loss, weights)`", partial(gradients_asked, by_backward=False),
            says="call loss.backward", note="use `loss.backward()` and `weight.grad`"),
    refused(DOOR, "`loss.backward(inputs=weights)`", partial(gradients_asked, by_backward=True),
            says="call loss.backward", note="use `loss.backward()`, with `requires_grad_(False)` on the other weights"),
    refused(DOOR, "`num_items_in_batch` in the batch", number_of_items, says="pass count=", error="BatchError",
            note="pass `count=ithaca.count_tokens(batches, mesh)`"),
    refused(DOOR, "a `count` that each rank counts by itself", number_by_rank, says="differ in count", error="BatchError",
            note="pass `count=ithaca.count_tokens(batches, mesh)`"),
    refused(DOOR, "a loss of one's own over logits, its mean taken there", partial(own_loss, reduced=False), says=REDUCE),
    exact(DOOR, "a loss of one's own over logits through `ithaca.reduce_mean`", partial(own_loss, reduced=True)),
    refused(DOOR, "a penalty on `outputs.hidden_states`, its mean taken there", hidden_states, says=REDUCE),
    exact(DOOR, "accuracy and perplexity from logits through `ithaca.reduce_mean`", metrics),
]  # fmt: skip
