"""Models that are exact under sequence parallelism, and the reasons why others are refused.

Three checks run before the first collective: of the wrapping (a compiled, sharded or dispatched model is refused), of the
architecture (the survey's verdicts in `planning/model/architectures.json`), and of the settings in the config.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.arguments import shown
from ithaca.errors import UnsupportedError
from ithaca.handle import is_bound
from ithaca.models.refusals.compiled import compiled_within
from ithaca.models.refusals.foreign_code import refuse_own_attention
from ithaca.models.refusals.peft_kinds import check_adapters
from ithaca.models.refusals.random_depth import refuse_dropped_layers
from ithaca.planning.model.architectures import ParityVerdict, verdicts
from ithaca.planning.model.config_names import refuse_attention_dropout

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
_COMPILES = "parallelize itself compiles norms, activations and rotary embeddings (fuse=True)"


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or the model itself; raise UnsupportedError for any other."""
    inner: Any = model
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        inner = inner.get_base_model()
    if isinstance(inner, PreTrainedModel):
        return inner
    kind = f"{type(model).__module__.split('.')[0]}'s {type(model).__name__}"
    if isinstance(model, str):
        raise UnsupportedError(f"{model!r} is a name: pass the model, AutoModelForCausalLM.from_pretrained({model!r})")
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"the model is {shown(model)}: pass a transformers model, as in parallelize(model, mesh)"
        )
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(f"{kind} is compiled: pass the model inside it, model._orig_mod, {_COMPILES}")
    if hasattr(model, "module"):
        raise UnsupportedError(
            f"{kind} is already wrapped: pass the model inside it to parallelize, and wrap afterwards with weights='none'"
        )
    raise UnsupportedError(
        f"{kind} is not a transformers model: in a hand-written model call ithaca.ulysses_attention where it attends"
    )


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of a model: the model as given, the transformers model inside, and its decoder layers."""

    model: nn.Module
    base: PreTrainedModel
    layers: list[nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        base = base_model(model)
        return cls(model, base, decoder_layers(base))


def memory_refusal(base: PreTrainedModel) -> str | None:
    """Return the reason why layers of this architecture cannot run again; None if replays are exact."""
    kind = str(base.config.model_type)
    known = verdicts().get(kind)
    said = known.get("memory", "not measured") if known else "not measured"
    return None if said == "exact" else f"{kind}: {said}"


def check_model(parts: ModelParts, *, allow_untested: bool) -> None:
    """Raise unless this model, wrapped and set up as it is, is exact under sequence parallelism."""
    base = parts.base
    _check_wrapping(parts.model, base)
    check_adapters(parts.model, allow_untested=allow_untested)
    _check_architecture(base, allow_untested)
    _check_settings(base)
    _check_windows(base)
    refuse_own_attention(base)
    _check_shared_modules(parts.layers)
    refuse_dropped_layers(base, measured=str(base.config.model_type) in verdicts())


def decoder_layers(base: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks: list entries of the classes in transformers' `_no_split_modules`."""
    names = set(base._no_split_modules or ())
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    # fully_shard renames LlamaDecoderLayer to FSDPLlamaDecoderLayer.
    return [layer for blocks in lists for layer in blocks if type(layer).__name__.removeprefix("FSDP") in names]


