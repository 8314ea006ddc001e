"""Labels: what is predicted, as the numbers that a loss takes; the same in training, validation and evaluation.

A regression is float32, a binary label 0 or 1, another the index of its class.

Labels may come later than their rows: a row with a label that is null is predicted, and neither trains nor validates.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import from_values
from sparkdl.documents.typed import Source, convert
from sparkdl.errors import DataError, SchemaError
from sparkdl.models.folder import BundleInfo
from sparkdl.pipeline.spec import Label, PipelineSpec
from sparkdl.pipeline.spec.base import spelled
from sparkdl.pipeline.windows import Part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MOST_CLASSES = 10_000
_MOST_NUMBERS = 25_000_000
"""Numbers of 8 bytes that the driver holds at once to measure predictions."""
_REACH = 2.0
"""Of the greatest amount of the training rows, above which none is predicted: an exponential knows no end."""
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "decimal", "boolean")


class NoLabelsError(DataError):
    """There are rows to learn from, and none of them has a label yet."""


@dataclass(frozen=True, kw_only=True)
class FittedLabel:
    """One label, as the training rows have it.

    Attributes:
        name: of its column.
        type: as in the file.
        classes: its values, in the order of the model's outputs; ``(negative, positive)`` of a binary label; as text.
        levels: of quantiles, which are a regression with an output a level.
        mean: of a regression's training rows, 0 for other types.
        deviation: of a regression's training rows, 1 for other types.
        ceiling: of amounts (``loss: poisson``), which no prediction exceeds; None of other labels.
    """

    name: str
    type: Literal["regression", "binary", "multiclass"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0
    levels: tuple[float, ...] = ()
    ceiling: float | None = None

    @property
    def outputs(self) -> int:
        """Numbers that the model says of a row: one, one a class, or one a level."""
        return len(self.classes) if self.type == "multiclass" else max(1, len(self.levels))

    @property
    def middle(self) -> int:
        """The place of the quantile that is the prediction: the one whose level is nearest to 0.5."""
        return min(range(len(self.levels)), key=lambda index: abs(self.levels[index] - 0.5), default=0)

    @property
    def most_measured(self) -> int:
        """Rows whose predictions the driver measures at once; of more, a share is drawn by a hash of the key.

        A million with one output, fewer with many classes: a row takes about 20 numbers, and 4 an output.
        """
        return max(10_000, _MOST_NUMBERS // (20 + 4 * self.outputs))


class LabelCounts(msgspec.Struct, kw_only=True):
    """What is counted of the rows of a part.

    Attributes:
        rows: with and without labels.
        labelled: that have all labels.
        refused: by label, how many of these are no number that a loss takes, or no class that training saw.
        examples: by label, one that was refused.
        refused_weights: how many labelled rows have a weight that is missing, not finite or negative.
        most_weight: of a labelled row.
    """

    rows: int = 0
    labelled: int = 0
    refused: dict[str, int] = {}
    examples: dict[str, str] = {}
    refused_weights: int = 0
    most_weight: float = 0.0

    @property
    def unlabelled(self) -> int:
        """Rows that lack a label, and are left out."""
        return self.rows - self.labelled

    def add(self, more: LabelCounts) -> None:
        """Count others' rows, too."""
        self.rows += more.rows
        self.labelled += more.labelled
        for name, refused in more.refused.items():
            self.refused[name] = self.refused.get(name, 0) + refused
            self.examples[name] = max(self.examples.get(name, ""), more.examples[name])
        self.refused_weights += more.refused_weights
        self.most_weight = max(self.most_weight, more.most_weight)


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

    Args:
        rows: those without a label do not count.
        labels: by column.

    Raises:
        SchemaError: a column is missing, or of a type that the label cannot be made of.
        NoLabelsError: no row has a label yet.
        DataError: there are no rows, or a label is the same in all, is not finite, or has too many classes.
    """
    _check_columns(rows, labels)
    labelled_rows = labelled(rows, labels)
    fitted_labels = []
    for name, label in labels.items():
        fit = _fit_number if label.type in ("regression", "quantiles") else _fit_classes
        fitted_label = fit(labelled_rows, name, label)
        if fitted_label is None:
            raise _no_rows("train", rows.count())
        fitted_labels.append(fitted_label)
    return Labels(labels=tuple(fitted_labels))


def same_label(fitted: FittedLabel, label: Label) -> bool:
    """Whether a label that a model was trained with means what the file says of it."""
    kind, of_amounts = "regression" if label.type == "quantiles" else label.type, label.loss == "poisson"
    if (fitted.type, fitted.levels, fitted.ceiling is not None) != (kind, label.quantiles, of_amounts) or (
        label.classes and fitted.classes != tuple(map(spelled, label.classes))
    ):
        return False
    positive = _true(fitted.classes) if label.positive is None else [spelled(label.positive)]
    return fitted.type != "binary" or positive in ([], [fitted.classes[1]])


def labelled(rows: DataFrame, names: Iterable[str]) -> DataFrame:
    """The rows that have all labels."""
    from pyspark.sql import functions as F

    return rows.where(functools.reduce(operator.and_, [F.col(quoted(name)).isNotNull() for name in names]))


def encoded(label: FittedLabel) -> Column:
    """The column of a label as numbers; null where it is missing or no class that training saw."""
    from pyspark.sql import functions as F

    column = F.col(quoted(label.name))
    if label.type == "regression":
        return column.cast("double").cast("float")
    class_index = F.nullif(F.array_position(F.lit(list(label.classes)), column.cast("string")), F.lit(0)) - 1
    return class_index.cast("float") if label.type == "binary" else class_index.cast("bigint")


def encoded_values(label: FittedLabel, values: pa.Array | pa.ChunkedArray) -> Any:
    """The numbers of ``encoded`` as doubles, of rows that never entered Spark; None where only Spark can tell."""
    kind = values.type
    if label.type == "regression":
        numbers = as_doubles(values)
        return None if numbers is None else numbers.cast(pa.float32(), safe=False).cast(pa.float64())
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind)):
        return None  # Spark writes a fraction as Java does
    return pc.index_in(values.cast(pa.string()), value_set=from_values(label.classes, pa.string())).cast(pa.float64())


def encodable(label: FittedLabel) -> Column:
    """The column of a label, of whatever type, as one that ``encoded_values`` knows."""
    from pyspark.sql import functions as F

    return F.col(quoted(label.name)).cast("double" if label.type == "regression" else "string")


def encodable_weight(name: str) -> Column:
    """The column of a weight, of whatever type, as one that ``as_doubles`` knows; null where it is no number."""
    from pyspark.sql import functions as F

    return F.col(quoted(name)).try_cast("double")


def as_doubles(values: pa.Array | pa.ChunkedArray) -> Any:
    """Numbers as Spark casts them to double; None of types that only Spark casts."""
    kind = values.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return values.cast(pa.float64(), safe=False) if is_number else None


def row_weight(spec: PipelineSpec) -> Column:
    """The weight of a row: that of the file's column, else 1."""
    from pyspark.sql import functions as F

    return F.lit(1.0) if spec.weight is None else F.col(quoted(spec.weight)).cast("double")


