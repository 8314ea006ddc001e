"""ETL: raw rides to the Delta feature table, day by day.

Enters: raw files as ``make_events`` leaves them. Leaves, in the lake:

    features     clean rows in their own units, ids of categoricals, the label; partitioned by day
    quarantine   each bad row as it came, as JSON, with the one reason it was refused for; partitioned by day
    etl_days, vocabulary, statistics   see jobs/state.py

Only days whose raw files are new or changed since they were last processed are read; each replaces its own partition
and nothing else. Rows in = rows out + quarantined + duplicates is checked for every day before anything is written:
rows in are those that Parquet footers claim and that a count of the CSV finds; and the two commits must hold as many.
The rows pass once: one job reads, judges, sums up and keeps them, and the two tables are written from what it kept.

Exit codes: 0 done, or nothing new; 1 refused; 4 unexpected error; 130 interrupted (all of them: jobs/entry.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # started as a file: the folder above holds the package `jobs`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.clean import DUPLICATE, OK, classified, csv_rides, read_rides, weather_frame, zone_frame
from jobs.entry import Run, open_session, run_job
from jobs.features import (
    CATEGORICAL,
    LABEL,
    NUMERIC,
    Moments,
    Split,
    Statistics,
    check_vocabulary,
    id_column,
    split_days,
)
from jobs.raw import RawDay, list_raw, look_at_rides, read_weather, read_zones
from jobs.record import RowCounts
from jobs.settings import Settings
from jobs.state import DayState, Vocabulary, load_days, save_days, save_statistics
from sparkdl.errors import DataError
from sparkdl.observe import span
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["EtlResult", "describe", "processed_days", "run_etl"]


@dataclass(frozen=True, kw_only=True)
class EtlResult:
    """What the ETL did, and what training needs of it.

    Attributes:
        processed: days that this run processed, in order; empty when nothing was new.
        days: all processed days, by day.
        split: which days train, validate and are scored.
        statistics: of the training days.
        vocabulary_sizes: ids of each categorical, the unknown 0 among them.
        zones: name by zone id.
        features: address of the feature table; ``features_version`` is the version that holds ``days``.
        quarantine: address of the quarantine table.
        seconds: by step.
    """

    processed: tuple[str, ...]
    days: dict[str, DayState]
    split: Split
    statistics: Statistics
    vocabulary_sizes: dict[str, int]
    zones: dict[int, str]
    features: str
    features_version: int
    quarantine: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nothing_new(self) -> bool:
        """Whether every day had been processed before, from the same files by the same rules."""
        return not self.processed

    @property
    def rows(self) -> RowCounts:
        """Row counts of the processed days."""
        states = [self.days[day] for day in self.processed]
        reasons: dict[str, int] = {}
        for state in states:
            for reason, count in state.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return RowCounts(
            read=sum(state.rows_in for state in states),
            written=sum(state.rows_out for state in states),
            quarantined=sum(state.quarantined for state in states),
            duplicates=sum(state.duplicates for state in states),
            reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
            days=list(self.processed),
        )


def run_etl(spark: SparkSession, settings: Settings) -> EtlResult:
    """Bring the feature table up to date with the raw files.

    Args:
        spark: a classic or a Connect session.
        settings: ``paths``, ``etl`` and the embedding tables that the ids must fit into.

    Raises:
        SchemaError: a column is missing.
        DataError: no rides, a day without a valid row, rows lost or multiplied, more ids than embedding rows, too few
            days.
        StorageError: the lake cannot be read or written.
    """
    seconds: dict[str, float] = {}
    with span("look for new days", seconds):
        raw = list_raw(settings.paths.of("raw"), settings.etl)
        known = load_days(settings)
        forced = {day for day in settings.etl.days if day in raw}
        absent = sorted(set(settings.etl.days) - forced)
        if absent:
            raise DataError(f"etl.days asks for {absent[0]}, and the raw data has {min(raw)} to {max(raw)}: correct it")
        todo = [each for day, each in raw.items() if day in forced or _is_new(each, known.get(day))]
        split_days(known.keys() | raw.keys(), settings.etl)
    vocabulary = Vocabulary.load(settings)
    if todo:
        known |= _process(spark, settings, todo, vocabulary, seconds)
    return _result(settings, known, tuple(each.day for each in todo), vocabulary, seconds)


def processed_days(settings: Settings) -> EtlResult:
    """Return what earlier runs left, without Spark and without a look at the raw files.

    Raises:
        DataError: no day is processed, or too few.
    """
    known = load_days(settings)
    if not known:
        raise DataError(
            f"{settings.paths.of('lake')} has 0 processed days: run jobs/etl.py first, or set --set.paths.lake"
        )
    return _result(settings, known, (), Vocabulary.load(settings), {})


def _result(
    settings: Settings,
    days: dict[str, DayState],
    processed: tuple[str, ...],
    vocabulary: Vocabulary,
    seconds: dict[str, float],
) -> EtlResult:
    with span("statistics", seconds):
        split = split_days(days, settings.etl)
        statistics = Statistics.of({day: days[day].moments for day in split.training})
        save_statistics(settings, statistics)
    return EtlResult(
        processed=processed,
        days=dict(sorted(days.items())),
        split=split,
        statistics=statistics,
        vocabulary_sizes=vocabulary.sizes(),
        zones={number: name for name, number in vocabulary.ids.get("zone", {}).items()},
        features=settings.paths.table("features"),
        features_version=max(state.features_version for state in days.values()),
        quarantine=settings.paths.table("quarantine"),
        seconds=seconds,
    )


def _is_new(raw: RawDay, state: DayState | None) -> bool:
    return state is None or state.fingerprint != raw.fingerprint


def _process(
    spark: SparkSession, settings: Settings, todo: Sequence[RawDay], vocabulary: Vocabulary, seconds: dict[str, float]
) -> dict[str, DayState]:
    """Clean the days, check the books, then write: quarantine, features, and last what makes the days known."""
    place, before = settings.paths.of("raw"), deepcopy(vocabulary)
    with span("plan", seconds):
        files, zones, weather = look_at_rides(todo), read_zones(place), read_weather(todo)
        vocabulary.add("zone", zones["zone"].to_pylist())
        vocabulary.add("borough", zones["borough"].to_pylist())
        rides = read_rides(spark, place, files)
        joined = zone_frame(spark, zones, vocabulary), weather_frame(spark, weather)
        rows = classified(rides, *joined, settings.etl).persist()
    try:
        with span("clean", seconds):
            found = _summed(rows)
        with span("count", seconds):
            late = csv_rides(spark, place, files)
            read = Counter(files.parquet_rows)
            for row in late.groupBy("day").count().collect() if late is not None else []:
                read[str(row["day"])] += int(row["count"])
        _check_books(todo, read, found)
        vocabulary.add("vehicle", {name for day in found.values() for name in day[OK].vehicles})
        check_vocabulary(vocabulary.sizes(), settings.model.embedding_rows)
        vocabulary.save(settings, before)
        with span("write", seconds):
            version = _write(settings, rows, todo, found, vocabulary)
    finally:
        rows.unpersist()
    with span("commit days", seconds):
        states = {each.day: _state(each, found[each.day], version) for each in todo}
        save_days(settings, states.values())
    return states


@dataclass
class _Sums:
    """Rows of one day with one outcome."""

    rows: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)
    vehicles: set[str] = field(default_factory=set)


Found = dict[str, dict[str, _Sums]]


def _summed(rows: DataFrame) -> Found:
    """Count, moments and vehicles by day and outcome, in the one job that also fills the cache.

    Vehicles are a key of the grouping, not a set that is collected, and moments of their groups are merged here: so the
    whole aggregation compiles to one loop over the rows.
    """
    from pyspark.sql import functions as F

    columns = (*NUMERIC, LABEL)
    valid = F.col("outcome") == OK
    vehicle = F.when(valid, F.col("vehicle")).alias("vehicle")
    sums = [
        sum_
        for name in columns
        for sum_ in (F.avg(name).alias(f"mean {name}"), F.var_pop(name).alias(f"variance {name}"))
    ]
    found: Found = {}
    for row in rows.groupBy("day", "outcome", vehicle).agg(F.count("*").alias("rows"), *sums).collect():
        into = found.setdefault(str(row["day"]), {}).setdefault(row["outcome"], _Sums())
        into.rows += int(row["rows"])
        if row["outcome"] != OK:
            continue
        into.vehicles.add(row["vehicle"])
        for name in columns:
            part = Moments(rows=int(row["rows"]), mean=row[f"mean {name}"], variance=row[f"variance {name}"])
            into.moments[name] = into.moments[name].merged(part) if name in into.moments else part
    return found


def _check_books(todo: Sequence[RawDay], read: Mapping[str, int], found: Found) -> None:
    """Refuse days without a valid row, and rows that were lost or multiplied on the way."""
    for each in todo:
        outcomes, rows_in = found.get(each.day, {}), read.get(each.day, 0)
        total = sum(sums.rows for sums in outcomes.values())
        if total != rows_in:
            raise DataError(
                f"day {each.day} has {rows_in} rows in its files and {total} after cleaning: its files changed "
                "meanwhile, so run again"
            )
        if rows_in == 0:
            raise DataError(f"day {each.day} has files with 0 rows of rides: remove its folder or deliver it again")
        if OK not in outcomes:
            reason, sums = max(outcomes.items(), key=lambda item: item[1].rows)
            raise DataError(
                f"all {rows_in} rows of day {each.day} are quarantined, {sums.rows} of them for {reason!r}: deliver "
                "the day again, or correct the limits in the section etl"
            )


def _write(settings: Settings, rows: DataFrame, todo: Sequence[RawDay], found: Found, vocabulary: Vocabulary) -> int:
    """Replace the days in both tables, one commit each, and return the version of the feature table."""
    from pyspark.sql import functions as F

    partitions = [{"day": date.fromisoformat(each.day)} for each in todo]
    bad = rows.where(~F.col("outcome").isin(OK, DUPLICATE))
    quarantine = bad.select("day", "event_id", F.col("outcome").alias("reason"), "format", "raw")
    vehicles = [F.lit(part) for pair in vocabulary.ids["vehicle"].items() for part in pair]
    vehicle_id = F.coalesce(F.create_map(*vehicles)[F.col("vehicle")], F.lit(0)).cast("int")
    good = rows.where(F.col("outcome") == OK).withColumn("vehicle_id", vehicle_id)
    features = good.select("day", "event_id", "pickup_at", *NUMERIC, *[id_column(name) for name in CATEGORICAL], LABEL)
    expected = {"features": 0, "quarantine": 0}
    for outcomes in found.values():
        for outcome, sums in outcomes.items():
            if outcome != DUPLICATE:
                expected["features" if outcome == OK else "quarantine"] += sums.rows
    version = -1
    for name, frame in (("quarantine", quarantine), ("features", features)):
        table = Table(settings.paths.table(name))
        # one task a day: each partition becomes one file, and a day is what a later run replaces
        written = table.write(frame.repartition("day"), "replace", partition_by=["day"], partitions=partitions)
        if written.rows != expected[name]:
            raise DataError(
                f"{table.uri} got {written.rows} rows and {expected[name]} were counted: the raw files changed "
                "meanwhile, so run again"
            )
        version = written.version
    return version


def _state(raw: RawDay, outcomes: Mapping[str, _Sums], version: int) -> DayState:
    reasons = {name: sums.rows for name, sums in outcomes.items() if name not in (OK, DUPLICATE)}
    return DayState(
        day=raw.day,
        fingerprint=raw.fingerprint,
        rows_in=sum(sums.rows for sums in outcomes.values()),
        rows_out=outcomes[OK].rows,
        quarantined=sum(reasons.values()),
        duplicates=outcomes[DUPLICATE].rows if DUPLICATE in outcomes else 0,
        reasons=reasons,
        moments=outcomes[OK].moments,
        features_version=version,
    )


def describe(run: Run, result: EtlResult) -> None:
    """Put what the ETL did into the run's record."""
    if result.nothing_new:
        run.nothing_new(f"all {len(result.days)} days are processed and their files have not changed")
    else:
        run.record.rows = result.rows
    run.record.places |= {"features": result.features, "quarantine": result.quarantine}
    run.record.results["etl"] = {
        "features_version": result.features_version,
        "split": vars(result.split),
        "statistics_id": result.statistics.statistics_id,
        "vocabulary_sizes": result.vocabulary_sizes,
        "zones": result.zones,
        "seconds": result.seconds,
    }


def _job(run: Run) -> None:
    with run.stage("spark"):
        spark = open_session(run.settings, "lake", "runs")
    with run.stage("etl"):
        result = run_etl(spark, run.settings)
    describe(run, result)


if __name__ == "__main__":
    sys.exit(run_job("etl", _job, summary=True))
