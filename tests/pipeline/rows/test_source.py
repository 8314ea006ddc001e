"""What a source shows without Spark."""

from __future__ import annotations

import pytest

from sparkdl.errors import DataError
from sparkdl.pipeline.rows.source import look_at
from sparkdl.pipeline.spec import CsvSource


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
