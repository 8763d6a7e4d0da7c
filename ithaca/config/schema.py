"""The run file `run.yaml`: its sections as pydantic models, and its reader.

    run = load_run("run.yaml", ["stages.0.length=64k"])  # YAML, then overrides, then every check
    run.stages[0].length                                 # 65536
    dump_run(run)                                        # the whole file, defaults written out

An unknown key is refused with the nearest right one, a wrong value with what is allowed. Lengths may be written `128k`
or `1M` (k is 1,024), numbers of tokens `2B` (k is 1,000), memory `60GiB` or `80GB`.

Invariant: torch is not imported, and nothing on disk is read but the file itself: a run can be read anywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from ithaca.config.data_sections import DataSettings, LoraSettings, ModelSettings, SourceSettings, ValidationSettings
from ithaca.config.field_types import PathOrEmpty, Section
from ithaca.config.messages import check_keys, sentences
from ithaca.config.overrides import PlainDumper, apply_overrides, read_yaml
from ithaca.config.training_sections import (
    CheckpointSettings,
    LaunchSettings,
    MemorySettings,
    MeshSettings,
    MetricsSettings,
    OptimizerSettings,
    RopeSettings,
    StageSettings,
    TimeoutSettings,
)
from ithaca.errors import ConfigError
from ithaca.quantities import refuse_bool

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "LaunchSettings",
    "LoraSettings",
    "MemorySettings",
    "MeshSettings",
    "MetricsSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RopeSettings",
    "RunSettings",
    "SourceSettings",
    "StageSettings",
    "TimeoutSettings",
    "ValidationSettings",
    "dump_run",
    "load_run",
    "read_run",
]


class RunSettings(Section):
    """The whole run file. All defaults together are the embedded run, which needs no model and no documents."""

    output: PathOrEmpty = ""
    """Folder of the run; `runs/` and a name made of the model and the data if left out."""

    seed: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, lt=2**63)] = 0
    """Seed of the order of rows, of dropout and of random weights."""

    precision: Literal["auto", "mixed", "bf16", "fp32"] = "auto"
    """`mixed`: fp32 weights, bf16 computing; `bf16` or `fp32`: one format for both; `auto`: by device and optimizer."""

    model: ModelSettings = ModelSettings()
    """Model to train."""

    lora: LoraSettings | None = None
    """Adapters instead of full fine-tuning; none if left out."""

    data: DataSettings = DataSettings()
    """Documents, and how they become rows."""

    validation: ValidationSettings = ValidationSettings()
    """Documents held back."""

    stages: Annotated[list[StageSettings], Field(min_length=1)] = [
        StageSettings(length=1024, steps=60, batch=2, lr=3e-3, warmup=0.1),
        StageSettings(
            length=4096, steps=16, batch=1, lr=1e-3, warmup=0.1, rope=RopeSettings(kind="theta", theta=500_000)
        ),
    ]
    """Context lengths, trained at one after the other; 100 steps at 4,096 tokens for any model but the embedded one."""

    mesh: MeshSettings = MeshSettings()
    """Degrees of parallelism."""

    memory: MemorySettings = MemorySettings()
    """Activation checkpointing plan."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer."""

    checkpoints: CheckpointSettings = CheckpointSettings()
    """Checkpoints to resume from."""

    metrics: MetricsSettings = MetricsSettings()
    """Numbers written while training."""

    limits: TimeoutSettings = TimeoutSettings()
    """Bounds after which a run stops."""

    launch: LaunchSettings = LaunchSettings()
    """Processes on this machine."""

    @model_validator(mode="before")
    @classmethod
    def _default_stages(cls, value: Any) -> Any:
        """Give a model that is not the embedded one its own default stage."""
        model = value.get("model") if isinstance(value, Mapping) else None
        name = model.get("name") if isinstance(model, Mapping) else getattr(model, "name", None)
        if name in (None, ModelSettings().name) or "stages" in value:
            return value
        # The embedded model's learning rate and RoPE would undo what a pretrained model has learned.
        return {**value, "stages": [StageSettings(length=4096, steps=100)]}

    @model_validator(mode="after")
    def _name_output(self) -> RunSettings:
        if not self.output:
            demo = self.model.name == ModelSettings().name and self.data.sources == DataSettings().sources
            given = [self.model.revision, *(source.model_dump(exclude={"path"}) for source in self.data.sources)]
            name = _run_name(self.model.name, [source.path for source in self.data.sources], given)
            # Past `frozen`: this validator runs before anybody holds the object.
            self.__dict__["output"] = "runs/first" if demo else f"runs/{name}"
        return self

    @field_validator("precision", mode="before")
    @classmethod
    def _refuse_fp16(cls, value: object) -> object:
        if value in ("fp16", "float16", "half"):
            raise ValueError(f"{value!r} overflows without loss scaling, which is not exact: use 'mixed' or 'bf16'")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> RunSettings:
        if self.optimizer.name == "bf16_sr" and self.precision in ("mixed", "fp32"):
            raise ValueError(
                f"optimizer.name 'bf16_sr' rounds bf16 weights: precision {self.precision!r} has none; use 'bf16'"
            )
        if self.optimizer.in_backward and self.optimizer.clip:
            raise ValueError("optimizer.in_backward steps before all gradients are known: set optimizer.clip=0 with it")
        if self.optimizer.in_backward and any(stage.batch > 1 for stage in self.stages):
            raise ValueError("optimizer.in_backward steps at the first row's gradients: use stages of batch 1 with it")
        if self.lora is not None and self.model.weights == "random":
            raise ValueError(
                "lora needs model.weights=pretrained: random weights have nothing to adapt; or leave lora out"
            )
        return self


