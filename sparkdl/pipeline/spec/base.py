"""What all sections of a pipeline file share: how a section is checked, and the kinds of text that stand in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, inspect

from sparkdl.errors import ConfigError

Wrong = tuple[str, str]
"""A field (empty for the section as a whole) and the sentence that follows its name."""


class Refused(ConfigError):
    """A section whose values do not fit.

    Attributes:
        found: every field that does not, with the sentence that follows its name.
    """

    def __init__(self, found: tuple[Wrong, ...]) -> None:
        self.found = found
        super().__init__(found)

    def __str__(self) -> str:
        return "; ".join(f"{name}{sentence}" for name, sentence in self.found)


def one_of(first: str, one: object, second: str, other: object) -> Iterator[Wrong]:
    """Yield what is wrong with two fields of which a section has one."""
    if one is None and other is None:
        yield "", f" has neither {first} nor {second}: write one of the two"
    elif one is not None and other is not None:
        yield "", f" has both {first} and {second}: write one of the two"


class Secret(str):
    """A text that came from a variable of the environment with a telling name: only its reference is ever shown.

    Attributes:
        reference: the text as the file has it, e.g. ``"${API_TOKEN}"``.
    """

    reference: str

    def __new__(cls, value: str, reference: str) -> Secret:
        """Hide ``value`` behind ``reference``."""
        secret = super().__new__(cls, value)
        secret.reference = reference
        return secret

    def __repr__(self) -> str:
        return repr(self.reference)

    def __reduce__(self) -> Any:
        return Secret, (str(self), self.reference)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the file; the bounds of its fields stand in their annotations, and are checked when it is made."""

    short: ClassVar[str] = ""
    """The field that is meant where a bare text stands in the section's place."""

    def _misfits(self) -> Iterator[Wrong]:
        """Yield what of it contradicts itself; asked only where each field is valid."""
        yield from ()

    def __post_init__(self) -> None:
        broken = (
            (field.name, bound_broken(field.type, getattr(self, field.name)))
            for field in section_type(type(self)).fields
        )
        misfits = tuple((name, sentence) for name, sentence in broken if sentence) or tuple(self._misfits())
        if misfits:
            raise Refused(misfits)


@functools.cache
def section_type(section: type) -> inspect.StructType:
    """A section's type as msgspec describes it; reading the annotations is dear, so it is done once."""
    described = inspect.type_info(section)
    assert isinstance(described, inspect.StructType)
    return described


def plain_type(kind: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """A type without what is said about it, and what the JSON schema says of it."""
    constraints: dict[str, Any] = {}
    while isinstance(kind, inspect.Metadata):
        constraints = {**(kind.extra_json_schema or {}), **constraints}
        kind = kind.type
    return kind, constraints


def bound_broken(kind: inspect.Type, value: Any, around: Mapping[str, Any] | None = None) -> str | None:
    """The sentence that says which bound of a type a value of it breaks; None if it breaks none, or is of another.

    Args:
        kind: the type.
        value: that may be of it.
        around: what the JSON schema says of the union that the type is of.
    """
    kind, constraints = plain_type(kind)
    constraints |= around or {}
    match kind:
        case inspect.UnionType():
            return next(filter(None, (bound_broken(inner, value, constraints) for inner in kind.types)), None)
        case inspect.IntType() | inspect.FloatType() if isinstance(value, int | float) and not isinstance(value, bool):
            return _number_broken(kind, constraints, value)
        case inspect.StrType() if isinstance(value, str):
            if kind.min_length and not value.strip():
                return "='' is empty: write a text, or leave it out"
            if kind.pattern and not re.fullmatch(kind.pattern, value):
                example = constraints["examples"][0]
                return f"={value!r} is not of the form that is wanted: write it like {example!r}"
        case inspect.DictType() if isinstance(value, dict):
            return _elements_broken(kind, kind.key_type, value)
        case inspect.VarTupleType() if isinstance(value, tuple | list):
            return _elements_broken(kind, kind.item_type, value)
    return None


def _number_broken(
    kind: inspect.IntType | inspect.FloatType, constraints: Mapping[str, Any], value: float
) -> str | None:
    least, most = constraints.get("minimum", kind.ge), constraints.get("maximum", kind.le)
    if value != value or value in (float("inf"), float("-inf")):
        return f"={value} is no finite number: give one that is"
    if least is not None and value < least:
        return f"={value} is below {least:g}: give at least {least:g}"
    if most is not None and value > most:
        return f"={value} is above {most:g}: give at most {most:g}"
    if kind.gt is not None and value <= kind.gt:
        return f"={value} is not above {kind.gt:g}: give a greater number"
    if kind.lt is not None and value >= kind.lt:
        return f"={value} is not below {kind.lt:g}: give a smaller number"
    return None


def _elements_broken(
    kind: inspect.DictType | inspect.VarTupleType, element: inspect.Type, values: Collection[Any]
) -> str | None:
    if kind.min_length and len(values) < kind.min_length:
        return " is empty: name at least one"
    return next(filter(None, (bound_broken(element, value) for value in values)), None)


def doc(description: str, **bounds: Any) -> Meta:
    """What editors show of a field, and its bounds, as ``Meta`` takes them."""
    return Meta(description=description, **bounds)


Text = Annotated[str, Meta(min_length=1)]
Column = Text
Columns = tuple[Column, ...]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["my-model"])]
Function = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", examples=["mypackage.module:function"])]
Duration = Annotated[str, Meta(pattern=r"^[1-9]\d{0,5} ?(hours?|days?|weeks?)$", examples=["14 days", "6 hours"])]

_HOURS = {"hour": 1, "day": 24, "week": 168}


def hours_of(duration: str) -> int:
    """The hours of ``"14 days"``, ``"6 hours"``, ``"2 weeks"``."""
    number, unit = re.fullmatch(r"(\d+) ?(\w+?)s?", duration).groups()  # type: ignore[union-attr]
    return int(number) * _HOURS[unit]


def spelled(value: object) -> str:
    """A value of the file as YAML and Spark spell it: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def count_of(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
