"""A run, as pydantic models: what `run.yaml` may say, what it means, and what is refused before anything starts.

`load_run(file, overrides)` reads YAML (plain data only), lays dotted overrides such as `stages.0.length=64k` over it
and checks all of it: an unknown key is named with the nearest right one, a wrong value with what is allowed. Lengths
may be written `128k` or `1M` (of 1,024), numbers of tokens `2B` (of 1,000), memory `60GiB` or `80GB`.

Invariant: no torch here, and nothing is looked up on disk but the file itself: a run can be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ithaca.config.messages import check_keys, sentences
from ithaca.config.overrides import Plain, lay_over, read_yaml
from ithaca.errors import ConfigError
from ithaca.quantities import (
    Bytes,
    Decay,
    Length,
    Number,
    Positive,
    Share,
    Tokens,
    Where,
    WhereIfAny,
    no_truth,
    one_or_more,
    run_name,
)


class Section(BaseModel):
    """A part of the file: keys it does not know are errors, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    """Model to train. `name`: a folder, a hub name, or "embedded", a small byte-level Llama made on the spot.

    `config`: values that take the place of those in the model's config.json, such as `{attn_pdrop: 0}`.
    """

    name: Where = "embedded"
    revision: str | None = None
    tokenizer: Where | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    kernel: str = "auto"
    config: dict[str, Any] = {}


Targets = Annotated[
    Literal["all-linear"] | list[str],
    BeforeValidator(lambda value: value if value == "all-linear" else one_or_more(value)),
]


class Lora(Section):
    """Adapters instead of full fine-tuning; saved by themselves, merged on export."""

    rank: Positive = 16
    alpha: Number = 32.0
    dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Targets = "all-linear"


class Source(Section):
    """Where documents come from: a file, a folder, a glob or a hub name; `kind` and `format` are found out if "auto"."""

    path: Where
    format: Literal["auto", "jsonl", "parquet", "text", "code", "hub"] = "auto"
    kind: Literal["auto", "text", "chat", "tokens", "pair", "alpaca"] = "auto"
    column: str | None = None
    labels: str | None = None
    subset: str | None = None
    split: str = "train"
    include: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


Sources = Annotated[list[Source], BeforeValidator(one_or_more)]


class Data(Section):
    """Documents to rows. `rows`: "packed" (best fit, documents apart) or "joined" (one stream, cut at the length).

    `special_tokens`: "parse" makes tokens of their spellings in plain text, as the tokenizer does, "text" leaves them text.
    """

    sources: Sources = [Source(path="stdlib", format="code")]
    rows: Literal["packed", "joined"] = "packed"
    learn: Literal["assistant", "all"] = "assistant"
    chat_template: str | None = None
    special_tokens: Literal["parse", "text"] = "parse"
    streaming: bool = False
    bad_share: Share = 0.01
    cache: Where | None = None
    workers: Positive = 1


class Validation(Section):
    """Documents held back: a share of the data's, or sources of their own; every `every` steps and after each stage."""

    share: Share = 0.0
    sources: Sources = []
    every: Positive = 100
    rows: Positive = 16


class Rope(Section):
    """How positions are stretched for a stage: another `theta`, or a scaling by `factor` over `original` positions."""

    kind: Literal["theta", "linear", "ntk", "yarn", "llama3"]
    theta: Annotated[Number, Field(gt=0)] | None = None
    factor: Annotated[Number, Field(ge=1)] | None = None
    original: Length | None = None
    low_freq_factor: Number = 1.0
    high_freq_factor: Number = 4.0

    @model_validator(mode="after")
    def _complete(self) -> Rope:
        if self.kind == "theta" and self.theta is None:
            raise ValueError("rope of kind 'theta' needs theta, such as theta: 500000")
        if self.kind != "theta" and self.factor is None:
            raise ValueError(f"rope of kind {self.kind!r} needs factor, such as factor: 4")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be above 0 and below high_freq_factor "
                f"{self.high_freq_factor:g}: use low_freq_factor: 1 and high_freq_factor: 4"
            )
        return self


