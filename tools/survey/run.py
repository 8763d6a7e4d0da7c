"""Parity runs of the survey: one architecture at a time, on CPU ranks that may fail or hang without harm.

    Ranks(2).measure("llama") --Pipe--> 2 processes: serve -> measure     compares all cases with one process
              Measured        <-------- worst error of each case

Each architecture has a process group of its own. A rank that fails leaves the group, which ends its peers' collectives. If
ranks do not answer in time, all ranks are killed, and the next architecture starts new ones.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import inf, isfinite
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.multiprocessing import get_context
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ithaca.mesh import Mesh, init_mesh
from ithaca.models.binding import bind
from ithaca.models.bound import NAME
from ithaca.models.layers.install import install_memory
from ithaca.models.support import decoder_layers
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.state.weights.placement import WeightOptions, place_weights
from ithaca.verify.parity import compare
from ithaca.verify.reference import Batch
from ithaca.verify.small_models.features import build, small_batch
from ithaca.verify.small_models.types import survey_config

TIMEOUT = 90.0
GRACE = 5.0
START = 180.0
LENGTH = 23


@dataclass(slots=True)
class Measured:
    """Result of one architecture's runs: errors by "case: part", features that ran, and the exception of a failed run."""

    errors: dict[str, float] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=inf)

    def add(self, other: Measured) -> None:
        """Merge the result of another rank or world size: the larger errors, all features, the first failure."""
        for key, error in other.errors.items():
            self.errors[key] = max(error, self.errors.get(key, 0.0))
        self.features += [feature for feature in other.features if feature not in self.features]
        self.failure = self.failure or other.failure


def cases(model: PreTrainedModel) -> dict[str, Batch]:
    """Return the batches that every architecture runs, by the name of the case."""
    found: dict[str, Batch] = {
        "plain": small_batch(1, LENGTH),
        "right-padded": _padded(left=False),
        "left-padded": _padded(left=True),
        "packed": _packed((9, 5, 8)),
    }
    if hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        found["router loss"] = {**_padded(left=False), "output_router_logits": True}
    return found


def _padded(*, left: bool) -> dict[str, Tensor]:
    batch = small_batch(2, LENGTH, seed=1)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(0, 7) if left else slice(LENGTH - 7, LENGTH)] = 0
    first = mask.cumsum(1) == 1
    # transformers trains a document's first token from the padding before it, Ithaca does not: both skip that label.
    labels = batch["labels"].masked_fill((mask == 0) | first, -100)
    return {"input_ids": batch["input_ids"].masked_fill(mask == 0, 0), "labels": labels, "attention_mask": mask}


