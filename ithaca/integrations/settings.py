"""What the user asked of `UlyssesConfig`, as plain values: no process group, no device, nothing to pickle around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ithaca.planning.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Settings:
    """`length` is the one length every batch must have, where the user promised one."""

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
        """The same as JSON can hold."""
        return asdict(self)

    def summary(self) -> str:
        values = ((field.name, getattr(self, field.name), field.name == "sp_size") for field in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, always in values if always or value not in _SILENT)


_SILENT = (None, False, 1, "auto", "shard")