def labels_of(bundle: BundleInfo) -> Labels:
    """The labels that a bundle's model was trained with.

    Raises:
        IntegrityError: it describes none that could be.
    """
    return Labels(labels=convert(bundle.preprocessing.get("labels"), tuple[FittedLabel, ...], bundle_source(bundle)))


def bundle_source(bundle: BundleInfo) -> Source:
    """What messages call a bundle whose preprocessing cannot be read."""
    return Source(bundle.uri, "it was altered, or not published by a pipeline: publish it again")


def check_labels(counts: LabelCounts, part: Part, labels: Labels, weight: str | None) -> None:
    """Refuse rows whose label is no number that a loss takes, or no class that training saw, and weights that are none.

    Args:
        counts: of the rows.
        part: that they are of.
        labels: as training saw them.
        weight: the column of the weights of rows; None where there are none.

    Raises:
        NoLabelsError: all rows lack a label.
        DataError: there are no rows; labels are refused: names a label, how many rows, and a value; or weights of rows
            with a label are missing, not finite or negative, or all 0.
    """
    if not counts.labelled:
        raise _no_rows(part, counts.rows)
    for label in labels:
        if refused := counts.refused.get(label.name):
            reason = "is no finite float32" if label.type == "regression" else "training never saw"
            remedy = ", or name all classes in label and train from scratch" if label.type == "multiclass" else ""
            raise DataError(
                f"label {label.name!r}: {refused} of the rows to {part} have one that {reason}, such as "
                f"{counts.examples[label.name]!r}: refuse them in expect{remedy}"
            )
    if counts.refused_weights:
        raise DataError(
            f"weight {weight!r} is missing, negative or not finite in {counts.refused_weights} of the rows "
            f"to {part}: refuse them in expect, with '{weight} >= 0'"
        )
    if weight is not None and counts.most_weight == 0:
        raise DataError(f"weight {weight!r} is 0 in all rows to {part}: there is nothing to {part}")


