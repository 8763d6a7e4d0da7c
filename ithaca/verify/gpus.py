"""`verify_devices`: the checks that need GPUs: collectives, the checklist in fp32, and the kernels in bf16.

bf16 rounds so coarsely that a difference between two bf16 results says little. So the sharded model's bf16 and one
device's own bf16 are both compared with fp32 on one device; the sharded one must be no further off, but for scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isnan
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
from ithaca.verify.checks import Line
from ithaca.verify.parity import Build, Pair
from ithaca.verify.reference import reference
from ithaca.verify.tolerances import BF16_FACTOR, BF16_LOSS


def verify_devices(
    build: Build,
    sample: Sample,
    mesh: Mesh,
    *,
    kernel: str = "auto",
    on_line: Callable[[Line], None] = lambda line: None,
    scratch: Path | None = None,
) -> list[Line]:
    """Return the checklist of GPUs, the same on all ranks; `build` returns the whole model in fp32.

    In fp32 attention runs on the exact blockwise kernel; in bf16 on `kernel`, as in training.
    """
    lines: list[Line] = []
    if mesh.world > 1:
        check_collectives(mesh)
        lines.append(Line("collectives", 0.0, 0.0, "every one that training uses gave the known answer"))
        on_line(lines[-1])
        options: dict[str, Any] = {"kernel": "blockwise", "fuse": False}
        lines += verify(build, sample, mesh, promote=False, on_line=on_line, scratch=scratch, **options)
    for line in _check_bf16(build, sample, mesh, kernel):
        lines.append(line)
        on_line(line)
    return lines


def _check_bf16(build: Build, sample: Sample, mesh: Mesh, kernel: str) -> list[Line]:
    """Compare loss and gradients in bf16 with fp32 on one device, beside one device's own bf16."""
    pair = Pair(
        lambda: build().bfloat16(), lambda model, its: parallelize(model, its, kernel=kernel), mesh, promote=False
    )
    batch = sample.packed
    loss = pair.mean_loss([batch], backward=True)
    sharded = {name: _whole(p.grad) for name, p in pair.parallel.named_parameters() if p.grad is not None}

    def compare(plain: PreTrainedModel) -> tuple[float, float, float]:
        alone = reference(plain, [[pair.placed(batch)]])
        single = {name: g.float().cpu() for name, g in alone.gradients.items()}
        plain.zero_grad(set_to_none=True)
        exact = reference(plain.float(), [[pair.placed(batch)]])
        gradients = {name: g.cpu() for name, g in exact.gradients.items()}
        return exact.loss, _distance(sharded, gradients), _distance(single, gradients)

    exact_loss, sharded_error, single_error = pair.on_rank_0(compare)
    error = abs(loss - exact_loss) / max(1.0, abs(exact_loss))
    errors = (
        f"gradients off from fp32 by {sharded_error:.1e} of their norm, one device's own bf16 by {single_error:.1e}"
    )
    against = f"against fp32 on one device; {kernel} kernel"
    return [
        Line("bf16 loss", inf if isnan(error) else error, BF16_LOSS, against),
        Line("bf16 gradients", sharded_error / max(single_error, 1e-30), BF16_FACTOR, errors),
    ]


def _whole(gradient: Tensor) -> Tensor:
    """Return a gathered gradient on the host; every rank takes part."""
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().float().cpu()


def _distance(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm; a missing gradient is zero."""
    off = sum(_squares(got[name] - g if name in got else g) for name, g in exact.items())
    return (off / sum(map(_squares, exact.values()))) ** 0.5


def _squares(x: Tensor) -> float:
    return float(x.double().square().sum())
