"""Checks of `ithaca doctor`: trials of this machine for training, each with its result and the way to mend it.

A `Finding` is "broken" only if training cannot run without the thing; "missing" if it is an option that is absent, and
"tight" if it works and may not be enough. A kernel that was run is "right" or "wrong".

Invariant: a check that raises becomes a finding; `examine` itself does not raise.
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
from ithaca.attention.kernels import AUTO, KERNELS
from ithaca.constants import GIB
from ithaca.machine.kernel_trials import HEAD_SIZE, try_kernel

State = Literal["good", "right", "missing", "tight", "wrong", "broken"]
# Package: purpose.
OPTIONAL = {
    "peft": "LoRA adapters",
    "trl": "SFTTrainer",
    "torchao": "the optimizers adamw8bit and bf16_sr",
    "liger-kernel": "a faster kernel for the loss on GPUs",
    "tensorboard": "the tracker tensorboard",
    "wandb": "the tracker wandb",
    "trackio": "the tracker trackio",
    "flash-attn-4": "FlashAttention 4, the fastest attention on Hopper",
    "flash-attn": "FlashAttention 2, slower than cuDNN's kernel and not chosen unless named",
}
# Package: the extra of Ithaca that installs it.
_EXTRAS = {name: name for name in ("peft", "trl", "torchao", "tensorboard", "wandb", "trackio")} | {
    "flash-attn-4": "fa4"
}
# Package: what to import, where it is not the package's name.
_MODULES = {"flash-attn-4": "flash_attn.cute.interface"}
# Requirements to check if Ithaca runs from sources that are not installed, without its own list.
MAIN = ("torch", "transformers", "accelerate", "datasets", "safetensors")
SMALLEST_SHM, SMALLEST_DISK, SMALLEST_LOCKED = GIB, 20 * GIB, 8 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `fix`: advice, empty if there is nothing to do."""

    topic: str
    name: str
    state: State
    found: str
    fix: str = ""


def examine(folder: Path) -> list[Finding]:
    """Return the findings of all checks; `folder` is the folder of the runs."""
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
            # A driver or a package may raise anything; the other checks still run.
            findings.append(
                Finding(topic, topic, "broken", f"{type(error).__name__}: {error}"[:300], "see the message")
            )
    return findings


def versions() -> Iterator[Finding]:
    """Yield findings on Python, the packages that Ithaca needs, and those that it can use."""
    yield Finding("versions", "python", "good", platform.python_version())
    try:
        requirements = metadata.requires("ithaca") or []
    except metadata.PackageNotFoundError:
        requirements = list(MAIN)
    for text in requirements:
        needed = Requirement(text)
        # A requirement with a marker belongs to an extra, and is checked as optional below.
        if needed.marker is None:
            yield package(needed)
    for name, purpose in OPTIONAL.items():
        yield optional(name, purpose)
    if torch.version.cuda:
        yield Finding("versions", "CUDA", "good", torch.version.cuda)
        yield Finding("versions", "cuDNN", "good", str(torch.backends.cudnn.version()))
    else:
        yield Finding("versions", "CUDA", "missing", "torch is built without it", "pip install torch (a CUDA build)")


def package(needed: Requirement) -> Finding:
    """Check a package that Ithaca needs."""
    fix = f"pip install '{needed}'"
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return Finding("versions", needed.name, "broken", "not installed", fix)
    # A nightly or local build (2.13.0a0+git) counts as the release of its number.
    if not needed.specifier.contains(Version(version).base_version, prereleases=True):
        return Finding("versions", needed.name, "broken", f"{version}; {needed.specifier} is needed", fix)
    return Finding("versions", needed.name, "good", version)


def optional(name: str, purpose: str) -> Finding:
    """Check a package that Ithaca can use; one that is installed but cannot be imported counts as missing."""
    extra = f"ithaca[{_EXTRAS[name]}]" if name in _EXTRAS else name
    fix = f"pip install '{extra}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("versions", name, "missing", f"not installed: {purpose}", fix)
    try:
        # An installed package may still fail here: compiled for another torch or CUDA.
        import_module(_MODULES.get(name, name.replace("-", "_")))
    except Exception as error:
        return Finding("versions", name, "missing", f"{version} cannot be imported ({error}): {purpose}"[:200], fix)
    return Finding("versions", name, "good", version)