class Stage(Section):
    """One context length. `batch` is rows a step over all sequence groups; `steps` or `tokens` says how long.

    Over `warmup` (a share below 1, else steps) the rate rises to `lr` from where the last stage ended; then it falls to
    `final` of it.
    """

    length: Annotated[Length, Field(ge=2)]
    steps: Positive | None = None
    tokens: Tokens | None = None
    batch: Positive = 1
    lr: Annotated[Number, Field(gt=0)] = 1e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[Number, Field(ge=0)] = 0.05
    final: Share = 0.1
    rope: Rope | None = None
    sp: Positive | None = None

    @model_validator(mode="after")
    def _one_duration(self) -> Stage:
        if (self.steps is None) == (self.tokens is None):
            given = "neither is given" if self.steps is None else "set the other one to null"
            raise ValueError(f"a stage takes steps or tokens: {given}")
        return self

    @property
    def count(self) -> int:
        """How many optimizer steps the stage takes."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(1, round(self.tokens / (self.length * self.batch)))


class MeshDegrees(Section):
    """Degrees of parallelism. `sp: auto` takes all processes, up to the model's heads. `replicas`: copies of weights."""

    sp: Positive | Literal["auto"] = "auto"
    ring: Positive = 1
    replicas: Positive = 1

    def refuse_ring(self) -> None:
        """A plan may look at a ring for comparison; a run, and what proves or rehearses one, cannot have it."""
        if self.ring > 1:
            raise ConfigError("mesh.ring: ring attention is not there yet: use mesh.ring=1")


# What of a plan may be decided, for all layers or each, and for all.
_EACH, _PIECES = ("layers", "offload"), ("mlp_tile", "loss_tile", "head_groups")


