"""What a feature is, which days serve what, and how numerics are standardised.

Enters: the feature table, the moments of each day. Leaves: a DataFrame ready for shards or scoring, at one version of
the feature table and with one set of statistics.

Why standardising is a step of its own: the feature table holds clean values in their own units and stable ids, so that
writing a day never depends on, and never changes, another day. Which days train changes with every new day, and with
them the means; so these belong to a training, not to a day. They are merged from the moments that the ETL kept of each
training day (no pass over the rows), stored in the table ``statistics`` under an id, and applied when a frame is
read. A published model names the statistics it was trained with, and scoring applies the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs.settings import EtlSettings, Settings
from sparkdl.columns.statistics import RunningStats
from sparkdl.errors import DataError, SchemaError
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "CATEGORICAL",
    "LABEL",
    "NUMERIC",
    "Moments",
    "Split",
    "Statistics",
    "check_vocabulary",
    "features_frame",
    "id_column",
    "split_days",
]

NUMERIC = (
    "distance_km",
    "log_distance",
    "beeline_km",
    "passengers",
    "rain_mm",
    "temperature_c",
    "wind_kmh",
    "pickup_centre_km",
    "dropoff_centre_km",
    "airport",
    "hour_sin",
    "hour_cos",
    "twice_sin",
    "twice_cos",
    "hour_of_day",
)
"""Numeric features, in the order of the columns of the packed tensor ``(batch, 15)``; ``twice_*`` turn
twice a day, as rush hours do."""

CATEGORICAL = ("pickup_zone", "dropoff_zone", "pickup_borough", "dropoff_borough", "vehicle", "hour", "weekday")
"""Categoricals, in the order of the columns of the packed id tensor ``(batch, 7)``; id 0 is the unknown value."""

LABEL = "duration_minutes"


def id_column(name: str) -> str:
    """Return the name of the id column of a categorical."""
    return f"{name}_id"


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and population variance of a column over some rows; mergeable without the rows."""

    rows: int
    mean: float
    variance: float

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows together."""
        both = self._running()
        both.merge(other._running())
        return Moments(rows=both.count, mean=both.mean, variance=both.squares / both.count if both.count else 0.0)

    def _running(self) -> RunningStats:
        return RunningStats(count=self.rows, mean=self.mean, squares=self.variance * self.rows)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which days train, which validate, which are scored; ISO texts, in order, each after those before it."""

    training: tuple[str, ...]
    validation: tuple[str, ...]
    scoring: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Moments of the numerics and of the label over the training days.

    Attributes:
        statistics_id: follows from the values; the key in the table ``statistics``.
        days: the training days.
        columns: moments by column name, the label among them.
    """

    statistics_id: str
    days: tuple[str, ...]
    columns: dict[str, Moments]

    @staticmethod
    def of(days: Mapping[str, Mapping[str, Moments]]) -> Statistics:
        """Merge the moments of the training days.

        Raises:
            DataError: there are no rows, or a mean is not finite.
        """
        merged: dict[str, Moments] = {}
        for _, columns in sorted(days.items()):
            for name, moments in columns.items():
                merged[name] = merged[name].merged(moments) if name in merged else moments
        for name, moments in merged.items():
            if not (math.isfinite(moments.mean) and math.isfinite(moments.variance)):
                raise DataError(
                    f"{name} has the mean {moments.mean} and the variance {moments.variance} over {moments.rows} rows "
                    f"of {len(days)} training days: find the days whose values are not finite and process them again"
                )
        if not merged or merged[LABEL].rows == 0:
            raise DataError(f"{len(days)} training days hold 0 rows: process more days")
        values = {name: asdict(moments) for name, moments in merged.items()}
        key = hashlib.sha256(json.dumps([sorted(days), values], sort_keys=True).encode()).hexdigest()[:16]
        return Statistics(statistics_id=key, days=tuple(sorted(days)), columns=merged)

    def mean(self, name: str) -> float:
        """Mean of a column over the training days."""
        return self.columns[name].mean

    def scale(self, name: str) -> float:
        """Standard deviation of a column over the training days; 1 for a constant."""
        deviation = math.sqrt(max(self.columns[name].variance, 0.0))
        return deviation if deviation > 1e-12 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values, e.g. for the parameters of a published model."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Statistics:
        """Read what ``to_dict`` returned."""
        columns = {name: Moments(**moments) for name, moments in values["columns"].items()}
        return Statistics(statistics_id=values["statistics_id"], days=tuple(values["days"]), columns=columns)


def split_days(days: Iterable[str], etl: EtlSettings) -> Split:
    """Divide the processed days by time: the last are scored, those before validate, those before train.

    Raises:
        DataError: there are too few days.
    """
    ordered = sorted(days)
    held = etl.validation_days + etl.scoring_days
    if len(ordered) <= held:
        raise DataError(
            f"{len(ordered)} days are there, and {etl.validation_days} for validation and {etl.scoring_days} for "
            "scoring leave none for training: add days, or lower etl.validation_days"
        )
    training = ordered[:-held][-etl.training_days :]
    validation = ordered[-held : -etl.scoring_days]
    return Split(training=tuple(training), validation=tuple(validation), scoring=tuple(ordered[-etl.scoring_days :]))


def features_frame(
    spark: SparkSession,
    settings: Settings,
    *,
    days: Sequence[str],
    statistics: Statistics,
    version: int | None = None,
    extra: Sequence[str] = (),
) -> DataFrame:
    """Read days of the feature table, numerics standardised.

    Args:
        spark: the session.
        settings: where the table lies.
        days: ISO texts.
        statistics: of the training days of the model that is trained, or that scores.
        version: of the feature table; None is the newest.
        extra: further columns of the table to keep, e.g. ``event_id``.

    Returns:
        ``extra``, then ``NUMERIC`` as float32, the ids as int32, the label as float32, in minutes.

    Raises:
        SchemaError: the table lacks a column.
        StorageError: there is no such table or version.
    """
    from pyspark.sql import functions as F

    table = Table(settings.paths.table("features"))
    frame = table.read(spark, version)
    ids = [id_column(name) for name in CATEGORICAL]
    needed = [*extra, *NUMERIC, *ids, LABEL]
    missing = [name for name in [*needed, "day"] if name not in frame.columns]
    if missing:
        raise SchemaError(
            f"the feature table {table.uri} has the columns {frame.columns} and not {missing}: write it anew with "
            "jobs/etl.py into another paths.lake"
        )
    chosen = frame.where(F.col("day").isin([F.lit(day).cast("date") for day in days]))
    scaled = [
        ((F.col(name) - F.lit(statistics.mean(name))) / F.lit(statistics.scale(name))).cast("float").alias(name)
        for name in NUMERIC
    ]
    return chosen.select(*extra, *scaled, *ids, F.col(LABEL).cast("float").alias(LABEL))


def check_vocabulary(sizes: Mapping[str, int], embedding_rows: Mapping[str, int]) -> None:
    """Refuse a vocabulary that does not fit into the model's embedding tables.

    Args:
        sizes: ids in use by categorical, the unknown 0 among them.
        embedding_rows: rows of each table.

    Raises:
        DataError: a categorical has more ids than rows, or no table.
    """
    for name, size in sizes.items():
        rows = embedding_rows.get(name, 0)
        if size > rows:
            raise DataError(
                f"the categorical {name} has {size} ids and its embedding table {rows} rows: set "
                f"--set.model.embedding_rows.{name}={2 ** math.ceil(math.log2(size))} and train anew"
            )
