"""Steps by which `prepare` turns a user's model and optimizer into sharded ones, in order."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ithaca.errors import UnsupportedError
from ithaca.handle import is_bound
from ithaca.integrations.accelerate_state import save_together
from ithaca.integrations.kernel_names import kernel_for
from ithaca.integrations.model_hooks import take_whole_batches
from ithaca.integrations.settings import Settings
from ithaca.mesh import Mesh
from ithaca.models.planner.memory_planner import planner_of
from ithaca.models.refusals.calls import checkpointing_off, is_checkpointing
from ithaca.models.support import base_model
from ithaca.parallelize import parallelize
from ithaca.planning.search.phrases import TRAINER
from ithaca.state.optimizer.whole_step import needs_whole_weights, step_whole

logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class Preparation:
    """The models and optimizers of one Accelerator. `moved`: each parameter before sharding, to the one after."""

    mesh: Mesh
    settings: Settings
    compute_dtype: torch.dtype | None = None
    moved: MutableMapping[Any, nn.Parameter] = field(default_factory=WeakIdKeyDictionary)

    def model(self, model: nn.Module) -> nn.Module:
        """Parallelize a model and let it take whole batches; a parallelized model is returned as it is."""
        base = base_model(model)
        if self.settings.memory is not None and is_checkpointing(base):
            # `gradient_checkpointing=True` is to save memory, which the memory plan does with less recomputation.
            getattr(base, checkpointing_off(base))()
            if self.mesh.rank == 0:
                logger.info("gradient checkpointing: left to memory=%r, which recomputes what does not fit", "auto")
        if getattr(base.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
            raise UnsupportedError(
                "neftune_noise_alpha scales its noise by the length it sees, a shard's here: set it to None"
            )
        if is_bound(model):
            return model
        kernel = self.settings.kernel
        if kernel == "auto":
            kernel = kernel_for(base.config._attn_implementation or "sdpa")
        before = dict(model.named_parameters())
        parallelize(
            model,
            self.mesh,
            weights=self.settings.weights,
            kernel=kernel,
            memory=self.settings.memory,
            memory_budget=self.settings.memory_budget,
            host_budget=self.settings.host_budget,
            compute_dtype=self.compute_dtype,
            allow_untested=self.settings.allow_untested,
        )
        planner = planner_of(model)
        if planner is not None:
            planner.phrases = TRAINER
        after = dict(model.named_parameters())
        self.moved.update({before[name]: after[name] for name in before})
        take_whole_batches(model, whole_logits=self.settings.whole_logits, length=self.settings.length)
        save_together(model)
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer that was made before `prepare` the sharded parameters."""
        stale = any(p in self.moved for group in optimizer.param_groups for p in group["params"])
        if stale and optimizer.state:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has state from before prepare, which is not sharded: prepare the model and "
                "the optimizer first, then load its state with accelerator.load_state"
            )
        for group in optimizer.param_groups:
            group["params"] = [self.moved.get(p, p) for p in group["params"]]
        if needs_whole_weights(optimizer):
            step_whole(optimizer)