class Memory(Section):
    """`plan: auto` keeps as much as fits `budget` (three quarters of the device); "none" leaves it to autograd.

    `host_budget` is what one rank may take of the host's memory (three quarters of its part of what is free there). The
    last five decide by hand what they name, the plan the rest: `layers` the mode of all layers or of each, `offload`
    whether what they save goes to the host, likewise.
    """

    plan: Literal["auto", "none"] = "auto"
    budget: Bytes | None = None
    host_budget: Bytes | None = None
    on_host: Literal["nothing", "everything"] = "nothing"
    layers: Annotated[list[Literal["keep", "save", "rebuild", "recompute"]], BeforeValidator(one_or_more)] = []
    offload: Annotated[list[bool], BeforeValidator(one_or_more)] = []
    mlp_tile: Length | None = None
    loss_tile: Length | None = None
    head_groups: Positive | None = None

    @property
    def decided(self) -> dict[str, Any]:
        """What is not left to the plan, as `parallelize(memory=...)` takes it."""
        each = {name: value[0] if len(value) == 1 else value for name in _EACH if (value := getattr(self, name))}
        return each | {name: value for name in _PIECES if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _check_decided(self) -> Memory:
        if self.decided and self.plan == "none":
            raise ValueError(f"plan=none leaves all to autograd: leave out {', '.join(self.decided)}, or use plan=auto")
        return self


class Optimizer(Section):
    """AdamW in one of three kinds; `clip: 0` clips nothing."""

    name: Literal["adamw", "adamw8bit", "bf16_sr"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    clip: Annotated[Number, Field(ge=0)] = 1.0
    in_backward: bool = False


class Checkpoints(Section):
    """`save_every` steps, the last `keep` kept, besides the one at each stage's end; written while training goes on."""

    save_every: Positive = 200
    keep: Positive = 2
    background: bool = True


class Metrics(Section):
    """Every `every` steps a line of metrics.jsonl; every `apart_every` also time by part and loss by position.

    `trackers` are accelerate's.
    """

    every: Positive = 1
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    project: str = "ithaca"
    apart_every: Positive = 10


class Limits(Section):
    """Seconds to save in when told to stop, seconds without progress before a hang is named, bad steps in a row."""

    grace: Annotated[Number, Field(gt=0)] = 60.0
    hang: Annotated[Number, Field(gt=0)] = 600.0
    bad_steps: Positive = 5


class Launch(Section):
    """Processes on this machine: all GPUs, or two on the CPU, if "auto"."""

    processes: Positive | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Run(Section):
    """The whole file. Left out, a section has the defaults above; all of them together are the embedded run.

    `output`: the run's folder; left out, it is named after the model and the data, so each pair has a folder of its own.
    """

    output: WhereIfAny = ""
    seed: Annotated[int, BeforeValidator(no_truth), Field(ge=0, lt=2**63)] = 0
    precision: Literal["auto", "mixed", "bf16", "fp32"] = "auto"
    model: Model = Model()
    lora: Lora | None = None
    data: Data = Data()
    validation: Validation = Validation()
    stages: Annotated[list[Stage], Field(min_length=1)] = [
        Stage(length=1024, steps=60, batch=2, lr=3e-3, warmup=0.1),
        Stage(length=4096, steps=16, batch=1, lr=1e-3, warmup=0.1, rope=Rope(kind="theta", theta=500_000)),
    ]
    mesh: MeshDegrees = MeshDegrees()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    checkpoints: Checkpoints = Checkpoints()
    metrics: Metrics = Metrics()
    limits: Limits = Limits()
    launch: Launch = Launch()

    @model_validator(mode="before")
    @classmethod
    def _stages_of_any_other_model(cls, value: Any) -> Any:
        """The stages above are the embedded model's: their rate and RoPE would undo what another one has learned."""
        model = value.get("model") if isinstance(value, Mapping) else None
        name = model.get("name") if isinstance(model, Mapping) else getattr(model, "name", None)
        if name in (None, Model().name) or "stages" in value:
            return value
        return {**value, "stages": [Stage(length=4096, steps=100)]}

    @model_validator(mode="after")
    def _in_a_folder(self) -> Run:
        if not self.output:
            demo = self.model.name == Model().name and self.data.sources == Data().sources
            given = [self.model.revision, *(source.model_dump(exclude={"path"}) for source in self.data.sources)]
            names = run_name(self.model.name, [source.path for source in self.data.sources], given)
            # The model is frozen once it is read; here it is being read.
            self.__dict__["output"] = "runs/first" if demo else f"runs/{names}"
        return self

    @field_validator("precision", mode="before")
    @classmethod
    def _no_half(cls, value: object) -> object:
        if value in ("fp16", "float16", "half"):
            raise ValueError(f"{value!r} overflows without loss scaling, which is not exact: use 'mixed' or 'bf16'")
        return value

    @model_validator(mode="after")
    def _together(self) -> Run:
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


def load_run(file: str | Path | None, overrides: Iterable[str] = ()) -> Run:
    """The run that a YAML file (None: the embedded default) and `key.sub=value` overrides describe."""
    return read_run(_read(file), overrides)


def read_run(given: Mapping[str, Any], overrides: Iterable[str] = ()) -> Run:
    """The same of what a file would have held."""
    merged = lay_over(given, overrides, lambda model: Run(model=Model.model_construct(**model)).model_dump(mode="json"))
    check_keys(Run, merged)
    try:
        return Run.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(sentences(error.errors(), Run)[:3])) from None


def dump_run(run: Run) -> str:
    """The whole of it as YAML, defaults written out, in the order of the file's sections."""
    text: str = yaml.dump(run.model_dump(mode="json"), Dumper=Plain, sort_keys=False, allow_unicode=True)
    return text


def _read(file: str | Path | None) -> dict[str, Any]:
    if file is None:
        return {}
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
