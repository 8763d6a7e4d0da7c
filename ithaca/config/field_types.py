"""Types of the run file's fields: `128k`, `2B`, `60GiB`, shares, paths with `~`; and the base of all sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ithaca.quantities import expand_home, parse_bytes, parse_number, refuse_bool, require_unit


def as_list(value: object) -> object:
    """Return a list as it is, any other value as a list of one, and None as an empty list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# Lengths are powers of two in practice, so k is 1,024; budgets of tokens are counted in thousands.
Length = Annotated[int, BeforeValidator(lambda value: parse_number(value, 1024)), Field(ge=1)]
TokenCount = Annotated[int, BeforeValidator(lambda value: parse_number(value, 1000)), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), AfterValidator(require_unit)]
Number = Annotated[float, BeforeValidator(refuse_bool)]
PositiveNumber = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0.0, le=1.0)]
ShareBelowOne = Annotated[Number, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
PathText = Annotated[str, AfterValidator(expand_home)]
PathOrEmpty = Annotated[str, AfterValidator(lambda value: expand_home(value) if value else value)]


class Section(BaseModel):
    """Part of the run file: an unknown key is an error, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
