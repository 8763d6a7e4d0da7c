"""Facts about model types, measured by `tools.survey.survey` and read from `architectures.json`.

    verdicts()["llama"]["verdict"]           "exact": parity was measured; "refused", with its reason, if not
    facts_of("gemma2").sandwiched            facts from which parameters and activations are counted
    structures_of("llama")["layers"]         roles of a layer's children, by a key of the layer's structure

The file is the only home of such facts. No torch and no transformers: `ithaca plan` reads it within a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NotRequired, TypedDict

# Config keys for the number of experts.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class ParityVerdict(TypedDict):
    """Result of one type's parity runs: `verdict` is "exact" or "refused", `classes` the causal language model's class."""

    verdict: str
    cause: str
    reason: str
    classes: str
    worst: float | None
    experts: bool
    features: str
    exact_without: NotRequired[str]
    memory: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ArchitectureFacts:
    """Properties of one type's modules that its config does not name. The defaults are Llama's.

    `counted`: parameters can be counted from the config, exact to a percent. `linked`: each layer's input is the output
    of the layer before. `learned_positions`: position embeddings are a table of weights, which limits the row length.
    `tied`: head and embedding share one weight unless the config says otherwise. `attention_bias`, `qkv_bias`: linear
    layers of attention have biases unless the config says otherwise. `sinks`: attention has one sink weight a head.
    `biased`: norms and linear layers have biases. `head_norms`: the weight of the norms of queries and keys has one
    head's size ("head"), all heads' size ("heads") or another ("other"). `sandwiched`: the outputs of attention and MLP
    are normed too. `norm_after_mlp`: a norm reads the MLP's output. `one_norm`: attention and MLP read the output of one
    norm. `norms_in_fp32`: a norm computes in fp32 until its weight is applied. `centred`: norms subtract the mean in
    separate operations. `gated`: the MLP has a gate. `full_width_experts`: an expert is as wide as `intermediate_size`.
    `expert_biases`: experts and router have biases. `full_last`, `full_first`: of every so many layers, the last (first)
    has no window. `slides_if_set`: windows need `use_sliding_window` in the config. `defaults`: config values that
    transformers fills in.
    """

    counted: bool = False
    linked: bool = True
    learned_positions: bool = False
    tied: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    sinks: bool = False
    biased: bool = False
    head_norms: Literal["", "head", "heads", "other"] = ""
    sandwiched: bool = False
    norm_after_mlp: bool = False
    one_norm: bool = False
    norms_in_fp32: bool = False
    centred: bool = False
    gated: bool = True
    full_width_experts: bool = False
    expert_biases: bool = False
    full_last: int = 0
    full_first: int = 0
    slides_if_set: bool = False
    defaults: Mapping[str, Any] | None = None


@cache
def architectures() -> dict[str, Any]:
    """Return the whole file: the versions of torch and transformers it was measured with, and a row for each type."""
    text = files("ithaca.planning.model").joinpath("architectures.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def verdicts() -> dict[str, ParityVerdict]:
    """Return the verdict of every surveyed type."""
    return {kind: row["verdict"] for kind, row in architectures()["architectures"].items() if "verdict" in row}


@cache
def facts_of(kind: str) -> ArchitectureFacts:
    """Return the facts about a type; Llama's if the survey has none."""
    return ArchitectureFacts(**architectures()["architectures"].get(kind, {}).get("facts", {}))


def structures_of(kind: str) -> dict[str, Any]:
    """Return the survey's findings about a type's layers and models, by structure key; an empty dict if there are none."""
    found: dict[str, Any] = architectures()["architectures"].get(kind, {}).get("structures", {})
    return found
