from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.etl import processed_days, run_etl
from jobs.features import LABEL, NUMERIC, features_frame, id_column
from jobs.make_events import make_events
from jobs.rides import SCHEMA
from jobs.settings import EtlSettings, EventSettings, PathSettings, Settings
from sparkdl.errors import DataError, SchemaError, StorageError
from sparkdl.tables.table import Table

DAYS = ["2026-03-02", "2026-03-03", "2026-03-04", "2026-03-05"]


def files_by_day(settings, table="features"):
    found = {}
    for path in Path(settings.paths.table(table)).rglob("day=*/*.parquet"):
        found.setdefault(path.parent.name.removeprefix("day="), set()).add(path.name)
    return found


def active_rows(settings, day=None, table="features"):
    where = None if day is None else f"day = DATE '{day}'"
    return Table(settings.paths.table(table)).rows(where=where).to_pylist()


@pytest.fixture(scope="module")
def processed(spark, tmp_path_factory):
    """Four small days after their first ETL; tests that change them work on a copy."""
    settings = Settings(
        paths=PathSettings(root=str(tmp_path_factory.mktemp("lake"))),
        events=EventSettings(rows=4000, days=4, late_day=1),
        etl=EtlSettings(training_days=2, validation_days=1, scoring_days=1),
    )
    truth = make_events(settings)
    return settings, truth, run_etl(spark, settings)


@pytest.fixture
def own(processed, tmp_path):
    """The same state, free to change; file times are kept, so that nothing looks new."""
    settings = replace(processed[0], paths=PathSettings(root=str(tmp_path / "data")))
    shutil.copytree(processed[0].paths.root, settings.paths.root)
    return settings


@pytest.fixture
def fresh(processed, tmp_path):
    """The same raw data before any ETL, free to change."""
    settings = replace(processed[0], paths=PathSettings(root=str(tmp_path / "data")))
    shutil.copytree(processed[0].paths.of("raw"), settings.paths.of("raw"))
    return settings


def ride_file(settings, day):
    return Path(settings.paths.of("raw")) / f"events/day={day}/rides.parquet"


