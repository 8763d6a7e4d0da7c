"""`UlyssesConfig`: the one argument of Trainer, SFTTrainer and Accelerator.

A sequence group is one data-parallel process to accelerate, Trainer and TRL: all sizes that they read in this
`ParallelismConfig` are 1, so that they shard no batch, scale no loss and count no token for the ranks inside a group.
The user's sizes are in `settings`. accelerate calls `_validate_accelerator` on every Accelerator that it makes, and the
settings are applied there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerate.utils import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ithaca.arguments import check_count, check_flag, check_kind, named_arguments, shown
from ithaca.attention.kernels import check_name
from ithaca.errors import UnsupportedError
from ithaca.integrations.accelerator import adopt
from ithaca.integrations.kernel_names import kernel_for
from ithaca.integrations.library_versions import check_versions
from ithaca.integrations.settings import Settings
from ithaca.integrations.trainers import check_trainer, name_sharded_weights, place_references, trainer_of_call
from ithaca.mesh import Mesh, init_mesh
from ithaca.parallelize import read_budget, read_memory
from ithaca.planning.memory_plan import MemoryPlan

_WEIGHTS = Literal["shard", "replicate"]
_HANDLER = ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")


@named_arguments
@dataclass(init=False, repr=False, eq=False)
class UlyssesConfig(ParallelismConfig):
    """`TrainingArguments(..., parallelism_config=ithaca.UlyssesConfig(sp_size=4))`, or SFTConfig, or Accelerator.

    `sp_size` ranks share each sequence; the rest of the world is data-parallel. `ring_size`, `memory`, `memory_budget`,
    `host_budget`, `kernel`: as in `ithaca.parallelize`. `weights`: "shard" or "replicate". `whole_logits`: evaluation
    gathers the logits of whole sequences beside the loss, for `compute_metrics` and `predict`. `sp_handler`: accelerate's
    `DeepSpeedSequenceParallelConfig`, or a dict of the same names.
    """

    settings: Settings

    def __init__(
        self,
        sp_size: int = 1,
        ring_size: int = 1,
        *,
        memory: MemoryPlan | Mapping[str, Any] | Literal["auto"] | None = "auto",
        memory_budget: float | str | None = None,
        host_budget: float | str | None = None,
        kernel: str = "auto",
        weights: _WEIGHTS = "shard",
        whole_logits: bool = False,
        sp_handler: Any = None,
        dp_size: int | None = None,
        allow_untested: bool = False,
    ) -> None:
        check_flag("allow_untested", allow_untested)
        check_flag("whole_logits", whole_logits)
        for name, size in (("sp_size", sp_size), ("ring_size", ring_size)):
            check_count(name, size)
        if dp_size is not None:
            check_count("dp_size", dp_size, instead=", or None")
        check_name(kernel)
        check_versions(allow_untested=allow_untested)
        super().__init__(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)
        if weights not in get_args(_WEIGHTS):
            raise UnsupportedError(
                f"weights={weights!r}: Trainer and Accelerator leave the weights to Ithaca, choose 'shard' or 'replicate'"
            )
        read_memory(memory)
        memory = dict(memory) if isinstance(memory, Mapping) else memory
        read_budget("memory_budget", memory_budget)
        read_budget("host_budget", host_budget)
        handler = _read_handler(sp_handler)
        named = handler.get("sp_attn_implementation")
        if named is not None and kernel == "auto":
            kernel = kernel_for(named)
        variable = handler.get("sp_seq_length_is_variable")
        length = handler.get("sp_seq_length") if variable is False else None
        if length is not None:
            check_count("sp_handler's sp_seq_length", length)
        self.settings = Settings(
            sp_size,
            ring_size,
            dp_size,
            memory,
            memory_budget,
            host_budget,
            kernel,
            weights,
            whole_logits,
            length,
            allow_untested,
        )
        self.mesh: Mesh | None = None

    @classmethod
    def from_accelerate(cls, config: ParallelismConfig, **options: Any) -> UlyssesConfig:
        """Return the config for the `ParallelismConfig` of Hugging Face's DeepSpeed recipe; `options` as in `UlyssesConfig`."""
        check_kind("config", config, ParallelismConfig, "pass accelerate's ParallelismConfig(sp_size=...)")
        for name in ("tp", "cp"):
            size = getattr(config, f"{name}_size") or 1
            if size > 1:
                raise UnsupportedError(
                    f"{name}_size={size}: only data and sequence parallelism are done here, use sp_size={size} instead"
                )
        dp = (config.dp_replicate_size or 1) * (config.dp_shard_size or 1)
        handler = config.sp_handler if config.sp_size > 1 else None
        return cls(config.sp_size, sp_handler=handler, dp_size=dp if dp > 1 else None, **options)

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the ranks by accelerate's axes: its loaders give all ranks of `cp` the same rows."""
        if self.mesh is None:
            own = self.settings
            self.mesh = init_mesh(own.sp_size, dp=own.dp_size, ring=own.ring_size, device=device_type)
            box = (self.mesh.dp, self.mesh.shards)
            self.device_mesh = init_device_mesh(self.mesh.device.type, box, mesh_dim_names=("dp_shard", "cp"))
        return self.device_mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Apply the settings; accelerate calls this in the middle of `Accelerator.__init__`."""
        check_versions(allow_untested=self.settings.allow_untested)
        self.get_device_mesh(accelerator.device.type)
        assert self.mesh is not None
        trainer = trainer_of_call()
        if trainer is not None:
            check_trainer(trainer, self.mesh)
            place_references(trainer)
            name_sharded_weights(trainer)
        adopt(accelerator, self.mesh, self.settings)

    def to_json(self) -> UlyssesRecord:
        """Return a record for logs and `to_dict`, which can replace this config where TRL converts arguments."""
        return UlyssesRecord(self)

    def __repr__(self) -> str:
        return f"UlyssesConfig({self.settings.summary()})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without process groups, since Trainer pickles its arguments beside the model."""
        return {**self.__dict__, "mesh": None, "device_mesh": None}


class UlyssesRecord(dict[str, Any]):
    """The settings as plain JSON, with the attributes of the config itself.

    `SFTTrainer(args=TrainingArguments(...))` rebuilds its arguments from `to_dict()`, and needs more than a plain dict.
    """

    def __init__(self, config: UlyssesConfig) -> None:
        super().__init__(config.settings.plain())
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.config, name)

    def __reduce__(self) -> tuple[type[UlyssesRecord], tuple[UlyssesConfig]]:
        return UlyssesRecord, (self.config,)


def _read_handler(handler: Any) -> dict[str, Any]:
    if handler is None:
        return {}
    if isinstance(handler, dict):
        unknown = sorted(map(str, set(handler) - set(_HANDLER)))
        if unknown:
            raise UnsupportedError(f"sp_handler has {unknown[0]!r}: it takes {', '.join(_HANDLER)}")
        return handler
    if not any(hasattr(handler, name) for name in _HANDLER):
        raise UnsupportedError(f"sp_handler is {shown(handler)}: pass a dict with {', '.join(_HANDLER)}")
    return {name: getattr(handler, name, None) for name in _HANDLER}
