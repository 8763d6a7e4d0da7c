"""The Trainer that makes an Accelerator: its refusals, its reference model, and its errors about sharded weights.

Trainer makes the Accelerator in its constructor, and accelerate then calls `UlyssesConfig`, so the trainer is found on
the stack of that call; a user's own script has none. Checked on transformers 5.22 and 5.23, trl 1.16.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh

# Trainers of TRL whose losses and gradients tests/doors/trl.py compares with one process.
EXACT = (
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "ORPOTrainer",
    "CPOTrainer",
    "TPOTrainer",
    "GKDTrainer",
)
_PREPARE_FSDP = "prepare_fsdp"
_ENTRIES = ("train", "evaluate", "predict")
# Parts of torch's messages (2.11 to 2.13): a DTensor beside a plain tensor, and an operation without a rule for DTensor.
_MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = "sharding strategy registered"
# DCP's message for a folder without a sharded state.
_NO_SHARDS = "metadata is None"
_BLOCK_QUANTIZED = ("adamw_torch_8bit", "adamw_torch_4bit")


def trainer_of_call() -> Any:
    """Return the Trainer whose constructor is on the stack; None in a user's own script."""
    made = sys.modules.get("transformers.trainer")
    frame: FrameType | None = inspect.currentframe()
    while made is not None and frame is not None:
        # A method's frame holds its object as `self`.
        if isinstance(found := frame.f_locals.get("self"), made.Trainer):
            return found
        frame = frame.f_back
    return None


def check_trainer(trainer: Any, mesh: Mesh) -> None:
    """Refuse a trainer of TRL, or a trainer's setting, that would not be exact, before the trainer builds anything."""
    if trainer.args.save_only_model:
        raise UnsupportedError(
            "save_only_model=True: Trainer has it for whole weights alone, and a checkpoint's are written shard by shard: "
            "leave it out; trainer.save_model(folder) writes the weights alone"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(trainer.args, name):
            raise UnsupportedError(
                f"{name}=True casts the weights after they were split over ranks: leave it out; bf16=True trains and "
                "evaluates in bf16, with the weights as they are"
            )
    if trainer.args.optim in _BLOCK_QUANTIZED:
        raise UnsupportedError(
            f'optim="{trainer.args.optim}" codes blocks of numbers of whole weights, and a rank has parts: use '
            'optim="adamw_torch"; 8-bit moments of shards are those of `ithaca train optimizer.name=adamw8bit` and of '
            'ithaca.build_optimizer(model, "adamw8bit") in a loop of your own'
        )
    own = next((each for each in type(trainer).__mro__ if each.__module__.startswith("trl.")), None)
    if own is None:
        return
    if own.__name__ in EXACT:
        _check_settings(trainer, mesh)
        return
    raise UnsupportedError(
        f"{own.__name__} is not supported yet: under UlyssesConfig use one of TRL's {', '.join(EXACT)}, or leave "
        "parallelism_config out"
    )


def _check_settings(trainer: Any, mesh: Mesh) -> None:
    args = trainer.args
    precomputes = bool(getattr(args, "precompute_ref_log_probs", False))
    if precomputes and getattr(trainer.model, "peft_config", None):
        raise UnsupportedError(
            "precompute_ref_log_probs=True with an adapter runs the model before it is split over ranks: set it to False, "
            "the reference is then the model with the adapter off"
        )
    if precomputes and mesh.world > 1 and _in_memory(trainer):
        raise UnsupportedError(
            "precompute_ref_log_probs=True with a dataset in memory, whose cache each process has for itself: load it from "
            "files (datasets.load_dataset), or set precompute_ref_log_probs=False"
        )
    generates = float(getattr(args, "lmbda", 0.0) or 0.0) > 0 or bool(getattr(args, "seq_kd", False))
    if generates and mesh.dp > 1:
        raise UnsupportedError(
            f"lmbda={getattr(args, 'lmbda', 0.0)} or seq_kd generates on {mesh.dp} groups, which would wait for each other: "
            "set lmbda=0.0 and seq_kd=False, or let all ranks share each sequence"
        )


def _in_memory(trainer: Any) -> bool:
    """True if the trainer's training dataset is in memory, without a file."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("self") is trainer and "train_dataset" in frame.f_locals:
            files = getattr(frame.f_locals["train_dataset"], "cache_files", None)
            return files is not None and not files
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class ReferencePlacement:
    """Replacement of `prepare_fsdp` in a module of TRL, which shards a reference model.

    TRL shards over a mesh that UlyssesConfig does not have. An adopted Accelerator shards the reference model as it
    shards the trained model; any other Accelerator goes to TRL's own function.
    """

    original: Callable[..., Any]

    def __call__(self, model: Any, accelerator: Any) -> Any:
        if getattr(accelerator, "ulysses", None) is None:
            return self.original(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()


def place_references(trainer: Any) -> None:
    """Replace `prepare_fsdp` in the modules of the trainer's classes."""
    for each in type(trainer).__mro__:
        module = sys.modules.get(each.__module__)
        if each.__module__.startswith("trl.") and isinstance(module, ModuleType):
            own = module.__dict__.get(_PREPARE_FSDP)
            if own is not None and not isinstance(own, ReferencePlacement):
                module.__dict__[_PREPARE_FSDP] = ReferencePlacement(own)


def name_sharded_weights(trainer: Any) -> None:
    """Let the trainer's entries explain torch's errors about sharded weights."""
    for name in _ENTRIES:
        trainer.__dict__[name] = partial(_run_named, getattr(trainer, name))


def _run_named(entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with naming_sharded_weights():
        return entry(*args, **kwargs)


@contextmanager
def naming_sharded_weights() -> Iterator[None]:
    """Turn torch's errors about DTensors inside into errors that name the call that works."""
    try:
        yield
    except NotImplementedError as error:
        if _NO_RULE not in str(error):
            raise
        operation = str(error).partition("Operator ")[2].partition(" ")[0] or "an operation"
        raise UnsupportedError(
            f"torch has no {operation} for a weight that is split over ranks (a DTensor): change weights with operations of "
            "whole tensors (mul_, add_, copy_, zero_), or make the whole weight with weight.full_tensor()"
        ) from error
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise UnsupportedError(
            "a weight that is split over ranks (a DTensor) was used together with a plain tensor: in a loss or a callback "
            "take the whole weight with weight.full_tensor(), and call the model itself, not its parts (model.model, "
            "model.lm_head) apart"
        ) from error
    except CheckpointException as error:
        if _NO_SHARDS not in str(error):
            raise
        raise UnsupportedError(
            "the checkpoint holds no state that was written shard by shard: one saved without UlyssesConfig, or with "
            "save_only_model=True, is not resumed over ranks; load its weights by from_pretrained and train from there"
        ) from error
