"""`Settings`: the arguments of `UlyssesConfig` as plain values, without process groups or devices, so that they pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ithaca.planning.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of `UlyssesConfig`. `length`: the length of every batch, if `sp_handler` promised one."""

    sp_size: int
    ring_size: int
    dp_size: int | None
    memory: MemoryPlan | Mapping[str, Any] | Literal["auto"] | None
    memory_budget: float | str | None
    host_budget: float | str | None
    kernel: str
    weights: Literal["shard", "replicate"]
    whole_logits: bool
    length: int | None
    allow_untested: bool

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        return asdict(self)

    def summary(self) -> str:
        """Return `sp_size` and every setting that is not at its default."""
        values = ((field.name, getattr(self, field.name), field.name == "sp_size") for field in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, always in values if always or value not in _SILENT)


_SILENT = (None, False, 1, "auto", "shard")
