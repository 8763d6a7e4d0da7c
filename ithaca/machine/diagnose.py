"""`ithaca doctor`: what this machine can do for training, tried rather than guessed, and what is missing.

Every check gives a `Finding`: what was looked at, what was found, and what to do where that is not enough. A finding is
"broken" only where training cannot run without it; what is merely absent or tight is "missing" or "tight".

Invariant: a check that fails in a way of its own becomes a finding; the doctor does not raise.
"""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ithaca.atomic import nearest_folder
from ithaca.attention.kernels import AUTO, KERNELS, QKV, AttentionSpec, Kernel
from ithaca.constants import GIB

State = Literal["good", "missing", "tight", "broken"]
# Forward and backward of a trial: few enough tokens to be done at once, the head size that most models have.
TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 256, 4, 2, 128
# Package: what it is for.
OPTIONAL = {
    "peft": "LoRA adapters",
    "trl": "SFTTrainer",
    "torchao": "the optimizers adamw8bit and bf16_sr",
    "liger-kernel": "a faster kernel for the loss on GPUs",
    "tensorboard": "the tracker tensorboard",
    "wandb": "the tracker wandb",
    "trackio": "the tracker trackio",
    "flash-attn": "FlashAttention 2, slower than cuDNN's kernel and not chosen unless named",
}
_EXTRAS = ("peft", "trl", "torchao", "tensorboard", "wandb", "trackio")
# Shown where the package's own list of needs is not there: run from sources that are not installed.
MAIN = ("torch", "transformers", "accelerate", "datasets", "safetensors")
LEAST_SHM, LEAST_DISK, LEAST_LOCKED = GIB, 20 * GIB, 8 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `fix` is what to do, empty where nothing is needed."""

    topic: str
    name: str
    state: State
    found: str
    fix: str = ""


def examine(folder: Path) -> list[Finding]:
    """All findings; `folder` is where runs would be written."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", versions),
        ("devices", devices),
        ("attention", kernels),
        ("links", links),
        ("limits", limits),
        ("disk", partial(disk, folder)),
    )
    findings: list[Finding] = []
    for topic, check in checks:
        try:
            findings += check()
        except Exception as error:
            # Whatever a driver or a package does wrong here, the rest is still worth knowing.
            findings.append(
                Finding(topic, topic, "broken", f"{type(error).__name__}: {error}"[:300], "see the message")
            )
    return findings


def versions() -> Iterator[Finding]:
    """Python, what Ithaca needs, and what it can use."""
    yield Finding("versions", "python", "good", platform.python_version())
    for text in _needs():
        needed = Requirement(text)
        if needed.marker is None:
            yield package(needed)
    for name, purpose in OPTIONAL.items():
        yield optional(name, purpose)
    if torch.version.cuda:
        yield Finding("versions", "CUDA", "good", torch.version.cuda)
        yield Finding("versions", "cuDNN", "good", str(torch.backends.cudnn.version()))
    else:
        yield Finding("versions", "CUDA", "missing", "torch is built without it", "pip install torch (a CUDA build)")


def _needs() -> list[str]:
    try:
        return metadata.requires("ithaca") or []
    except metadata.PackageNotFoundError:
        return list(MAIN)


def package(needed: Requirement) -> Finding:
    """A package that Ithaca cannot do without."""
    fix = f"pip install '{needed}'"
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return Finding("versions", needed.name, "broken", "not installed", fix)
    if not needed.specifier.contains(Version(version).base_version, prereleases=True):
        return Finding("versions", needed.name, "broken", f"{version}; {needed.specifier} is needed", fix)
    return Finding("versions", needed.name, "good", version)


def optional(name: str, purpose: str) -> Finding:
    """A package that adds something; one that is there but cannot be imported is told apart from none."""
    extra = f"ithaca[{name}]" if name in _EXTRAS else name
    fix = f"pip install '{extra}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("versions", name, "missing", f"not installed: {purpose}", fix)
    try:
        import_module(name.replace("-", "_"))
    except Exception as error:
        return Finding("versions", name, "missing", f"{version} cannot be imported ({error}): {purpose}"[:200], fix)
    return Finding("versions", name, "good", version)


def devices() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    host = f"{psutil.cpu_count()} cores, {memory.total / GIB:.0f} GiB, {memory.available / GIB:.0f} GiB free"
    yield Finding("devices", "host", "good", host)
    if not torch.cuda.is_available():
        fix = "" if not shutil.which("nvidia-smi") else "nvidia-smi is here, so install a CUDA build of torch"
        yield Finding("devices", "GPU", "missing", "none: training runs on the CPU, slowly", fix)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        said = f"{properties.name}, {total / GIB:.0f} GiB ({free / GIB:.0f} free), capability {properties.major}."
        state: State = "good" if free > total / 2 else "tight"
        fix = "" if state == "good" else "another process holds its memory: nvidia-smi names it"
        yield Finding("devices", f"GPU {number}", state, f"{said}{properties.minor}", fix)


