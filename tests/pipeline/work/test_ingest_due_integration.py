"""Windows that a transform thins out, windows that the source has lost, columns that come and go."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from sparkdl.errors import DataError
from sparkdl.features.spec import Number
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.rows.ledger import Tables
from sparkdl.pipeline.spec import Label, ParquetSource, PipelineSpec, Transform
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.work.ingest import ingest

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


class Orders:
    """Parquet files of orders by day, in partition folders or with a time, and their pipeline."""

    def __init__(self, root, by):
        self.root, self.by, self.tables = root, by, Tables(folder=str(root / "tables"))

    def day(self, day, rows=10, **more):
        """Deliver a day of March 2026; more columns have one value."""
        folder = self.root / "orders" / (f"day=2026-03-{day:02d}" if self.by == "partition" else f"{day:02d}")
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame({"order": range(rows), "amount": 1.5, "y": 1.0, **more})
        if self.by == "time":
            frame["day"] = pd.Timestamp(2026, 3, day)
        frame.to_parquet(folder / "rows.parquet", coerce_timestamps="us")
        return folder

    def ingest(self, spark, again=None, transform=None, **source):
        when = {self.by: "day"}
        spec = PipelineSpec(
            source=ParquetSource(path=str(self.root / "orders"), **when, **source),
            transform=None if transform is None else Transform(sql=transform),
            features={"amount": Number()}, label={"y": Label(type="regression")},
        )  # fmt: skip
        context = Context(PipelineFile("pipeline.yaml", spec, {}), NOW, again)
        context.tables = self.tables
        return ingest(spark, context)

    @property
    def clean(self):
        """Rows by window, as the table of clean rows has them."""
        return self.tables.table("clean").rows().to_pandas().groupby("_window").size().to_dict()

    @property
    def files(self):
        return sorted(str(path) for path in Path(self.tables.folder).rglob("*") if path.is_file())


@pytest.fixture(params=["partition", "time"])
def orders(tmp_path, request):
    return Orders(tmp_path, request.param)


@pytest.fixture
def by_folder(tmp_path):
    return Orders(tmp_path, "partition")


JOINED = "SELECT o.*, shops.town FROM {source} o JOIN shops_of_test shops ON o.shop = shops.shop"


def test_rows_that_a_join_loses_are_counted_and_a_window_that_it_empties_waits_for_its_other_side(spark, orders):
    orders.day(1, shop="a")
    orders.day(2, shop=["a"] * 7 + ["b"] * 3)
    spark.sql("SELECT 'c' AS shop, 'Trier' AS town").createOrReplaceTempView("shops_of_test")
    with pytest.raises(DataError, match="window 2026-03-01 has 10 rows in the source, and the transform leaves none"):
        orders.ingest(spark, transform=JOINED)
    assert orders.files == []
    spark.sql("SELECT 'a' AS shop, 'Bonn' AS town").createOrReplaceTempView("shops_of_test")
    done = orders.ingest(spark, transform=JOINED).done
    assert [(each.window, each.source_rows, each.read, each.kept) for each in done] == [
        ("2026-03-01", 10, 10, 10), ("2026-03-02", 10, 7, 7)]  # fmt: skip
    assert orders.tables.ledger.windows() == {each.window: each for each in done}
    assert orders.ingest(spark, transform=JOINED).done == ()


def test_rows_are_counted_as_the_source_has_them_whatever_the_transform_reads_of_them(spark, orders):
    orders.day(1, rows=1000)
    [books] = orders.ingest(spark, transform="SELECT * FROM {source} LIMIT 20").done
    assert (books.source_rows, books.read) == (1000, 20)
    [books] = orders.ingest(spark, transform="SELECT o.* FROM {source} o CROSS JOIN range(2)").done
    assert (books.source_rows, books.read) == (1000, 2000)
    [books] = orders.ingest(spark).done
    assert (books.source_rows, books.read) == (1000, 1000)
