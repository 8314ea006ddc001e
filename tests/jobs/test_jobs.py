"""The entry points for spark-submit are thin: each is ``sparkdl run`` of a part of a pipeline."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sparkdl.cli import job

JOBS = sorted((Path(__file__).parents[2] / "jobs").glob("*.py"))
STEPS = ("ingest", "features", "shards", "train", "evaluate", "publish", "score", "then")
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


def test_a_job_without_a_file_is_told_of_config_and_its_help_needs_none(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jobs/retrain.py"])
    for words in ([], ["--until", "shards"]):
        with pytest.raises(SystemExit) as refused:
            job("run", arguments=words)
        assert refused.value.code == 1
        assert "retrain.py: error: --config FILE, the pipeline file, is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        job("run", arguments=["--help"])
    assert (ended.value.code, "exit codes" in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    ("name", "last", "code"),
    [("retrain", "score", 0), ("etl", "shards", 0), ("train", "publish", 0), ("score", "then", 1)],
)
def test_each_job_does_its_part(file, capsys, monkeypatch, name, last, code):
    """The plan of its run, which is made as the run is; nobody has trained yet, so score.py is refused."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--config", file, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(next(path for path in JOBS if path.stem == name)), run_name="__main__")
    named = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert ([step for step in STEPS if step in named][-1], ended.value.code) == (last, code)


def test_the_jobs_stay_thin():
    assert {path.stem for path in JOBS} == {"retrain", "etl", "train", "score"}
    for path in JOBS:
        assert len(path.read_text().splitlines()) <= 20