def devices() -> Iterator[Finding]:
    """Yield findings on the host's memory and on every GPU."""
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
        capability = f"{properties.major}.{properties.minor}"
        found = f"{properties.name}, {total / GIB:.0f} GiB ({free / GIB:.0f} free), capability {capability}"
        # torch alone takes about half a GiB; more than half of the device is another process's.
        state: State = "good" if free > total / 2 else "tight"
        fix = "" if state == "good" else "another process holds its memory: nvidia-smi names it"
        yield Finding("devices", f"GPU {number}", state, found, fix)


def kernels() -> Iterator[Finding]:
    """Yield findings on every attention kernel: whether it computes rightly, at the edge of its guards too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states: dict[str, State] = {}
    for name, kernel in KERNELS.items():
        trial = try_kernel(kernel, device)
        states[name] = trial.state
        fix = (
            f"name another kernel, as in parallelize(kernel=...), or reinstall {name}" if trial.state == "wrong" else ""
        )
        yield Finding("attention", name, trial.state, trial.said, fix)
    best = next((name for name in AUTO if states[name] != "missing"), None)
    if best is None:
        fix = "reinstall torch for this machine; kernel='blockwise' is exact but slow"
        yield Finding("attention", "chosen", "broken", "no kernel that `auto` may take runs here", fix)
    elif states[best] == "wrong":
        fix = "name a kernel that is right, as in parallelize(kernel=...)"
        yield Finding("attention", "chosen", "broken", f"{best}, which is wrong here", fix)
    else:
        yield Finding("attention", "chosen", "good", f"{best}, for full attention of head size {HEAD_SIZE}")


def links() -> Iterator[Finding]:
    """Yield findings on gloo, NCCL and the links between GPUs."""
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
        path = "direct" if direct else "through the host"
        yield Finding("links", f"GPU 0 - GPU {other}", "good" if direct else "tight", path)
    if count > 1 and shutil.which("nvidia-smi"):
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        yield Finding("links", "topology", "good", shown.stdout.strip()[:3000])


def limits() -> Iterator[Finding]:
    """Yield findings on shared memory, memory that may be pinned, and open files."""
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        tight = size < SMALLEST_SHM
        fix = "docker run --shm-size=8g, or --ipc=host" if tight else ""
        yield Finding("limits", "/dev/shm", "tight" if tight else "good", f"{size / GIB:.1f} GiB", fix)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{locked / 2**20:.0f} MiB"
    # CUDA's driver pins memory outside of this limit; RDMA registers memory under it.
    tight = not unlimited and locked < SMALLEST_LOCKED and torch.cuda.device_count() > 1
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), for InfiniBand" if tight else ""
    yield Finding("limits", "ulimit -l", "tight" if tight else "good", found, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files < 4096 and files != resource.RLIM_INFINITY
    yield Finding("limits", "ulimit -n", "tight" if few else "good", str(files), "ulimit -n 65536" if few else "")
    if torch.cuda.is_available():
        yield pinned()


def pinned() -> Finding:
    """Pin one GiB of host memory, as offloading does."""
    memory = torch.empty(GIB, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), GIB, 0))
    if code:
        return Finding("limits", "pinned memory", "broken", f"the driver did not pin 1 GiB (error {code})", "ulimit -l")
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return Finding("limits", "pinned memory", "good", "1 GiB was pinned")


def disk(folder: Path) -> Iterator[Finding]:
    """Yield a finding on the free space of the disk that has `folder`."""
    existing = nearest_folder(folder.resolve())
    space = shutil.disk_usage(existing)
    tight = space.free < SMALLEST_DISK
    found = f"{space.free / GIB:.0f} of {space.total / GIB:.0f} GiB free at {existing}"
    fix = "a checkpoint of 8B parameters is 98 GB in fp32 with moments: set output to a larger disk" if tight else ""
    yield Finding("disk", "output", "tight" if tight else "good", found, fix)
