"""Labels: what is predicted, as the numbers that a loss takes; the same in training, validation and evaluation.

Enters: the section ``label`` and the training rows. Leaves: a frozen ``Labels``, which travels with the model, and the
label columns as numbers: float32 for a regression, 0 or 1 for a binary label, the index of its class otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.spec import Label

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["FittedLabel", "Labels", "check_labels", "check_weight", "encoded", "fit_labels"]

_MOST_CLASSES = 10_000
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "decimal", "boolean")


@dataclass(frozen=True, kw_only=True)
class FittedLabel:
    """One label, as the training rows have it.

    Attributes:
        name: of its column.
        type: as in the file.
        classes: its values, in the order of the model's outputs; ``(negative, positive)`` of a binary label; as text.
        mean: of a regression's training rows; of a binary label the share of positives; 0 otherwise.
        deviation: of a regression's training rows, 1 for other types.
    """

    name: str
    type: Literal["regression", "binary", "multiclass"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def outputs(self) -> int:
        """Numbers that the model says of a row: one, or one a class."""
        return len(self.classes) if self.type == "multiclass" else 1


@dataclass(frozen=True, kw_only=True)
class Labels:
    """All labels of a pipeline, in the order of the file."""

    labels: tuple[FittedLabel, ...]

    def __iter__(self) -> Iterator[FittedLabel]:
        return iter(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """Their columns."""
        return tuple(label.name for label in self.labels)


def fit_labels(rows: DataFrame, labels: Mapping[str, Label]) -> Labels:
    """Look at the training rows' labels: their classes, means and deviations.

    Raises:
        SchemaError: a column is missing, or of a type that the label cannot be made of.
        DataError: a label is missing in some rows, is the same in all, is not finite, or has too many classes.
    """
    _check_columns(rows, labels)
    return Labels(labels=tuple(_fit(rows, name, each) for name, each in labels.items()))


def encoded(name: str, label: FittedLabel) -> Column:
    """The column of a label as numbers; null where it is missing or no class that training saw."""
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    if label.type == "regression":
        return column.cast("double").cast("float")
    found = F.coalesce(
        *[F.when(column.cast("string") == value, F.lit(place)) for place, value in enumerate(label.classes)]
    )
    return found.cast("float") if label.type == "binary" else found.cast("bigint")


def check_labels(rows: DataFrame, labels: Labels, part: str) -> None:
    """Refuse rows whose label is missing, no number that a loss takes, or no class that training saw.

    Args:
        rows: with the label columns as they came.
        labels: as training saw them.
        part: what the rows are for, ``train`` or ``validate``, for the message.

    Raises:
        DataError: names a label, how many rows, and a value.
    """
    from pyspark.sql import functions as F

    counts = []
    for n, label in enumerate(labels):
        number = encoded(label.name, label)
        strange = number.isNull()
        if label.type == "regression":
            strange = strange | F.isnan(number) | (F.abs(number) == float("inf"))
        counts.append(F.count_if(strange).alias(f"n{n}"))
        counts.append(F.max(F.when(strange, F.col(quoted(label.name)).cast("string"))).alias(f"v{n}"))
    found = rows.agg(F.count("*").alias("rows"), *counts).first()
    assert found is not None
    if not found["rows"]:
        raise _no_rows(part)
    for n, label in enumerate(labels):
        if found[f"n{n}"]:
            value, count = found[f"v{n}"], found[f"n{n}"]
            known = "is no finite float32" if label.type == "regression" else "training never saw"
            what = "have none" if value is None else f"have one that {known}, such as {value!r}"
            remedy = ", or name all classes in label" if label.type == "multiclass" and value is not None else ""
            raise DataError(
                f"label {label.name!r}: {count} of the rows to {part} {what}: refuse them in expect{remedy}"
            )


def check_weight(rows: DataFrame, weight: str, part: str) -> None:
    """Refuse rows whose weight is missing, not finite or negative, and weights that are all 0.

    Args:
        rows: with the column.
        weight: its name.
        part: what the rows are for, for the message.

    Raises:
        DataError: says how many rows.
    """
    from pyspark.sql import functions as F

    number = F.col(quoted(weight)).try_cast("float")
    strange = number.isNull() | F.isnan(number) | (number < 0) | (number == float("inf"))
    found = rows.agg(F.count_if(strange).alias("strange"), F.max(number).alias("most")).first()
    assert found is not None
    if found["strange"]:
        raise DataError(
            f"weight {weight!r} is missing, negative or not finite in {found['strange']} of the rows to {part}: refuse "
            f"them in expect, with '{weight} >= 0'"
        )
    if found["most"] == 0:
        raise DataError(f"weight {weight!r} is 0 in all rows to {part}: there is nothing to {part}")


def _check_columns(rows: DataFrame, labels: Mapping[str, Label]) -> None:
    for name, each in labels.items():
        if name not in rows.columns:
            raise SchemaError(f"label names {name!r}, the rows have {rows.columns}: name one of these")
        kind = rows.schema[name].dataType.typeName()
        if each.type == "regression" and kind not in _NUMBERS:
            raise SchemaError(f"label {name!r} is a {kind}: a regression needs a number")
        if each.type != "regression" and kind not in (*_NUMBERS, "string"):
            raise SchemaError(f"label {name!r} is a {kind}: classes are numbers, texts or booleans")


def _no_rows(part: str) -> DataError:
    return DataError(f"split leaves no clean row to {part}: give {part} more, or wait for data")


def _fit(rows: DataFrame, name: str, each: Label) -> FittedLabel:
    return _fit_number(rows, name) if each.type == "regression" else _fit_classes(rows, name, each)


def _fit_number(rows: DataFrame, name: str) -> FittedLabel:
    from pyspark.sql import functions as F

    column = F.col(quoted(name)).cast("double")
    found = rows.agg(
        F.count("*").alias("rows"), F.count(column).alias("there"), F.avg(column).alias("mean"),
        F.stddev_pop(column).alias("deviation"),
    ).first()  # fmt: skip
    assert found is not None
    if not found["rows"]:
        raise _no_rows("train")
    if found["there"] < found["rows"]:
        raise DataError(
            f"label {name!r} is missing in {found['rows'] - found['there']} of {found['rows']} training rows: refuse "
            f"them in expect, with '{name} IS NOT NULL'"
        )
    if not math.isfinite(found["mean"]) or not math.isfinite(found["deviation"]):
        raise DataError(
            f"label {name!r} is NaN or infinite in some of {found['rows']} training rows: refuse them in expect"
        )
    if not found["deviation"]:
        raise DataError(
            f"label {name!r} is {found['mean']:g} in all {found['rows']} training rows: there is nothing to learn"
        )
    return FittedLabel(name=name, type="regression", mean=found["mean"], deviation=found["deviation"])


def _fit_classes(rows: DataFrame, name: str, each: Label) -> FittedLabel:
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    counted = rows.groupBy(column.cast("string").alias("value"), column.alias("raw")).count()
    found = counted.orderBy("raw").limit(_MOST_CLASSES + 1).collect()
    if len(found) > _MOST_CLASSES:
        raise DataError(f"label {name!r} has more than {_MOST_CLASSES} values: is it a regression?")
    if not found:
        raise _no_rows("train")
    total = sum(row["count"] for row in found)
    missing = sum(row["count"] for row in found if row["value"] is None)
    if missing:
        raise DataError(
            f"label {name!r} is missing in {missing} of {total} training rows: refuse them in expect, with "
            f"'{name} IS NOT NULL'"
        )
    values = [row["value"] for row in found]
    if len(values) < 2:
        raise DataError(f"label {name!r} is {values[0]!r} in all {total} training rows: there is nothing to learn")
    if each.type == "binary":
        positive = _positive(name, each, values)
        negative = next(value for value in values if value != positive)
        rows_of = {row["value"]: row["count"] for row in found}
        return FittedLabel(name=name, type="binary", classes=(negative, positive), mean=rows_of[positive] / total)
    wanted = tuple(_as_spark(value) for value in each.classes) or tuple(values)
    other = [value for value in values if value not in wanted]
    if other:
        raise DataError(
            f"label {name!r} has the value {other[0]!r}, and classes are {list(wanted)}: name it, or refuse it"
        )
    return FittedLabel(name=name, type="multiclass", classes=wanted)


def _positive(name: str, each: Label, values: list[str]) -> str:
    if len(values) > 2:
        raise DataError(f"label {name!r} is binary and has {len(values)} values, {values[:5]}: choose multiclass")
    if each.positive is not None:
        positive = _as_spark(each.positive)
        if positive not in values:
            raise DataError(
                f"label {name!r} has the values {values}, and positive is {positive!r}: name one of the two"
            )
        return positive
    known = [value for value in values if value.lower() in ("true", "1", "1.0")]
    if len(known) != 1:
        raise DataError(f"label {name!r} has the values {values}: say which is the positive one with positive")
    return known[0]


def _as_spark(value: Any) -> str:
    """A value of the file as Spark's cast to a string spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