def _check_wrapping(model: nn.Module, base: PreTrainedModel) -> None:
    name = type(base).__name__.removeprefix("FSDP")
    sharded = next((key for key, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if is_bound(base):
        # unbind leaves weights sharded.
        instead = "call ithaca.unbind(model) first" if sharded is None else "build or load it anew"
        raise UnsupportedError(f"{name} is parallelized already: {instead}")
    if getattr(base, "_tp_size", None) or getattr(base, "tp_size", None):
        raise UnsupportedError(
            f"{name} is tensor-parallel: load it without tp_plan; sequence parallelism splits tokens instead"
        )
    compiled = compiled_within(model)
    if compiled is not None:
        raise UnsupportedError(
            f"{name} is compiled ({compiled or 'the model'}): build it without torch.compile, {_COMPILES}"
        )
    if sharded is not None:
        raise UnsupportedError(
            f"{name} is sharded already ({sharded} is a DTensor): build or load it anew, and parallelize it before "
            "anything shards it"
        )
    hooked = next((key for key, m in model.named_modules() if hasattr(m, "_hf_hook")), None)
    if hooked is not None:
        raise UnsupportedError(
            f"{name} is dispatched by a device_map ({hooked or 'the model'}): load it without device_map"
        )


def _check_architecture(base: PreTrainedModel, allow_untested: bool) -> None:
    kind = base.config.model_type
    row = verdicts().get(kind)
    if row is None:
        near = difflib.get_close_matches(kind, [k for k, v in verdicts().items() if v["verdict"] == "exact"], 3)
        hint = f"; nearest that are: {', '.join(near)}" if near else ""
        if not allow_untested:
            raise UnsupportedError(
                f"the architecture {kind!r} has no parity run behind it{hint}. allow_untested=True lets it through: "
                "compare its loss with one process first"
            )
    elif row["verdict"] != "exact" and not _exact_as_set(base, row):
        raise UnsupportedError(f"the architecture {kind!r} is refused: {row['reason']}")
    elif all(each.__name__ != row["classes"] for each in type(base).__mro__):
        raise UnsupportedError(
            f"{type(base).__name__} is no causal language model: pass the {kind} model with its head"
        )


def _exact_as_set(base: PreTrainedModel, row: ParityVerdict) -> bool:
    """True if the config switches off the only part of the architecture that is not exact."""
    config: Any = base.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = bool(getattr(config, "sliding_window", None)) and (kinds is None or "sliding_attention" in kinds)
    return row.get("exact_without") == "window" and not windowed


def _check_settings(base: PreTrainedModel) -> None:
    config: Any = base.config.get_text_config()
    refuse_attention_dropout(lambda key: getattr(config, key, None))
    if getattr(config, "output_attentions", False):
        raise UnsupportedError(
            "config.output_attentions=True: attention weights are never materialised here, set it to False"
        )
    if not getattr(config, "return_dict", True):
        raise UnsupportedError("config.return_dict=False: transformers' own models cannot do without, set it to True")
    both = next((key for key, module in base.named_modules() if getattr(module, "is_causal", True) is False), None)
    if both is not None:
        raise UnsupportedError(
            f"{both} attends in both directions, to the tokens that are to be learned: set is_decoder=True in its config"
        )
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "absolute") == "alibi":
        raise UnsupportedError("ALiBi biases do not reach the attention function, so they would be dropped")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedError("cross-attention is not sharded: only decoders that attend to themselves are exact")
    if getattr(config, "use_bidirectional_attention", None) == "all":
        raise UnsupportedError(
            "config.use_bidirectional_attention='all' does not reach the attention function: refused"
        )
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if strange:
        raise UnsupportedError(
            f"config.layer_types has {strange[0]!r} layers, which are not exact when tokens are split"
        )


def _check_windows(base: PreTrainedModel) -> None:
    """Raise UnsupportedError if a layer's window differs from its config's: eager masks by one, flash by the other."""
    for name, module in base.named_modules():
        config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
        asked = getattr(config, "sliding_window", None)
        if not isinstance(asked, int) or "sliding_window" not in vars(module):
            continue
        kinds = getattr(config, "layer_types", None) or ()
        slides = isinstance(index, int) and index < len(kinds) and kinds[index] == "sliding_attention"
        window = module.sliding_window
        if window != asked and (slides or window is not None):
            raise UnsupportedError(
                f"{name}.sliding_window is {window} and its config's is {asked}: set both to one window, or the layer's "
                "entry of config.layer_types"
            )


def _check_shared_modules(layers: list[nn.Module]) -> None:
    """Raise UnsupportedError if two layers share a module with weights: the module could follow one layer's mode only."""
    owners: dict[nn.Module, int] = {}
    for index, layer in enumerate(layers):
        for name, module in (("", layer), *layer.named_children()):
            if next(module.parameters(), None) is None:
                continue
            first = owners.setdefault(module, index)
            if first != index:
                what = f"share one {name}" if name else "are one module"
                raise UnsupportedError(f"layers {first} and {index} {what}: give each its own, by copy.deepcopy")
