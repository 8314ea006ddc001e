from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.make_events import make_events
from jobs.raw import list_raw, look_at_rides, read_weather, read_zones
from sparkdl.errors import DataError, SchemaError


@pytest.fixture
def raw(small):
    make_events(small)
    return Path(small.paths.of("raw"))


def rewrite(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def test_both_formats_are_seen_and_counted(small, raw):
    days = list_raw(str(raw), small.etl)
    assert list(days) == ["2026-03-02", "2026-03-03", "2026-03-04", "2026-03-05"]
    assert [bool(day.parquet) for day in days.values()] == [True, False, True, True]
    files = look_at_rides(days.values())
    assert files.parquet_rows == {"2026-03-02": 500, "2026-03-04": 500, "2026-03-05": 500}
    assert len(files.csv) == len(files.parquet) == 1


def test_a_fingerprint_changes_with_files_and_rules_and_with_nothing_else(small, raw):
    from dataclasses import replace

    def fingerprints(etl=small.etl):
        return {day: each.fingerprint for day, each in list_raw(str(raw), etl).items()}

    before = fingerprints()
    assert fingerprints() == before
    (raw / "events/day=2026-03-02/.part.tmp").write_text("being written")
    assert fingerprints() == before
    rewrite(raw / "weather/day=2026-03-04/weather.parquet", lambda table: table.slice(1))
    after = fingerprints()
    assert [day for day in before if after[day] != before[day]] == ["2026-03-04"]
    assert not set(fingerprints(replace(small.etl, max_distance_km=9.0)).values()) & set(after.values())


def test_no_rides_at_all_are_refused(tmp_path, small):
    with pytest.raises(DataError, match=r"0 days of rides.*make_events"):
        list_raw(str(tmp_path), small.etl)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_missing_column_is_named_with_its_file(small, raw, kind):
    if kind == "parquet":
        rewrite(raw / "events/day=2026-03-04/rides.parquet", lambda table: table.drop_columns(["vehicle"]))
    else:
        path = raw / "late/day=2026-03-03/rides.csv"
        path.write_text(path.read_text().replace('"vehicle"', '"wagon"', 1))
    with pytest.raises(SchemaError, match=r"day=2026-03-0[34].*and not vehicle"):
        look_at_rides(list_raw(str(raw), small.etl).values())


def test_a_truncated_file_is_refused(small, raw):
    path = raw / "events/day=2026-03-04/rides.parquet"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"rides\.parquet is not a whole Parquet file"):
        look_at_rides(list_raw(str(raw), small.etl).values())


def test_zones_must_be_there_once_each(raw):
    assert read_zones(str(raw)).num_rows == 60
    rewrite(raw / "zones.parquet", lambda table: pa.concat_tables([table, table.slice(3, 1)]))
    with pytest.raises(DataError, match="61 rows for 60 different zones"):
        read_zones(str(raw))
    rewrite(raw / "zones.parquet", lambda table: table.slice(0, 0))
    with pytest.raises(DataError, match="0 rows for 0"):
        read_zones(str(raw))


def test_zones_of_a_wrong_type_are_refused(raw):
    words = pa.array(["far"] * 60)
    rewrite(raw / "zones.parquet", lambda table: table.set_column(2, "x_km", words))
    with pytest.raises(SchemaError, match=r"x_km.*string, not double"):
        read_zones(str(raw))


def test_an_hour_of_weather_twice_is_refused(small, raw):
    days = list(list_raw(str(raw), small.etl).values())
    assert read_weather(days).num_rows == 24 * 4
    path = raw / "weather/day=2026-03-04/weather.parquet"
    rewrite(path, lambda table: pa.concat_tables([table, table.slice(5, 1)]))
    with pytest.raises(DataError, match=r"2026-03-04 has the hour 5 2 times"):
        read_weather(list(list_raw(str(raw), small.etl).values()))