def rewrite(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def constant(column, value):
    def change(table):
        index = table.schema.get_field_index(column)
        return table.set_column(index, column, pa.array([value] * table.num_rows, table.schema.field(index).type))

    return change


def test_every_row_ends_where_the_truth_says(processed):
    settings, truth, result = processed
    assert result.processed == tuple(DAYS)
    for day in DAYS:
        known, state = truth["days"][day], result.days[day]
        assert state.rows_in == known["rows"] == 1000
        assert state.rows_out == known["valid"]
        assert state.duplicates == known["duplicates"]
        assert state.reasons == {reason: count for reason, count in known["dirt"].items() if count}
        assert state.rows_in == state.rows_out + state.quarantined + state.duplicates
        assert len(active_rows(settings, day)) == state.rows_out
    quarantine = active_rows(settings, table="quarantine")
    found = Counter((str(row["day"]), row["reason"]) for row in quarantine)
    assert found == {(day, reason): n for day in DAYS for reason, n in result.days[day].reasons.items()}


def test_the_quarantine_keeps_rows_as_they_came(processed):
    settings, _, _ = processed
    for row in active_rows(settings, table="quarantine"):
        raw = json.loads(row["raw"])
        column, fault = row["reason"].split(": ")
        if fault == "not a number":
            assert raw[column] in ("n/a", "two", "3,5", "-", "12 km")
        if fault == "not a timestamp":
            assert row["format"] == "csv"
            assert raw[column] in ("yesterday", "0000-00-00", "31/31/2026 25:61")
        if fault == "missing":
            assert column not in raw
        else:
            assert len(raw) == 9


def test_features_are_the_rides_in_their_units(processed):
    settings, truth, result = processed
    rows = active_rows(settings)
    assert len({row["event_id"] for row in rows}) == len(rows)
    target = np.array([row[LABEL] for row in rows])
    sums = [truth["days"][day] for day in DAYS]
    assert target.sum() == pytest.approx(sum(day["target"] for day in sums), rel=1e-9)
    assert (target**2).sum() == pytest.approx(sum(day["target_sq"] for day in sums), rel=1e-9)
    for row in rows:
        started = row["pickup_at"].astimezone(UTC)
        assert str(started.date()) == str(row["day"])
        assert row["hour_id"] == started.hour + 1
        assert row["weekday_id"] == started.weekday() + 1
        assert row["log_distance"] == pytest.approx(np.log1p(row["distance_km"]))
        assert row["hour_of_day"] == pytest.approx(started.hour + started.minute / 60 + started.second / 3600)
        assert 0 <= row["pickup_zone_id"] < result.vocabulary_sizes["pickup_zone"] == 61
        assert all(row[name] is not None and np.isfinite(row[name]) for name in NUMERIC)
    unseen = [row for row in rows if row["pickup_zone_id"] == 0]
    assert unseen
    assert all(row["pickup_borough_id"] == 0 and row["beeline_km"] > 0 for row in unseen)


def test_rides_meet_the_weather_of_their_hour(processed):
    settings, _, _ = processed
    raw = Path(settings.paths.of("raw"))
    for day in DAYS[:2]:
        weather = pq.read_table(raw / f"weather/day={day}/weather.parquet").to_pylist()
        for row in active_rows(settings, day)[:200]:
            hour = weather[row["hour_id"] - 1]
            assert (row["rain_mm"], row["temperature_c"]) == (hour["rain_mm"], hour["temperature_c"])


def test_numerics_are_standardised_with_the_training_days_only(spark, processed):
    settings, _, result = processed
    assert result.split.training == ("2026-03-02", "2026-03-03")
    assert (result.split.validation, result.split.scoring) == (("2026-03-04",), ("2026-03-05",))
    training = [row for day in result.split.training for row in active_rows(settings, day)]
    frame = features_frame(spark, settings, days=result.split.training, statistics=result.statistics).toPandas()
    assert len(frame) == len(training)
    for name in NUMERIC:
        values = np.array([row[name] for row in training])
        assert result.statistics.mean(name) == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
        assert result.statistics.scale(name) == pytest.approx(values.std() or 1.0, rel=1e-9)
        assert frame[name].mean() == pytest.approx(0.0, abs=1e-5)
    assert frame[LABEL].mean() == pytest.approx(result.statistics.mean(LABEL), rel=1e-5)
    later = features_frame(spark, settings, days=result.split.scoring, statistics=result.statistics).toPandas()
    assert abs(later["rain_mm"].mean()) > 1e-3
    stored = Table(settings.paths.table("statistics")).rows(
        where=f"statistics_id = '{result.statistics.statistics_id}'"
    )
    assert dict(zip(stored["column"].to_pylist(), stored["mean"].to_pylist(), strict=True))[
        "distance_km"
    ] == pytest.approx(result.statistics.mean("distance_km"))


def test_a_second_run_finds_nothing_new_and_writes_nothing(spark, own):
    before = {name: Table(own.paths.table(name)).version() for name in ("features", "quarantine", "etl_days")}
    result = run_etl(spark, own)
    assert result.nothing_new
    assert {name: Table(own.paths.table(name)).version() for name in before} == before
    assert result == replace(processed_days(own), seconds=result.seconds)


def test_a_changed_day_is_replaced_and_no_other(spark, own):
    before, features = files_by_day(own), {day: active_rows(own, day) for day in DAYS}
    rewrite(ride_file(own, "2026-03-04"), lambda table: table.slice(0, 700))
    result = run_etl(spark, own)
    assert result.processed == ("2026-03-04",)
    assert result.days["2026-03-04"].rows_in == 700
    for day in DAYS:
        rows = active_rows(own, day)
        assert (rows == features[day]) == (day != "2026-03-04")
    live = Table(own.paths.table("features"))._open().file_uris()
    kept = {Path(uri).name for uri in live if "2026-03-04" not in uri}
    assert kept == {name for day, names in before.items() if day != "2026-03-04" for name in names}


def test_a_day_that_is_asked_for_again_gives_the_same_rows_and_ids(spark, own):
    before = active_rows(own, "2026-03-03")
    again = replace(own, etl=replace(own.etl, days=["2026-03-03"]))
    assert run_etl(spark, again).processed == ("2026-03-03",)
    key = [name for name in before[0] if name != "pickup_at"]
    assert sorted(str([row[name] for name in key]) for row in active_rows(own, "2026-03-03")) == sorted(
        str([row[name] for name in key]) for row in before
    )
    with pytest.raises(DataError, match="2030-01-01"):
        run_etl(spark, replace(own, etl=replace(own.etl, days=["2030-01-01"])))


def test_a_new_day_moves_the_split_and_leaves_the_other_days_alone(spark, own):
    before = {day: active_rows(own, day) for day in DAYS}
    more = replace(own, events=replace(own.events, extra_days=1))
    make_events(more)
    result = run_etl(spark, more)
    assert result.processed == ("2026-03-06",)
    assert result.split.training == ("2026-03-03", "2026-03-04")
    assert result.split.scoring == ("2026-03-06",)
    assert {day: active_rows(own, day) for day in DAYS} == before


def test_ids_of_categoricals_never_change(spark, own):
    """A zone that sorts before all others and a vehicle that was never seen get new ids, after the old ones."""

    def with_zone(table):
        first = table.slice(0, 1).to_pylist()[0] | {"zone": "A000"}
        return pa.concat_tables([pa.Table.from_pylist([first], schema=table.schema), table])

    rewrite(Path(own.paths.of("raw")) / "zones.parquet", with_zone)
    before = Table(own.paths.table("vocabulary")).rows().to_pylist()
    rewrite(ride_file(own, "2026-03-02"), constant("vehicle", "autogyro"))
    rewrite(ride_file(own, "2026-03-02"), constant("pickup_zone", "A000"))
    result = run_etl(spark, own)
    after = Table(own.paths.table("vocabulary")).rows().to_pylist()
    assert [row for row in after if row in before] == sorted(before, key=after.index)
    new = {(row["categorical"], row["value"], row["id"]) for row in after if row not in before}
    assert new == {("zone", "A000", 61), ("vehicle", "autogyro", 5)}
    assert {row["vehicle_id"] for row in active_rows(own, "2026-03-02")} == {5}
    assert {row["pickup_zone_id"] for row in active_rows(own, "2026-03-02")} == {61}
    assert result.vocabulary_sizes["pickup_zone"] == 62


def test_the_last_copy_of_an_event_survives_whatever_the_order_of_rows(spark, fresh):
    start = datetime(2026, 3, 2, 9, tzinfo=UTC)

    def ride(event, distance, received_minutes):
        return {
            "event_id": event,
            "received_at": start + timedelta(minutes=received_minutes),
            "pickup_at": start,
            "dropoff_at": start + timedelta(minutes=20),
            "pickup_zone": "Z001",
            "dropoff_zone": "Z002",
            "vehicle": "van",
            "passengers": "1",
            "distance_km": distance,
        }

    rows = [ride(1, "1.0", 30), ride(1, "2.0", 40), ride(1, "3.0", 35), ride(2, "4.0", 30), ride(2, "5.0", 30)]
    rows += [ride(3, "6.0", 30), ride(3, "n/a", 50), ride(None, "7.0", 30), ride(None, "7.0", 30)]
    survivors = []
    for order in (1, -1):
        pq.write_table(pa.Table.from_pylist(rows[::order], schema=SCHEMA), ride_file(fresh, "2026-03-02"))
        state = run_etl(spark, fresh).days["2026-03-02"]
        assert (state.rows_in, state.duplicates, state.rows_out) == (9, 4, 2)
        assert state.reasons == {"event_id: missing": 2, "distance_km: not a number": 1}
        survivors.append(sorted((row["event_id"], row["distance_km"]) for row in active_rows(fresh, "2026-03-02")))
    assert survivors[0] == survivors[1]
    assert survivors[0][0] == (1, 2.0)


def test_a_late_file_for_a_day_that_is_there_joins_it(spark, own):
    raw = Path(own.paths.of("raw"))
    lines = (raw / "late/day=2026-03-03/rides.csv").read_text().replace("2026-03-03", "2026-03-04").splitlines()
    target = raw / "late/day=2026-03-04/rides.csv"
    target.parent.mkdir()
    target.write_text("\n".join(lines[:101]) + "\n")
    result = run_etl(spark, own)
    assert result.processed == ("2026-03-04",)
    assert result.days["2026-03-04"].rows_in == 1100


def test_weather_that_is_missing_or_not_finite_is_a_reason(spark, fresh):
    def spoiled(table):
        rain = table["rain_mm"].to_pylist()
        rain[8], rain[9], rain[17] = float("nan"), float("inf"), None
        return table.set_column(1, "rain_mm", pa.array(rain)).filter(pa.array([hour != 12 for hour in range(24)]))

    rewrite(Path(fresh.paths.of("raw")) / "weather/day=2026-03-02/weather.parquet", spoiled)
    state = run_etl(spark, fresh).days["2026-03-02"]
    assert state.reasons["weather: missing or not finite"] > 50
    assert {row["hour_id"] - 1 for row in active_rows(fresh, "2026-03-02")}.isdisjoint({8, 9, 12, 17})


def refused(spark, settings, error, words):
    """Check the refusal, and that it left nothing behind."""
    with pytest.raises(error, match=words):
        run_etl(spark, settings)
    lake = Path(settings.paths.of("lake"))
    assert not [path for path in lake.rglob("*") if path.is_file()] if lake.is_dir() else True


def test_a_day_without_rows_is_refused(spark, fresh):
    rewrite(ride_file(fresh, "2026-03-04"), lambda table: table.slice(0, 0))
    refused(spark, fresh, DataError, r"2026-03-04 has files with 0 rows")


def test_a_day_without_a_valid_row_is_refused(spark, fresh):
    rewrite(ride_file(fresh, "2026-03-04"), constant("distance_km", "n/a"))
    refused(spark, fresh, DataError, r"all 1000 rows of day 2026-03-04.*distance_km: not a number")


def test_a_missing_column_is_refused(spark, fresh):
    rewrite(ride_file(fresh, "2026-03-04"), lambda table: table.drop_columns(["dropoff_at"]))
    refused(spark, fresh, SchemaError, r"2026-03-04.*and not dropoff_at")


def test_more_values_than_embedding_rows_are_refused(spark, fresh):
    rows = fresh.model.embedding_rows | {"pickup_zone": 60}
    small = replace(fresh, model=replace(fresh.model, embedding_rows=rows))
    refused(spark, small, DataError, r"pickup_zone has 61 ids.*60 rows.*pickup_zone=64")


def test_a_lake_that_cannot_be_written_is_refused(spark, fresh):
    Path(fresh.paths.of("lake")).write_text("a file where a folder is needed")
    refused(spark, fresh, StorageError, "lake")


def test_a_full_lake_is_refused_and_holds_nothing_half_written(spark, own, monkeypatch):
    """The log of the feature table cannot be written: the day stays as it was, and is done by the next run."""
    import sparkdl.tables.table as tables

    before = active_rows(own, "2026-03-04")
    rewrite(ride_file(own, "2026-03-04"), lambda table: table.slice(0, 700))
    original = tables.Table.write

    def full(self, frame, *arguments, **options):
        if self.uri.endswith("features"):
            raise StorageError(f"cannot write {self.uri}: the device or quota is full: free space there")
        return original(self, frame, *arguments, **options)

    monkeypatch.setattr(tables.Table, "write", full)
    with pytest.raises(StorageError, match="full"):
        run_etl(spark, own)
    assert active_rows(own, "2026-03-04") == before
    monkeypatch.undo()
    assert run_etl(spark, own).processed == ("2026-03-04",)
    assert len(active_rows(own, "2026-03-04")) == run_etl(spark, own).days["2026-03-04"].rows_out


def test_upstream_may_change_a_type_from_one_day_to_the_next(spark, own):
    def as_numbers(table):
        distance = pa.array([3.5] * table.num_rows, pa.float32())
        return table.set_column(table.schema.get_field_index("distance_km"), "distance_km", distance)

    rewrite(ride_file(own, "2026-03-04"), as_numbers)
    rewrite(ride_file(own, "2026-03-05"), lambda table: table.slice(0, 900))
    result = run_etl(spark, own)
    assert result.processed == ("2026-03-04", "2026-03-05")
    assert {row["distance_km"] for row in active_rows(own, "2026-03-04")} == {3.5}


def test_the_time_zone_of_the_session_changes_nothing(spark, own):
    before = active_rows(own, "2026-03-03")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        run_etl(spark, replace(own, etl=replace(own.etl, days=["2026-03-03"])))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    names = ["event_id", LABEL, *NUMERIC, id_column("hour"), id_column("weekday")]
    assert sorted([row[name] for name in names] for row in active_rows(own, "2026-03-03")) == sorted(
        [row[name] for name in names] for row in before
    )