def _check_columns(rows: DataFrame, labels: Mapping[str, Label]) -> None:
    for name, label in labels.items():
        if name not in rows.columns:
            raise SchemaError(f"label names {name!r}, the rows have {rows.columns}: name one of these")
        kind = rows.schema[name].dataType.typeName()
        values = label.type in ("regression", "quantiles")
        if values and kind not in _NUMBERS:
            raise SchemaError(f"label {name!r} is a {kind}: a regression needs a number")
        if not values and kind not in (*_NUMBERS, "string"):
            raise SchemaError(f"label {name!r} is a {kind}: classes are numbers, texts or booleans")


def _no_rows(part: str, unlabelled: int) -> DataError:
    if unlabelled:
        return NoLabelsError(
            f"none of the {unlabelled:,} rows to {part} has a label yet: wait for labels, or let split.score hold back "
            "as many days as they take"
        )
    return DataError(f"split leaves no clean row to {part}: give {part} more, or wait for data")


def _fit_number(rows: DataFrame, name: str, label: Label) -> FittedLabel | None:
    """The label's mean and deviation; None where there are no rows."""
    from pyspark.sql import functions as F

    column = F.col(quoted(name)).cast("double")
    summary = rows.agg(
        F.count("*").alias("rows"), F.avg(column).alias("mean"), F.stddev_pop(column).alias("deviation"),
        F.max(column).alias("greatest"),
    ).first()  # fmt: skip
    assert summary is not None
    if not summary["rows"]:
        return None
    if not math.isfinite(summary["mean"]) or not math.isfinite(summary["deviation"]):
        raise DataError(
            f"label {name!r} is NaN, infinite or too large in some of {summary['rows']} training rows: refuse them in "
            "expect"
        )
    if not summary["deviation"]:
        raise DataError(
            f"label {name!r} is {summary['mean']:g} in all {summary['rows']} training rows: there is nothing to learn"
        )
    mean, deviation, ceiling = summary["mean"], summary["deviation"], None
    if label.loss == "poisson":
        if mean <= 0:
            raise DataError(
                f"label {name!r} is {mean:g} on average in the training rows, and loss=poisson is of amounts from 0 "
                "on: leave the loss out"
            )
        ceiling = _REACH * summary["greatest"]
    return FittedLabel(
        name=name, type="regression", mean=mean, deviation=deviation, levels=label.quantiles, ceiling=ceiling
    )


def _fit_classes(rows: DataFrame, name: str, label: Label) -> FittedLabel | None:
    """The label's classes; None where there are no rows."""
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    counts = rows.groupBy(column.cast("string").alias("value"), column.alias("raw")).count()
    value_counts = counts.orderBy("raw").limit(_MOST_CLASSES + 1).collect()
    if len(value_counts) > _MOST_CLASSES:
        raise DataError(
            f"label {name!r} has more than {_MOST_CLASSES:,} classes in the training rows: join rare ones in "
            "transform, or choose regression if they are numbers"
        )
    total = sum(row["count"] for row in value_counts)
    values = [row["value"] for row in value_counts]
    if not values:
        return None
    if len(values) < 2:
        raise DataError(f"label {name!r} is {values[0]!r} in all {total} training rows: there is nothing to learn")
    if label.type == "binary":
        positive = _positive(name, label, values)
        negative = next(value for value in values if value != positive)
        return FittedLabel(name=name, type="binary", classes=(negative, positive))
    classes = tuple(spelled(value) for value in label.classes) or tuple(values)
    unnamed = [value for value in values if value not in classes]
    if unnamed:
        raise DataError(
            f"label {name!r} has the value {unnamed[0]!r}, and classes are {list(classes)}: name it, or refuse it"
        )
    return FittedLabel(name=name, type="multiclass", classes=classes)


def _positive(name: str, label: Label, values: list[str]) -> str:
    if len(values) > 2:
        raise DataError(f"label {name!r} is binary and has {len(values)} values, {values[:5]}: choose multiclass")
    if label.positive is not None:
        positive = spelled(label.positive)
        if positive not in values:
            raise DataError(
                f"label {name!r} has the values {values}, and positive is {positive!r}: name one of the two"
            )
        return positive
    true_values = _true(values)
    if len(true_values) != 1:
        raise DataError(f"label {name!r} has the values {values}: say which is the positive one with positive")
    return true_values[0]


def _true(values: Sequence[str]) -> list[str]:
    return [value for value in values if value.lower() in ("true", "1", "1.0")]
