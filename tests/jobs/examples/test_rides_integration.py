"""The rides: what the maker says it made is what the pipeline finds, and the model comes close to the noise floor."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

HERE = Path(__file__).parents[3] / "jobs" / "examples" / "rides"
SMALL = ("split={by: time, train: 3 days, validate: 1 day, score: 1 day}", "train.batch_size=64", "train.verbose=0")


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import ride_maker

    yield ride_maker
    for name in ("ride_maker", "ride_city"):
        del sys.modules[name]


@pytest.fixture
def rides(tmp_path, monkeypatch):
    """From overrides to the pipeline, over data of its own."""
    monkeypatch.setenv("RIDES", str(tmp_path / "raw"))

    def load(*overrides):
        return Pipeline.load(HERE / "rides.yaml", [f"root={tmp_path}", *overrides])

    return load


def test_a_day_follows_from_its_date_alone_and_one_that_is_there_is_left_as_it_is(maker, tmp_path):
    assert maker.make_rides(tmp_path / "a", 3, 300) == ["2026-03-02", "2026-03-03", "2026-03-04"]
    second = tmp_path / "a/events/day=2026-03-03/rides.parquet"
    written = second.stat().st_mtime_ns
    assert maker.make_rides(tmp_path / "a") == []
    assert maker.make_rides(tmp_path / "a", 4) == ["2026-03-05"]
    assert second.stat().st_mtime_ns == written
    maker.make_rides(tmp_path / "b", 4, 300)
    for file in ("events/day=2026-03-05/rides.parquet", "zones.parquet", "weather.parquet"):
        assert pq.read_table(tmp_path / "a" / file).equals(pq.read_table(tmp_path / "b" / file))
    assert maker.truth_of(tmp_path / "a") == maker.truth_of(tmp_path / "b")
    assert pq.read_table(second).num_rows == 300


def test_many_rows_are_written_chunk_by_chunk(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "CHUNK_ROWS", 400)
    maker.make_rides(tmp_path, 1, 1000)
    table = pq.read_table(tmp_path / "events/day=2026-03-02/rides.parquet")
    known = maker.truth_of(tmp_path)["2026-03-02"]
    assert table.num_rows == known["rows"] == 1000
    assert (
        len(set(table["event_id"].drop_null().to_pylist())) == 1000 - known["duplicates"] - known["dirt"]["has an id"]
    )


def test_the_folder_stays_small():
    assert sum(len(path.read_text().splitlines()) for path in HERE.glob("*.py")) <= 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_finds_what_was_made_then_nothing_and_then_the_new_day(spark, maker, rides, tmp_path):
    maker.make_rides(tmp_path / "raw", 5, 2000)
    pipeline = rides(*SMALL)
    first = pipeline.run(spark)
    assert first.outcome == "promoted", first.message
    truth = maker.truth_of(tmp_path / "raw")
    for books in pipeline.status().done:
        known = truth[books.window]
        assert dict(books.outcomes) == {reason: rows for reason, rows in known["dirt"].items() if rows}
        assert (books.read, books.kept, books.duplicates) == (known["rows"], known["valid"], known["duplicates"])
    rmse = first.evaluated.decision.challenger.values["rmse"]
    floor = maker.best_rmse(tmp_path / "raw", first.windows["validate"])
    assert floor < rmse < 1.5 * floor  # of 6,000 rows; the whole data come far closer, see below
    assert {"hour", "pickup_zone"} <= set(first.evaluated.slices)

    assert pipeline.run().outcome == "nothing new"  # and opens no session: the one of the tests has another name
    maker.make_rides(tmp_path / "raw", 6)
    second = pipeline.run(spark)
    assert second.windows["ingested"] == second.windows["score"] == ["2026-03-07"]
    assert second.model["version"] == 2
    predicted = Table(f"{tmp_path}/rides/tables/predictions").rows()
    assert predicted.num_rows == sum(truth_day["valid"] for day, truth_day in maker.truth_of(tmp_path / "raw").items()
                                     if day >= "2026-03-06")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_comes_within_three_percent_of_the_noise_floor(spark, maker, rides, tmp_path):
    maker.make_rides(tmp_path / "raw")
    record = rides("train.verbose=0").run(spark)
    floor = maker.best_rmse(tmp_path / "raw", record.windows["validate"])
    assert record.evaluated.decision.challenger.values["rmse"] < 1.03 * floor
