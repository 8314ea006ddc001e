"""A pipeline over a table of a real PostgreSQL: windows, late rows, changes while it reads, no password anywhere."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from sparkdl.errors import StorageError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import ingest
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


class Shop:
    """A pipeline over a table of orders."""

    def __init__(self, folder, database):
        self.root, self.database = folder / "root", database
        database.run("CREATE TABLE orders (id bigint PRIMARY KEY, at timestamptz, x float8, y numeric(12,4), n text)")
        database.run("ALTER TABLE orders OWNER TO reader")

    def deliver(self, day, first=0, rows=120):
        self.database.run(
            f"INSERT INTO orders SELECT {day} * 1000 + i, timestamptz '2026-03-{day:02d}Z' + i * interval '1 min', "
            f"sin({day} + i), 2 * sin({day} + i) + 1, NULL FROM generate_series({first}, {first + rows - 1}) i"
        )

    def new_run(self, *overrides, password=None):
        text = f"""
        name: shop
        root: {self.root}
        source:
          kind: jdbc
          url: {self.database.url}
          table: orders
          key: id
          time: at
          options: {{user: reader, password: "${{DB_PASSWORD}}", numPartitions: 2}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, validate: 1 day, score: 1 day}}
        train: {{epochs: 1, batch_size: 32, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never}}}}
        """
        return Run(
            Project(loads(text, overrides, {"DB_PASSWORD": password or self.database.password})), RunRequest(now=NOW)
        )

    def clean(self):
        return Table(f"{self.root}/shop/tables/clean").rows()

    def files(self):
        """Whatever a run left, by its path."""
        return {str(path): path.read_bytes() for path in Path(self.root).rglob("*") if path.is_file()}


@pytest.fixture
def shop(tmp_path, postgres):
    yield Shop(tmp_path, postgres)
    postgres.run("DROP TABLE orders")


@pytest.mark.slow
def test_a_table_of_a_database_is_trained_on_window_by_window(spark, shop, capfd, caplog):
    for day in (1, 2, 3, 4):
        shop.deliver(day)
    first = execute(shop.new_run(), spark)
    assert (first.outcome, first.rows["read"]) == ("promoted", 480)
    assert first.windows["train"] == ["2026-03-01", "2026-03-02"]
    assert first.predictions == {"2026-03-04": 120}
    again = execute(shop.new_run(), spark)
    assert (again.outcome, again.exit_code) == ("nothing new", 10)

    shop.deliver(5)
    shop.deliver(2, first=500, rows=1)
    shop.database.run("UPDATE orders SET x = 7 WHERE id = 3001")
    third = execute(shop.new_run(), spark)
    assert third.windows["ingested"] == ["2026-03-02", "2026-03-03", "2026-03-05"]
    assert third.rows["read"] == 121 + 120 + 120
    rows = shop.clean().to_pylist()
    assert len(rows) == 601
    assert {row["id"]: row["x"] for row in rows}[3001] == 7
    moved = execute(shop.new_run("source.options.fetchsize=7", "source.options.numPartitions=3"), spark)
    assert moved.outcome == "nothing new"

    with pytest.raises(StorageError, match="password authentication failed"):
        execute(shop.new_run(password="secret-wrong"), spark)
    plan = plan_of(shop.new_run())
    printed = "".join(capfd.readouterr()) + caplog.text + repr(plan) + repr(shop.new_run().project.spec)
    assert shop.database.password not in printed
    assert not [path for path, content in shop.files().items() if shop.database.password.encode() in content]
    assert "${DB_PASSWORD}" in Path(f"{shop.root}/shop/runs/{first.run_id}/record.json").read_text()


@pytest.mark.slow
def test_rows_that_change_between_two_readings_are_read_again_the_next_time(spark, shop, monkeypatch, caplog):
    for day in (1, 2, 3):
        shop.deliver(day)
    execute(shop.new_run(), spark)  # a first run reads its rows once
    shop.deliver(4)
    validate_rows = ingest.validate_rows

    def after_more_rows(*given):
        shop.deliver(4, first=600, rows=5)
        shop.database.run("UPDATE orders SET x = 9 WHERE id = 3000")
        return validate_rows(*given)

    monkeypatch.setattr(ingest, "validate_rows", after_more_rows)
    assert execute(shop.new_run(), spark).rows["read"] == 125
    assert "window 2026-03-04 had 120 rows when it was looked at, and 125 rows" in caplog.text
    assert "the next run reads the window once more" in caplog.text
    monkeypatch.undo()
    again = execute(shop.new_run(), spark)
    assert again.windows["ingested"] == ["2026-03-03", "2026-03-04"]
    assert len(shop.clean()) == 485
    assert execute(shop.new_run(), spark).outcome == "nothing new"
