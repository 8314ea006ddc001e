"""The inputs of the model: their order, names, shapes and cardinalities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.features.spec import (
    CATEGORIES,
    NUMBERS,
    Category,
    DateParts,
    Encoded,
    Feature,
    Image,
    Number,
    Part,
    Vector,
    input_names,
)
from sparkdl.features.statistics import Statistics

_PARTS: dict[Part, int] = {"quarter": 4, "month": 12, "day": 31, "weekday": 7, "hour": 24, "minute": 60}


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input of the model.

    A model factory sizes its layers by these, and shards and signatures take their types.

    Attributes:
        name: of it.
        dtype: of its elements: ``"float32"``, ``"uint8"``, or ``"int64"`` for ids.
        shape: of one row; ``()`` where rows differ in length.
        names: what each column of ``numbers`` and ``categories`` is, in order; the feature's own name otherwise.
        cardinalities: of ids, how many there are, the unknown 0 among them: one for each of ``names``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    cardinalities: tuple[int, ...] = ()

    @property
    def field(self) -> pa.Field:
        """Its column in a record batch."""
        item = pa.field("item", pa.type_for_alias(self.dtype), nullable=False)
        kind = pa.list_(item, math.prod(self.shape)) if self.shape else pa.list_(item)
        return pa.field(self.name, kind, nullable=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of fixed shape; 0 where rows differ."""
        return math.prod(self.shape) * pa.type_for_alias(self.dtype).bit_width // 8 if self.shape else 0


def inputs_of(features: Mapping[str, tuple[Feature, Statistics]]) -> tuple[Input, ...]:
    """The inputs that fitted features make: ``numbers``, ``categories``, then the others in their order."""
    numbers: list[str] = []
    categories: dict[str, int] = {}
    other_inputs: list[Input] = []
    for name, (options, statistics) in features.items():
        names = input_names(name, options)
        if isinstance(options, Number):
            numbers += names[NUMBERS]
        elif isinstance(options, Category):
            categories[name] = _cardinality(options, statistics)
        elif isinstance(options, DateParts):
            categories |= {
                label: part_ids(part, statistics) + 1
                for label, part in zip(names[CATEGORIES], options.parts, strict=True)
            }
        elif isinstance(options, Encoded):
            ids = (_cardinality(options, statistics),)
            other_inputs.append(Input(name=name, dtype="int64", shape=(), names=(name,), cardinalities=ids))
        elif isinstance(options, Vector):
            other_inputs.append(Input(name=name, dtype="float32", shape=(options.size or 0,), names=(name,)))
        elif isinstance(options, Image):
            dtype = "float32" if options.scale == "unit" else "uint8"
            shape = (options.channels, options.height, options.width)
            other_inputs.append(Input(name=name, dtype=dtype, shape=shape, names=(name,)))
    shared = []
    if numbers:
        shared.append(Input(name=NUMBERS, dtype="float32", shape=(len(numbers),), names=tuple(numbers)))
    if categories:
        sizes, labels = tuple(categories.values()), tuple(categories)
        shared.append(Input(name=CATEGORIES, dtype="int64", shape=(len(labels),), names=labels, cardinalities=sizes))
    return (*shared, *other_inputs)


def part_ids(part: Part, statistics: Statistics) -> int:
    """How many ids a part of a date has, besides the unknown 0."""
    if part != "year":
        return _PARTS[part]
    return int(statistics.maximum or 0) - int(statistics.minimum or 0) + 1


def _cardinality(options: Encoded, statistics: Statistics) -> int:
    return (len(statistics.values) if options.buckets is None else options.buckets) + 1
