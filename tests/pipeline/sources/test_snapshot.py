"""What a source shows without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from sparkdl.errors import ConfigError, DataError
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.spec.source import CsvSource, DeltaSource, JsonSource, ParquetSource
from sparkdl.pipeline.windows import NO_TIME

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tables"))

from delta_log import actions, commit, hide_rows, protocol


def test_one_file_a_folder_and_a_pattern_show_the_same_file(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    file = folder / "wine.csv"
    file.write_text("alcohol\n12.5\n")
    looks = [source_of(CsvSource(path=str(place))).snapshot() for place in (file, folder, folder / "*.csv")]
    assert [list(look.files) for look in looks] == [[file.as_uri()]] * 3
    assert len({look.state for look in looks}) == 1
    file.write_text("alcohol\n12.55\n")
    assert source_of(CsvSource(path=str(file))).snapshot().state != looks[0].state


def test_one_file_of_a_store_is_found(s3_root, monkeypatch):
    s3_root.child("wine.csv").write_atomic(b"alcohol\n12.5\n")
    monkeypatch.setattr("sparkdl.pipeline.sources.files.Storage.of", lambda _: s3_root.child("wine.csv"))
    as_spark_says_it = f"{s3_root.uri}/wine.csv".replace("s3:", "s3a:")
    assert source_of(CsvSource(path=f"{s3_root.uri}/wine.csv")).snapshot().files.keys() == {as_spark_says_it}


@pytest.mark.parametrize("name", ["absent.csv", "empty"])
def test_a_place_without_files_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        source_of(CsvSource(path=str(tmp_path / name))).snapshot()


def test_rows_deleted_by_a_vector_change_what_a_table_shows_and_their_window_alone(tmp_path):
    place = str(tmp_path / "orders")
    rows = pa.table({"x": range(80), "day": ["2026-03-01"] * 40 + ["2026-03-02"] * 40})
    write_deltalake(place, rows, partition_by=["day"])
    commit(place, 1, protocol(["deletionVectors"], []))
    by_day, whole = DeltaSource(table=place, partition="day"), DeltaSource(table=place, time="day")
    before, whole_before = source_of(by_day).snapshot(), source_of(whole).snapshot()
    added = [action["add"] for action in actions(place) if "add" in action]
    hide_rows(place, 2, next(add for add in added if add["partitionValues"]["day"] == "2026-03-02"))
    after = source_of(by_day).snapshot()
    assert after.state != before.state
    assert source_of(whole).snapshot().state != whole_before.state
    assert after.windows["2026-03-01"] == before.windows["2026-03-01"]
    assert after.windows["2026-03-02"] != before.windows["2026-03-02"]
    assert source_of(by_day).snapshot() == after


@pytest.mark.parametrize(("every", "windows"), [("day", ["2026-03-01", NO_TIME]), ("hour", ["2026-03-01T05", NO_TIME])])
def test_a_folder_that_names_no_window_is_that_of_rows_without_a_time(tmp_path, every, windows):
    for name in ("2026-03-01T05", "2026-02-30", "0000-01-01T05", "2026-13-01T05", "x"):
        (tmp_path / f"at={name}").mkdir()
        (tmp_path / f"at={name}" / "rows.csv").write_text("alcohol\n12.5\n")
    look = source_of(CsvSource(path=str(tmp_path), partition="at", every=every)).snapshot()
    assert [*look.windows] == sorted(look.sizes) == windows


def removed_rows(place, kind):
    """A folder with files of rows, some of which its table has removed."""
    day = Path(place) / ("data" if kind == "Iceberg" else "") / "day=2026-03-01"
    if kind == "Delta":
        write_deltalake(place, pa.table({"x": [1, 2], "day": ["2026-03-01"] * 2}), partition_by=["day"])
        write_deltalake(place, pa.table({"x": [3], "day": ["2026-03-01"]}), mode="overwrite")
        return day
    day.mkdir(parents=True)
    (day / "x.parquet").write_bytes(b"")
    mark = {"Iceberg": "metadata/v2.metadata.json", "Hudi": ".hoodie/hoodie.properties"}[kind]
    (Path(place) / mark).parent.mkdir()
    (Path(place) / mark).write_text("{}")
    return day


@pytest.mark.parametrize("kind", ["Delta", "Iceberg", "Hudi"])
@pytest.mark.parametrize("section", [ParquetSource, CsvSource, JsonSource])
def test_files_that_a_tables_log_governs_are_no_source(tmp_path, kind, section):
    place = tmp_path / "lake" / "orders"
    day = removed_rows(str(place), kind)
    file = next(day.glob("*.parquet"))
    remedies = {"Delta": f"{{kind: delta, table: {place}}}", "Iceberg": "kind: spark, table:", "Hudi": "format: hudi"}
    for path in (place, day, file, place / "*.parquet", tmp_path, tmp_path / "lake" / "o*", f"{day}/*.parquet"):
        with pytest.raises(ConfigError, match=f"those of a table \\({kind}\\)") as refusal:
            source_of(section(path=str(path))).snapshot()
        assert remedies[kind] in str(refusal.value)


def test_a_folder_called_metadata_makes_no_table(tmp_path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "readers.json").write_text("{}")
    (tmp_path / "x.json").write_text("{}")
    assert len(source_of(JsonSource(path=str(tmp_path))).snapshot().files) == 2
