"""A job looks at the places that it will write to before it reads a row."""

import pytest

from jobs.entry import open_session
from jobs.settings import PathSettings, Settings
from sparkdl.errors import StorageError


def test_every_place_of_a_job_that_cannot_be_written_is_named_at_its_start(spark, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    settings = Settings(paths=PathSettings(root=str(tmp_path), lake=f"{tmp_path}/file/lake", runs=f"{tmp_path}/file/r"))
    with pytest.raises(StorageError, match=r"^paths\.lake: cannot write .*; paths\.runs: cannot write ") as caught:
        open_session(settings, "lake", "shards", "registry", "runs")
    assert "paths.shards" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
