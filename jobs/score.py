"""Scoring: the unseen days of the feature table to the Delta table ``predictions``, by the champion.

Enters: the ETL's state, the registry. Leaves: one row a ride in ``predictions``, partitioned by day, with the model and
its version; scoring a day again replaces that day and nothing else.

Exit codes: 0 done, or nothing new; 1 refused; 4 unexpected error; 130 interrupted (all of them: jobs/entry.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # started as a file: the folder above holds the package `jobs`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.entry import Run, open_session, run_job
from jobs.etl import EtlResult, processed_days
from jobs.features import LABEL
from jobs.make_events import noise_floor
from jobs.publish import champion_of, scored_days
from jobs.record import Predictions
from jobs.settings import Settings
from jobs.trained import PREDICTION
from sparkdl.errors import DataError
from sparkdl.models.registry import ModelVersion
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["days_to_score", "score_days"]


def days_to_score(settings: Settings, etl: EtlResult, champion: ModelVersion) -> list[str]:
    """Return the scoring days whose predictions are not those of this champion on these features."""
    table = Table(settings.paths.table("predictions"))
    days = list(etl.split.scoring)
    if not table.exists():
        return days
    mark = f"model_version = {champion.version} AND features_version = {etl.features_version}"
    done = {str(row["day"]) for row in table.rows(["day"], where=mark).to_pylist()}
    return [day for day in days if day not in done]


def score_days(run: Run, spark: SparkSession, etl: EtlResult, champion: ModelVersion, days: Sequence[str]) -> None:
    """Write the predictions of ``days``; fills ``predictions`` of the record."""
    from pyspark.sql import functions as F

    table = Table(run.settings.paths.table("predictions"))
    with run.stage("scoring"):
        frame = scored_days(
            spark, run.settings, etl, champion.uri, days, extra=("day", "event_id", "pickup_at")
        ).persist()
        try:
            rows = frame.select(
                "day",
                "event_id",
                "pickup_at",
                PREDICTION,
                F.lit(champion.name).alias("model"),
                F.lit(champion.version).alias("model_version"),
                F.lit(etl.features_version).cast("long").alias("features_version"),
                F.current_timestamp().alias("scored_at"),
            )
            partitions = [{"day": date.fromisoformat(day)} for day in days]
            written = table.write(rows, "replace", partition_by=["day"], partitions=partitions)
            error = F.col(PREDICTION) - F.col(LABEL)
            rmse = frame.agg(F.sqrt(F.avg(error * error)).alias("rmse")).collect()[0]["rmse"]
        finally:
            frame.unpersist()
    floor = None
    with contextlib.suppress(DataError):  # data that was not generated has no known floor
        floor = noise_floor(run.settings.paths.of("raw"), days).rmse_minutes
    run.record.predictions = Predictions(
        days=list(days), rows=written.rows, version=champion.version, rmse=rmse, floor_rmse=floor
    )
    run.record.places["predictions"] = table.uri


def _job(run: Run) -> None:
    etl = processed_days(run.settings)
    champion = champion_of(run.settings)
    if champion is None:
        raise DataError(
            f"the registry {run.settings.paths.of('registry')} has no champion of {run.settings.name!r}: run "
            "jobs/train.py first"
        )
    days = days_to_score(run.settings, etl, champion)
    if not days:
        run.nothing_new(f"version {champion.version} has scored {', '.join(etl.split.scoring)} already")
        return
    with run.stage("spark"):
        spark = open_session(run.settings, "lake", "runs")
    score_days(run, spark, etl, champion, days)


if __name__ == "__main__":
    sys.exit(run_job("score", _job, summary=True))
