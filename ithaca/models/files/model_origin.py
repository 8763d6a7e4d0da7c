"""The origin of a run: its model's config.json and, with adapters, a digest of the base weights.

A checkpoint of adapters holds the adapters alone, and every start reads the config again. If somebody has put another model
into the folder since, training would go on with that model, or export would merge adapters into it. The origin is kept in
checkpoints and compared:

    {"config": {"model_type": "llama", "rope_theta": 10000.0, ...}, "weights": "9f2c..." or None}

The digest is of every tensor's name, type, shape, and first and middle 4 KiB: to read it takes a moment for a model of any
size, and another training of the same model differs in every tensor.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ithaca.errors import CheckpointError
from ithaca.models.files.safetensors_files import headers_of, weight_files

ORIGIN = "origin"
# Keys that change no number that a model computes.
_NAMES = frozenset(("transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype", "use_cache"))
_SAMPLE = 4096
_SHOWN = 3


def read_origin(folder: Path, *, weights: bool) -> dict[str, Any]:
    """Return the origin of a model's folder as plain JSON; `weights`: with their digest."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read ({error}): copy it anew") from None
    kept = {key: config[key] for key in sorted(config) if key not in _NAMES}
    return {"config": kept, "weights": digest_weights(folder) if weights else None}


def digest_weights(folder: Path) -> str:
    """Return a digest of the folder's weights, the same however they are spread over files."""
    lines = sorted(line for file in weight_files(folder) for line in _digest_tensors(file))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _digest_tensors(file: Path) -> list[str]:
    """Return a line for each tensor of a safetensors file."""
    lines = []
    headers = headers_of(file)
    with file.open("rb") as opened:
        for name, header in headers.items():
            sample = hashlib.sha256()
            for start in (header.start, (header.start + header.end) // 2):
                opened.seek(start)
                sample.update(opened.read(min(_SAMPLE, header.end - start)))
            lines.append(f"{name} {header.dtype} {list(header.shape)} {sample.hexdigest()}")
    return lines


def check_origin(saved: Any, now: dict[str, Any], folder: str | Path) -> None:
    """Refuse to resume from a folder whose model has changed."""
    # Checkpoints of earlier versions have no origin.
    if not saved:
        return
    before, after = saved["config"], now["config"]
    differing = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if differing:
        named = "; ".join(f"{key} was {before.get(key)!r}, is {after.get(key)!r}" for key in differing[:_SHOWN])
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} is not the model that this run began with ({named}{more}): put its config.json back, or set "
            "output=... to a new folder"
        )
    if saved["weights"] != now["weights"]:
        raise CheckpointError(_other_weights(folder))


def check_base(saved: Any, folder: Path) -> None:
    """Refuse to merge adapters into weights that they were not trained on."""
    if saved and saved["weights"] is not None and saved["weights"] != digest_weights(folder):
        raise CheckpointError(_other_weights(folder))


def _other_weights(folder: str | Path) -> str:
    return f"{folder} has other weights than those that the adapter was trained on: put the model back there"
