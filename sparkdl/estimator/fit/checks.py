"""What the shards' statistics forbid, said before any rank starts.

Enters: manifests of the training and validation shards, roles of the columns, the losses. Leaves: nothing, or a
``DataError`` with the numbers and the remedy. Nothing is read again: the writer counted while it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyspark.sql import DataFrame

from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError, SchemaError, SparkdlError
from sparkdl.estimator.fit.column_plan import Roles
from sparkdl.estimator.fit.probe import Output
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.labels import label_kind

__all__ = ["check_classes", "check_frame", "check_loss", "check_rows", "check_steps", "check_values"]


def check_frame(what: str, given: Any) -> None:
    """Refuse what is no DataFrame of Spark.

    Raises:
        SchemaError: names the type, and the remedy for pandas.
    """
    if not isinstance(given, DataFrame):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        raise SchemaError(f"{what} takes a Spark DataFrame, not a {kind}: make one with spark.createDataFrame(...)")


def check_rows(train: Manifest, validation: Manifest | None, *, num_proc: int, wanted: Any) -> None:
    """Refuse sets that cannot be dealt to the ranks.

    Args:
        train: shards to train on.
        validation: shards to validate on; None if none were asked for.
        num_proc: number of ranks.
        wanted: the value of ``validation``, for the message.

    Raises:
        DataError: no rows, fewer rows than ranks, or an empty validation split.
    """
    if train.rows == 0:
        raise DataError("the training data has 0 rows: check the filters and the validation column")
    if train.rows < num_proc:
        raise DataError(f"{train.rows} training rows cannot be dealt to {num_proc} ranks: lower num_proc or add rows")
    if validation is not None and validation.rows == 0:
        raise DataError(f"validation={wanted!r} leaves 0 rows to validate on beside {train.rows}: choose more, or None")


def check_steps(name: str, wanted: int | None, manifest: Manifest | None, rows_per_step: int) -> None:
    """Refuse more steps than the rows give.

    Raises:
        ConfigError: names both numbers.
    """
    there = 0 if manifest is None else -(-manifest.rows // rows_per_step)
    if wanted is not None and wanted > there:
        held = 0 if manifest is None else manifest.rows
        raise ConfigError(f"{name}={wanted} exceeds the {there} steps of {held} rows, {rows_per_step} a step: lower it")


def check_values(manifest: Manifest, roles: Roles) -> None:
    """Refuse NaN and infinity in features, labels and weights, and weights below 0.

    Raises:
        DataError: names the column and how many there are.
    """
    weight = (roles.weight,) if roles.weight else ()
    for name in dict.fromkeys((*roles.features, *roles.labels, *weight)):
        stats = manifest.statistics.get(name, ColumnStats())
        if stats.nan_count or stats.inf_count:
            raise DataError(
                f"column {name!r} holds {stats.nan_count} NaN and {stats.inf_count} infinite values in "
                f"{manifest.rows} rows: fill or filter them first"
            )
    if roles.weight:
        stats = manifest.statistics.get(roles.weight, ColumnStats())
        if stats.min is not None and (stats.min < 0 or stats.max == 0):
            raise DataError(
                f"sample weights {roles.weight!r} lie in {stats.min}..{stats.max}: give 0 and more, not all 0"
            )


def check_classes(manifest: Manifest, outputs: Sequence[Output], losses: Sequence[Any]) -> None:
    """Refuse class labels beyond a classifier's outputs, and targets outside 0..1 for binary cross-entropy.

    Raises:
        DataError: names the label, its range and the range that the loss takes.
    """
    for output, loss in zip(outputs, losses, strict=True):
        stats = manifest.statistics.get(output.label)
        if stats is None or stats.min is None or stats.max is None:
            continue
        name = getattr(loss, "__name__", type(loss).__name__)
        shape = manifest.tensor(output.label).shape
        if label_kind(loss) == "classes" and output.shape and shape in ((), (1,)):
            ignored = getattr(loss, "ignore_index", -100)
            least = 0 if stats.min == ignored else stats.min
            if least < 0 or stats.max >= output.shape[0]:
                raise DataError(
                    f"label {output.label!r} holds classes {stats.min}..{stats.max}, and {name} over "
                    f"{output.shape[0]} outputs takes 0..{output.shape[0] - 1}: renumber the classes or widen the model"
                )
        binary = name in ("BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
        if binary and (stats.min < 0 or stats.max > 1):
            raise DataError(
                f"label {output.label!r} lies in {stats.min}..{stats.max}, and {name} takes 0..1: rescale it"
            )


def check_loss(compute: Any) -> None:
    """Compute the loss of the two probe rows; ``compute`` takes nothing.

    Raises:
        ConfigError: outputs and labels do not fit the loss.
    """
    try:
        with torch.no_grad():
            compute()
    except SparkdlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the loss cannot be computed from output and label ({type(error).__name__}: {error}): "
            "make their shapes and dtypes fit, for instance by label_shapes"
        ) from error
