"""Sources that change, vanish or have a gap, and places that are read-only: one sentence, and nothing is half-done."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkdl.errors import DataError, SparkdlError, StorageError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import ingest
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


class Shop:
    """A pipeline over days of orders."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.root = folder / "rows", folder / "root"
        self.rows.mkdir()

    def deliver(self, *days: int, **more: str) -> None:
        for day in days:
            x = np.random.default_rng(day).normal(size=60)
            frame = pd.DataFrame({"id": np.arange(60) + 100 * day, "x": x, "y": 2 * x + 1})
            frame["at"] = pd.Timestamp(2026, 3, day, 9)
            frame = frame.assign(**more)
            frame.to_parquet(self.rows / f"{day:02d}.parquet", coerce_timestamps="us")

    def new_run(self, *overrides: str) -> Run:
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.rows}, key: id, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, validate: 1 day, score: 1 day}}
        train: {{epochs: 1, batch_size: 32, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never}}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=NOW))

    def left(self):
        """What a run that was refused must not have changed."""
        registry, tables = ModelRegistry(f"{self.root}/shop/registry"), f"{self.root}/shop/tables"
        kept = {name: Table(f"{tables}/{name}") for name in ("clean", "quarantine", "receipts", "predictions")}
        return (
            registry.aliases("shop") if "shop" in registry.models() else None,
            {name: table.version() for name, table in kept.items() if table.exists()},
        )


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def refused(run, spark, kind=SparkdlError):
    """The one sentence of a run that ends with exit code 1."""
    with pytest.raises(kind) as caught:
        execute(run, spark)
    assert run.record.exit_code == 1, run.record
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_file_that_vanishes_while_the_source_is_read_is_named(spark, shop):
    shop.deliver(1, 2, 3)
    run = shop.new_run()
    assert run.snapshot.files
    (shop.rows / "02.parquet").unlink()
    assert "02.parquet was there when the run began and is gone" in refused(run, spark, DataError)
    assert shop.left() == (None, {})


def test_a_file_that_is_no_parquet_is_named(spark, shop):
    shop.deliver(1, 2, 3)
    (shop.rows / "04.parquet").write_bytes(b"PAR1 but nothing else of it PAR1" * 9)
    assert "04.parquet cannot be read: " in refused(shop.new_run("source.options={mergeSchema: false}"), spark)
    assert shop.left() == (None, {})


@pytest.mark.parametrize(
    "asked",
    [
        'transform={sql: "SELECT *, CAST(note AS DOUBLE) AS noted FROM source"}',
        'expect={note: "CAST(note AS DOUBLE) > 0"}',
    ],
)
def test_a_value_that_sql_refuses_is_told_with_the_expression(spark, shop, asked):
    shop.deliver(1, 2, note="4")
    shop.deliver(3, note="4 b")
    assert refused(shop.new_run(asked), spark, DataError) == (
        'CAST(note AS DOUBLE) fails for a row: The value \'4 b\' of the type "STRING" cannot be cast to "DOUBLE" '
        "because it is malformed; correct the source, or take try_cast, whose NULL an expectation can quarantine"
    )
    champion, tables = shop.left()
    assert champion is None
    assert set(tables) <= {"receipts"}


def test_a_source_that_changes_while_it_is_read_is_refused(spark, shop, monkeypatch):
    shop.deliver(1, 2, 3)
    validate_rows = ingest.validate_rows

    def delivered_again_after_the_look(*given):
        frame = pd.read_parquet(shop.rows / "02.parquet")
        pd.concat([frame, frame]).to_parquet(shop.rows / "02.parquet", coerce_timestamps="us")
        return validate_rows(*given)

    monkeypatch.setattr(ingest, "validate_rows", delivered_again_after_the_look)
    said = refused(shop.new_run(), spark, DataError)
    assert "the source changed" in said or "02.parquet cannot be read" in said
    assert shop.left() == (None, {})


@pytest.mark.slow
def test_a_table_that_vanished_leaves_champion_and_predictions_as_they_were(spark, shop):
    frame = pd.DataFrame({"id": range(200), "x": np.random.default_rng(0).normal(size=200)})
    table = Table(f"{shop.rows}/table")
    table.append(pa.Table.from_pandas(frame.assign(y=2 * frame.x + 1), preserve_index=False).replace_schema_metadata())
    own = [f"source={{kind: delta, table: {shop.rows}/table, key: id}}", "split={by: hash, validate: 0.2}"]
    assert execute(shop.new_run(*own, "split.train=0.6"), spark).outcome == "promoted"
    before = shop.left()
    for wrong in ("expect.none=id < 0", "label={y: multiclass}"):
        refused(shop.new_run(*own, "split.train=0.6", wrong), spark)
        assert shop.left()[0] == before[0]
        assert shop.left()[1]["predictions"] == before[1]["predictions"]
    before = shop.left()
    shutil.rmtree(f"{shop.rows}/table")
    said = refused(shop.new_run(*own, "split.train=0.6"), spark, StorageError)
    assert f"{shop.rows}/table" in said
    assert shop.left() == before
    assert before[0] == {"champion": 1}


@pytest.mark.parametrize(
    ("days", "split", "said"),
    [
        ((1, 2, 5), "split.validate=2 days", "split.validate has no window with rows"),
        ((1, 2), "split.validate=1 day", "split.train has no window with rows"),
        ((1, 2, 4, 5), "split.train=1 day", "split.train has no window with rows"),
    ],
)
def test_a_part_without_rows_is_refused_and_no_model_is_made(spark, shop, days, split, said):
    shop.deliver(*days)
    assert said in refused(shop.new_run(split), spark, DataError)
    aliases, tables = shop.left()
    assert aliases is None
    assert "predictions" not in tables


def test_every_place_that_is_read_only_is_named_before_a_row_is_read(spark, shop, tmp_path):
    shop.deliver(1, 2, 3)
    place = tmp_path / "fixed"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=256k", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        for key in ("places.tables", "places.shards", "places.registry", "score.target"):
            said = refused(shop.new_run(f"{key}={place}/{key}"), spark, StorageError)
            assert said.startswith(f"{key}: cannot write")
            assert "ead-only" in said
            assert shop.left() == (None, {})
        run = shop.new_run(f"root={place}/root")
        with pytest.raises(StorageError, match=r"places\.runs: cannot write.*places\.tables.*places\.registry"):
            execute(run, spark)
        assert run.record.exit_code == 1
    finally:
        subprocess.run(["umount", str(place)], check=True)
