"""`verify_devices`: what only GPUs have, verified on them: links, the exchange in fp32, and the kernels in bf16.

bf16 rounds so coarsely that a difference alone says nothing. So both ways are compared with fp32 on one device: the
sharded one must be no further from it than one device's own bf16, but for scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.mesh import Mesh
from ithaca.parallelize import parallelize
from ithaca.training.check_links import check_collectives
from ithaca.verify.batches import Sample
from ithaca.verify.checklist import verify
from ithaca.verify.checks import CHECKS, Line
from ithaca.verify.pair import Build, Pair
from ithaca.verify.parity import reference
from ithaca.verify.tolerances import BF16_FACTOR, BF16_LOSS


def verify_devices(
    build: Build,
    sample: Sample,
    mesh: Mesh,
    *,
    kernel: str = "auto",
    tell: Callable[[Line], None] = lambda line: None,
    scratch: Path | None = None,
) -> list[Line]:
    """The checklist of GPUs, the same on all ranks; `build` gives the whole model in fp32.

    In fp32 attention runs on the exact blockwise kernel; in bf16 on `kernel`, which is what training would take.
    """
    lines: list[Line] = []
    if mesh.world > 1:
        check_collectives(mesh)
        lines.append(Line("collectives", 0.0, 0.0, "every one that training uses gave the known answer"))
        tell(lines[-1])
        options: dict[str, Any] = {"kernel": "blockwise", "fuse": False}
        lines += verify(build, sample, mesh, promote=False, checks=CHECKS, tell=tell, scratch=scratch, **options)
    for line in _bf16(build, sample, mesh, kernel):
        lines.append(line)
        tell(line)
    return lines


def _bf16(build: Build, sample: Sample, mesh: Mesh, kernel: str) -> list[Line]:
    """Loss and gradients in bf16, against fp32 on one device, beside one device's own bf16."""

    def rounded() -> PreTrainedModel:
        return build().bfloat16()

    pair = Pair(rounded, lambda model, its: parallelize(model, its, kernel=kernel), mesh, promote=False)
    batch = sample.packed
    shown = pair.loss([batch], backward=True)
    gathered = {name: _whole(p.grad) for name, p in pair.parallel.named_parameters()}

    def judge(plain: PreTrainedModel) -> tuple[float, float, float]:
        alone = reference(plain, [[pair.placed(batch)]])
        own = {name: g.float().cpu() for name, g in alone.gradients.items()}
        plain.zero_grad(set_to_none=True)
        exact = reference(plain.float(), [[pair.placed(batch)]])
        truth = {name: g.cpu() for name, g in exact.gradients.items()}
        return exact.loss, _distance(gathered, truth), _distance(own, truth)

    loss, sharded, single = pair.on_rank_0(judge)
    off = abs(shown - loss) / max(1.0, abs(loss))
    detail = f"gradients off from fp32 by {sharded:.1e} of their norm, one device's own bf16 by {single:.1e}"
    return [
        Line(
            "bf16 loss", off if off == off else float("inf"), BF16_LOSS, f"against fp32 on one device; {kernel} kernel"
        ),
        Line("bf16 gradients", sharded / max(single, 1e-30), BF16_FACTOR, detail),
    ]


def _whole(gradient: Any) -> Tensor | None:
    if gradient is None:
        return None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().float().cpu()


def _distance(got: dict[str, Any], truth: dict[str, Tensor]) -> float:
    """Of all gradients together, relative to their norm."""
    apart = sum(
        float((got[name] - g).double().square().sum()) for name, g in truth.items() if got.get(name) is not None
    )
    lost = sum(float(g.double().square().sum()) for name, g in truth.items() if got.get(name) is None)
    return ((apart + lost) / sum(float(g.double().square().sum()) for g in truth.values())) ** 0.5
