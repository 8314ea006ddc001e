"""The entry points for spark-submit are thin: each is ``sparkdl run`` of a part of a pipeline."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sparkdl.cli import job

JOBS = sorted((Path(__file__).parents[2] / "jobs").glob("*.py"))
STEPS = ["ingest", "features", "shards", "train", "evaluate", "publish", "score"]
WINE = """\
source: {kind: csv, path: wine.csv}
features: {alcohol: number}
label: {quality: regression}
split: {by: hash}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "wine.csv").write_text("alcohol,quality\n12.5,6\n")
    (tmp_path / "wine.yaml").write_text(WINE)
    return str(tmp_path / "wine.yaml")


def test_config_names_the_file_wherever_it_stands(file, capsys):
    for words in (["--config", file, "--set", "train.epoch=3"], ["--set=train.epoch=3", f"--config={file}"]):
        assert job("run", arguments=words) == 1
        assert "write epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "steps", "code"),
    [("retrain", STEPS, 0), ("etl", STEPS[:3], 0), ("train", STEPS[:6], 0), ("score", ["ingest", "then"], 1)],
)
def test_each_job_does_its_part(file, capsys, monkeypatch, name, steps, code):
    """The plan of its run, which is made as the run is; nobody has trained yet, so score.py is refused."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--config", file, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(next(path for path in JOBS if path.stem == name)), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ([line.split()[0] for line in lines], ended.value.code) == (steps, code)


def test_the_jobs_stay_thin():
    assert {path.stem for path in JOBS} == {"retrain", "etl", "train", "score"}
    for path in JOBS:
        assert len(path.read_text().splitlines()) <= 20
