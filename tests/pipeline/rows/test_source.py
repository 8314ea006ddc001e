"""What a source shows without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from sparkdl.errors import DataError
from sparkdl.pipeline.rows.source import look_at
from sparkdl.pipeline.rows.windows import NO_TIME
from sparkdl.pipeline.spec import CsvSource, DeltaSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tables"))

from delta_log import actions, commit, hide_rows, protocol


def test_one_file_a_folder_and_a_pattern_show_the_same_file(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    file = folder / "wine.csv"
    file.write_text("alcohol\n12.5\n")
    looks = [look_at(CsvSource(path=str(place))) for place in (file, folder, folder / "*.csv")]
    assert [list(look.files) for look in looks] == [[file.as_uri()]] * 3
    assert len({look.state for look in looks}) == 1
    file.write_text("alcohol\n12.55\n")
    assert look_at(CsvSource(path=str(file))).state != looks[0].state


def test_one_file_of_a_store_is_found(s3_root, monkeypatch):
    s3_root.child("wine.csv").write_atomic(b"alcohol\n12.5\n")
    monkeypatch.setattr("sparkdl.pipeline.rows.source.Storage.of", lambda _: s3_root.child("wine.csv"))
    as_spark_says_it = f"{s3_root.uri}/wine.csv".replace("s3:", "s3a:")
    assert look_at(CsvSource(path=f"{s3_root.uri}/wine.csv")).files.keys() == {as_spark_says_it}


@pytest.mark.parametrize("name", ["absent.csv", "empty"])
def test_a_place_without_files_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        look_at(CsvSource(path=str(tmp_path / name)))


def test_rows_deleted_by_a_vector_change_what_a_table_shows_and_their_window_alone(tmp_path):
    place = str(tmp_path / "orders")
    rows = pa.table({"x": range(80), "day": ["2026-03-01"] * 40 + ["2026-03-02"] * 40})
    write_deltalake(place, rows, partition_by=["day"])
    commit(place, 1, protocol(["deletionVectors"], []))
    by_day, whole = DeltaSource(table=place, partition="day"), DeltaSource(table=place, time="day")
    before, whole_before = look_at(by_day), look_at(whole)
    added = [action["add"] for action in actions(place) if "add" in action]
    hide_rows(place, 2, next(add for add in added if add["partitionValues"]["day"] == "2026-03-02"))
    after = look_at(by_day)
    assert after.state != before.state
    assert look_at(whole).state != whole_before.state
    assert after.windows["2026-03-01"] == before.windows["2026-03-01"]
    assert after.windows["2026-03-02"] != before.windows["2026-03-02"]
    assert look_at(by_day) == after


@pytest.mark.parametrize(("every", "windows"), [("day", ["2026-03-01", NO_TIME]), ("hour", ["2026-03-01T05", NO_TIME])])
def test_a_folder_that_names_no_window_is_that_of_rows_without_a_time(tmp_path, every, windows):
    for name in ("2026-03-01T05", "2026-02-30", "0000-01-01T05", "2026-13-01T05", "x"):
        (tmp_path / f"at={name}").mkdir()
        (tmp_path / f"at={name}" / "rows.csv").write_text("alcohol\n12.5\n")
    look = look_at(CsvSource(path=str(tmp_path), partition="at", every=every))
    assert [*look.windows] == sorted(look.sizes) == windows