def _run_name(model: str, sources: Sequence[str], rest: object) -> str:
    """Return the last parts of the model's and the data's paths, and digits that tell runs with equal parts apart."""
    paths = [path.rstrip("/") for path in (model, *sources)]
    digits = hashlib.sha256(repr((paths, rest)).encode()).hexdigest()[:6]
    more = "-and-more" if len(sources) > 1 else ""
    return f"{_last_part(paths[0])}-{_last_part(paths[1]) if sources else 'data'}{more}-{digits}"


def _last_part(path: str) -> str:
    """Return the last part of a path or hub name, in letters that every file system takes."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", path.rpartition("/")[2]).strip("-.")
    return name[:40].rstrip("-.") or "folder"


def load_run(file: str | Path | None, overrides: Iterable[str] = ()) -> RunSettings:
    """Read a YAML file (None: the embedded run) and lay `key.sub=value` overrides over it."""
    return read_run({} if file is None else _read_file(file), overrides)


def read_run(given: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunSettings:
    """Read the content of a run file, already parsed, and lay overrides over it."""

    def defaults(model: dict[str, Any]) -> dict[str, Any]:
        return RunSettings(model=ModelSettings.model_construct(**model)).model_dump(mode="json")

    merged = apply_overrides(given, overrides, defaults)
    check_keys(RunSettings, merged)
    try:
        return RunSettings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(sentences(error.errors(), RunSettings)[:3])) from None


def dump_run(run: RunSettings) -> str:
    """Return the whole run as YAML, defaults written out."""
    text: str = yaml.dump(run.model_dump(mode="json"), Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    return text


def _read_file(file: str | Path) -> dict[str, Any]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: name a run.yaml, or nothing for the embedded run") from None
    except IsADirectoryError:
        model = f"; a model's folder is given as model.name={file}" if Path(file, "config.json").is_file() else ""
        raise ConfigError(f"{file} is a folder: name a run.yaml{model}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): name a YAML file") from None
    try:
        content = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{file}{error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a text" if isinstance(content, str) else "one value"
        raise ConfigError(f"{file} holds {kind}: sections such as `model:` and `stages:` are needed")
    return content