def kernels() -> Iterator[Finding]:
    """Every attention kernel, forward and backward on small tensors."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    works = []
    for name, kernel in KERNELS.items():
        reason = try_kernel(kernel, device)
        works += [name] if reason is None else []
        said = "forward and backward run" if reason is None else reason
        yield Finding("attention", name, "good" if reason is None else "missing", said)
    best = next((name for name in AUTO if name in works), None)
    if best is None:
        fix = "reinstall torch for this machine; kernel='blockwise' is exact but slow"
        yield Finding("attention", "chosen", "broken", "no kernel that `auto` may take runs here", fix)
    else:
        yield Finding("attention", "chosen", "good", f"{best}, for full attention of head size {HEAD_SIZE}")


def try_kernel(kernel: Kernel, device: torch.device) -> str | None:
    """Why it does not run here, or None; numbers that are not finite count as not running."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, TOKENS, heads, HEAD_SIZE, device=device, dtype=dtype, generator=draw)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    spec = AttentionSpec(HEAD_SIZE**-0.5)
    refused = kernel.refusal(q, v, spec)
    if refused is not None:
        return refused
    try:
        qkv = QKV(q, k, v)
        out, lse = kernel.forward(qkv, spec)
        results = (out, lse, *kernel.backward(dout, qkv, out, lse, spec))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None if all(bool(x.isfinite().all()) for x in results) else "its numbers are not finite"


def links() -> Iterator[Finding]:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield Finding("links", "gloo", "good", "joins CPU ranks")
    else:
        yield Finding("links", "gloo", "broken", "torch has no gloo", "install torch's own wheels")
    if not torch.cuda.is_available():
        return
    if torch.distributed.is_nccl_available():
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        yield Finding("links", "NCCL", "good", version)
    else:
        yield Finding("links", "NCCL", "broken", "torch has no NCCL", "install torch's own CUDA wheels")
    count = torch.cuda.device_count()
    for other in range(1, count):
        direct = torch.cuda.can_device_access_peer(0, other)
        said = "direct" if direct else "through the host"
        yield Finding("links", f"GPU 0 - GPU {other}", "good" if direct else "tight", said)
    if count > 1 and shutil.which("nvidia-smi"):
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        yield Finding("links", "topology", "good", shown.stdout.strip()[:3000])


def limits() -> Iterator[Finding]:
    """Shared memory between processes, memory that may be pinned, open files."""
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).total
        tight = room < LEAST_SHM
        fix = "docker run --shm-size=8g, or --ipc=host" if tight else ""
        yield Finding("limits", "/dev/shm", "tight" if tight else "good", f"{room / GIB:.1f} GiB", fix)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    endless = locked == resource.RLIM_INFINITY
    said = "unlimited" if endless else f"{locked / 2**20:.0f} MiB"
    # CUDA pins by its driver, which the limit does not bind; RDMA registers memory under it.
    tight = not endless and locked < LEAST_LOCKED and torch.cuda.device_count() > 1
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), for InfiniBand" if tight else ""
    yield Finding("limits", "ulimit -l", "tight" if tight else "good", said, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files < 4096 and files != resource.RLIM_INFINITY
    yield Finding("limits", "ulimit -n", "tight" if few else "good", str(files), "ulimit -n 65536" if few else "")
    if torch.cuda.is_available():
        yield pinned()


def pinned() -> Finding:
    """A gigabyte of host memory, pinned as saved tensors are."""
    memory = torch.empty(GIB, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), GIB, 0))
    if code:
        return Finding("limits", "pinned memory", "broken", f"the driver did not pin 1 GiB (error {code})", "ulimit -l")
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return Finding("limits", "pinned memory", "good", "1 GiB was pinned")


def disk(folder: Path) -> Iterator[Finding]:
    there = nearest_folder(folder.resolve())
    room = shutil.disk_usage(there)
    tight = room.free < LEAST_DISK
    said = f"{room.free / GIB:.0f} of {room.total / GIB:.0f} GiB free at {there}"
    fix = "a checkpoint of 8B parameters is 98 GB in fp32 with moments: set output to a larger disk" if tight else ""
    yield Finding("disk", "output", "tight" if tight else "good", said, fix)