def _packed(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    batch = small_batch(1, sum(lengths), seed=2)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {**batch, "labels": batch["labels"].masked_fill(positions == 0, -100), "position_ids": positions}


def bind_unchecked(model: PreTrainedModel, mesh: Mesh) -> PreTrainedModel:
    """Parallelize the model without checking verdicts, which the survey has yet to find."""
    bind(model, mesh)
    place_weights(model, decoder_layers(model), WeightOptions(mesh))
    return model


def bind_with_memory(model: PreTrainedModel, mesh: Mesh) -> PreTrainedModel:
    """Parallelize with tiles and replayed layers; every second layer recomputes its attention too."""
    layers = decoder_layers(model)
    modes: tuple[LayerMode, ...] = tuple("recompute" if index % 2 else "save" for index in range(len(layers)))
    plan = MemoryPlan(modes, (True,) * len(layers), mlp_tile=5, loss_tile=7)
    install_memory(bind(model, mesh), layers, plan)
    place_weights(model, layers, WeightOptions(mesh))
    return model


def measure(
    config: PreTrainedConfig, mesh: Mesh, *, prepare: Callable[..., PreTrainedModel] = bind_unchecked
) -> Measured:
    """Run every case of a small model on this rank; an exception ends the run and is part of the result."""
    measured = Measured()
    where = "building it"
    try:
        model = build(config)
        for name, batch in cases(model).items():
            where = name
            errors = compare(model, [[batch]], mesh, prepare=_recording_features(prepare, measured.features))
            gradient = max(errors.gradients.values(), default=inf)
            parts = {"loss": errors.loss, "logits": errors.logits, "gradients": gradient}
            # NaN compares as neither large nor small: it counts as infinitely wrong.
            measured.errors |= {f"{name}: {part}": e if isfinite(e) else inf for part, e in parts.items()}
    except Exception as error:
        measured.failure = f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
    return measured


def _recording_features(prepare: Callable[..., PreTrainedModel], features: list[str]) -> Callable[..., PreTrainedModel]:
    """Return `prepare` with an attention function that appends the features of its calls to `features`."""

    def prepare_recording(model: PreTrainedModel, mesh: Mesh) -> PreTrainedModel:
        prepared = prepare(model, mesh)
        bound = ALL_ATTENTION_FUNCTIONS[NAME]

        def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = {
                f"{query.shape[1]}/{key.shape[1]} heads": True,
                "window": kwargs.get("sliding_window") is not None,
                "softcap": kwargs.get("softcap") is not None,
                "sinks": kwargs.get("s_aux") is not None,
                "values of another size": query.shape[-1] != value.shape[-1],
            }
            features.extend(name for name, present in found.items() if present and name not in features)
            return bound(module, query, key, value, *args, **kwargs)

        # The next `bind` registers the plain function again.
        ALL_ATTENTION_FUNCTIONS.register(NAME, record)
        return prepared

    return prepare_recording


def serve(connection: Connection, rank: int, world: int, port: int) -> None:
    """Run one rank until the parent closes the pipe: receive a kind, join its group, measure, leave, send the result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    store = TCPStore("127.0.0.1", port, is_master=False)
    connection.send("ready")
    turn = 0
    while True:
        try:
            kind, memory, overrides = connection.recv()
        except EOFError:
            return
        turn += 1
        group = PrefixStore(f"turn{turn}", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
        try:
            mesh = init_mesh(sp=world, device="cpu")
            prepare = bind_with_memory if memory else bind_unchecked
            measured = measure(survey_config(kind, **overrides), mesh, prepare=prepare)
        except Exception as error:
            measured = Measured(failure=f"building it: {type(error).__name__}: {' '.join(str(error).split())}")
        dist.destroy_process_group()
        connection.send(asdict(measured))


class Ranks:
    """`world` processes that measure one architecture at a time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def measure(self, kind: str, *, memory: bool = False, **overrides: Any) -> Measured:
        """Return the merged results of all ranks for a small `kind`; ranks that do not answer in time are killed."""
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((kind, memory, overrides))
        answers = self._collect()
        measured = Measured()
        # The first failure is reported: a peer's "Connection closed" only follows from it.
        for rank in sorted(answers, key=lambda rank: "Connection closed" in (answers[rank].failure or "")):
            measured.add(answers[rank])
        if len(answers) < self.world:
            self.stop()
            measured.failure = measured.failure or f"no answer from {self.world} ranks within {TIMEOUT:g} s"
        elif not all(process.is_alive() for process in self.processes):
            self.stop()
        return measured

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        self.processes, self.connections = [], []

    def _start(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self.world, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        for connection in self.connections:
            if not connection.poll(START):
                raise RuntimeError(f"the survey's ranks did not start within {START:g} s")
            connection.recv()

    def _collect(self) -> dict[int, Measured]:
        answers: dict[int, Measured] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(answers) < self.world:
            waiting = {self.connections[rank]: rank for rank in range(self.world) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = Measured(**connection.recv())
                except (EOFError, ConnectionError):
                    answer = Measured(failure="a rank ended without an answer")
                answers[waiting[connection]] = answer
                if answer.failure:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers
