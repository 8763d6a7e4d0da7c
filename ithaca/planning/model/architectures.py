"""Facts about model types, measured by `tools.survey.survey` and read from `architectures.json`.

    verdicts()["llama"]["verdict"]           "exact": parity was measured; "refused", with its reason, if not
    facts_of("gemma2").sandwiched            what counts of parameters and activations follow from
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

# Keys under which configs hold their number of experts.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class ParityVerdict(TypedDict):
    """The outcome of one type's parity runs: `verdict` is "exact" or "refused", `classes` its causal language model."""

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

    `counted`: parameters follow from the config to a percent, at any size. `linked`: each layer's input is the output
    of the layer before. `learned_positions`: positions are a table of weights, and no row is longer. `tied`: head and
    embedding are one weight unless the config says otherwise. `attention_bias`, `qkv_bias`: biases that linear maps of
    attention have unless the config says otherwise. `sinks`: a weight a head in the softmax. `biased`: norms and linear
    maps have biases. `head_norms`: norms of queries and keys with a weight of one head's size, of all heads' size, or
    of neither. `sandwiched`: outputs of attention and MLP are normed too. `norm_after_mlp`: a norm takes the MLP's
    output. `one_norm`: attention and MLP take the output of one norm. `norms_in_fp32`: up to the product with the
    norm's weight. `centred`: norms take the mean off operation by operation. `gated`: the MLP has a gate.
    `full_width_experts`: an expert is as wide as `intermediate_size`. `expert_biases`: experts and router have biases.
    `full_last`, `full_first`: one layer of so many has no window, the last or the first. `slides_if_set`: a window
    needs `use_sliding_window` in the config. `defaults`: config values that transformers fills in.
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
    """Return the whole file: versions that it was measured with, and a row for each type."""
    text = files("ithaca.planning.model").joinpath("architectures.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def verdicts() -> dict[str, ParityVerdict]:
    """Return the verdict of every surveyed type."""
    return {kind: row["verdict"] for kind, row in architectures()["architectures"].items() if "verdict" in row}


@cache
def facts_of(kind: str) -> ArchitectureFacts:
    """Return the facts about a type; Llama's where the survey has none."""
    return ArchitectureFacts(**architectures()["architectures"].get(kind, {}).get("facts", {}))


def structures_of(kind: str) -> dict[str, Any]:
    """Return what discovery found of a type's layers and models, by their structure; empty where nothing was stored."""
    found: dict[str, Any] = architectures()["architectures"].get(kind, {}).get("structures", {})
    return found
