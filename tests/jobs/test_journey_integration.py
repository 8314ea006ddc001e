"""The whole journey in one process on real parts: twice on the same data, once with a new day, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from jobs.entry import run_job
from jobs.retrain import _job as retrain
from jobs.score import _job as score
from jobs.train import _job as train
from sparkdl.models.registry import ModelRegistry
from sparkdl.tables.table import Table

DAYS, ROWS_A_DAY = 5, 1200
SMALL = [
    f"--set.events.rows={DAYS * ROWS_A_DAY}",
    f"--set.events.days={DAYS}",
    "--set.events.late_day=1",
    "--set.etl.validation_days=1",
    "--set.train.epochs=3",
    "--set.train.batch_rows=64",
]
BODIES = {"retrain": retrain, "train": train, "score": score}


def launch(root, job, *overrides):
    """Run a job as its script does; return its exit code and its record."""
    before = set(Path(root).glob("runs/*/record.json"))
    code = run_job(job, BODIES[job], [f"--set.paths.root={root}", *SMALL, *overrides])
    (place,) = set(Path(root).glob("runs/*/record.json")) - before
    return code, json.loads(place.read_text())


def registry(root):
    return ModelRegistry(str(root / "registry"))


@pytest.fixture(scope="module")
def first(spark, tmp_path_factory):
    """The first run: its root, exit code and record."""
    root = tmp_path_factory.mktemp("journey")
    return root, *launch(root, "retrain")


def test_the_first_run_publishes_a_champion_and_scores_the_unseen_day(first):
    root, code, record = first
    assert (code, record["status"]) == (0, "done")
    rows = record["rows"]
    assert rows["read"] == rows["written"] + rows["quarantined"] + rows["duplicates"]
    assert registry(root).aliases("ride-duration") == {"champion": 1}
    assert record["quality"]["rmse"] < 0.7 * record["quality"]["mean_rmse"]
    assert record["quality"]["floor_rmse"] < record["quality"]["rmse"]
    features = Table(str(root / "lake" / "features")).rows(["event_id"], where="day = '2026-03-06'")
    predictions = Table(str(root / "lake" / "predictions")).rows()
    assert record["predictions"]["days"] == ["2026-03-06"]
    assert sorted(predictions["event_id"].to_pylist()) == sorted(features["event_id"].to_pylist())
    assert set(predictions["model_version"].to_pylist()) == {1}


def test_the_version_says_where_it_comes_from(first):
    root, _, record = first
    version = registry(root).get("ride-duration", "champion")
    assert version.lineage["source_table"] == record["places"]["features"]
    assert version.lineage["source_version"] == Table(str(root / "lake" / "features")).version()
    assert version.lineage["shard_key"]
    assert version.lineage["versions"]["torch"]
    assert version.metrics["rmse"] == pytest.approx(record["quality"]["rmse"])
    assert version.parameters["train"]["ranks"] == 2


def test_the_report_draws_every_figure(first):
    _, _, record = first
    page = Path(record["places"]["report"]).read_text()
    for title in (
        "Learning curves",
        "predicted against true",
        "Residuals by hour",
        "Residuals by pick-up zone",
        "Time",
    ):
        assert title in page
    assert not re.search(r"""(src|href)=["']?https?:""", page), "the report must open without a network"


def test_checkpoints_are_gone_once_the_model_is_saved(first):
    root, _, _ = first
    assert not list((root / "runs" / "checkpoints").glob("*"))


def test_a_second_run_on_the_same_data_finds_nothing_new(spark, first):
    root, _, _ = first
    version = Table(str(root / "lake" / "predictions")).version()
    for job in ("retrain", "train", "score"):
        code, record = launch(root, job)
        assert (code, record["status"]) == (0, "nothing new")
    assert [each.version for each in registry(root).list("ride-duration")] == [1]
    assert Table(str(root / "lake" / "predictions")).version() == version


def test_a_new_day_trains_again_and_only_a_better_model_becomes_champion(spark, first):
    root, _, _ = first
    code, record = launch(root, "retrain", "--set.events.extra_days=1")
    assert (code, record["status"]) == (0, "done")
    assert record["rows"]["days"] == ["2026-03-07"]
    assert record["publication"]["version"] == 2
    better = record["quality"]["rmse"] < record["quality"]["champion_rmse"]
    assert record["publication"]["alias_moved"] == better
    assert registry(root).aliases("ride-duration") == {"champion": 2 if better else 1}
    scored = Table(str(root / "lake" / "predictions")).rows(["day"])
    assert {str(day) for day in scored["day"].to_pylist()} == {"2026-03-06", "2026-03-07"}

    # A network too small to be better: published, and the champion stays.
    before = registry(root).aliases("ride-duration")
    code, record = launch(
        root, "retrain", "--set.events.extra_days=1", "--set.train.epochs=1", "--set.train.learning_rate=1e-7"
    )
    assert code == 0
    assert record["publication"]["alias_moved"] is False
    assert registry(root).aliases("ride-duration") == before


def test_more_ranks_than_slots_is_refused_and_publishes_nothing(spark, first, capsys):
    root, _, _ = first
    versions = len(registry(root).list("ride-duration"))
    code, record = launch(root, "train", "--set.train.ranks=3", "--set.train.seed=9")
    assert (code, record["status"], record["error"]) == (1, "refused", "PreflightError")
    assert "3" in record["message"]
    assert "2" in record["message"]
    assert len(registry(root).list("ride-duration")) == versions


def test_scoring_without_a_champion_says_what_to_run(spark, first, tmp_path):
    root, _, _ = first
    code, record = launch(root, "score", f"--set.paths.registry={tmp_path}/empty")
    assert code == 1
    assert "jobs/train.py" in record["message"]


def test_a_full_target_leaves_no_half_written_table(spark, tmp_path, capsys):
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        root = tmp_path / "data"
        code, record = launch(root, "retrain", f"--set.paths.lake={place}")
        assert (code, record["status"]) == (1, "refused")
        assert record["error"] == "StorageError"
        assert len(record["message"].splitlines()) == 1
        assert not registry(root).models()
        assert not Table(str(place / "features")).exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)
