"""Thirty days of one pipeline: what goes wrong in a month, and what stands in registry, predictions and quarantine.

Every day a file of rows arrives and the pipeline runs. Days 1 to 3 are too few to learn from. On day 10 a column comes
in another unit, on day 17 lines are garbled, on day 21 the run is killed, on day 25 two schedulers start it at once,
day 26 arrives a day late, on day 28 a person takes the new model back, and on day 29 a row of day 20 turns up. After
each day registry, predictions and quarantine are compared with what they should be; in the end, nothing was done twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from sparkdl.errors import DataError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

ROWS = 60
FILE = """
name: shop
root: {root}
source:
  kind: csv
  path: {root}/delivered
  schema: id string, x double, city string, y double
  key: id
  partition: day
expect: {{city_known: "city IN ('Bonn', 'Trier', 'Ulm')"}}
features: {{x: number, city: category}}
label: {{y: regression}}
split: {{by: time, train: 3 days, validate: 1 day, score: 2 days}}
model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
train: {{epochs: 1, batch_size: 32, learning_rate: 0.01, num_proc: 1, verbose: 0}}
publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
drift: {{action: fail}}
spark: {{master: "local[2]", conf: {{spark.driver.memory: 1g}}}}
"""


def window(day):
    return f"2026-03-{day:02d}"


class Shop:
    """The pipeline, what is delivered to it, and what it should have come to."""

    def __init__(self, root, spark):
        self.root, self.spark = root, spark
        self.file = root / "shop.yaml"
        self.file.write_text(FILE.format(root=root))
        self.rows: dict[str, int] = {}
        self.quarantined: dict[str, int] = {}
        self.predicted: dict[str, tuple[int, int]] = {}  # version and rows
        self.versions = self.champion = 0
        self.records = []

    def deliver(self, day, *, unit=1.0, garbled=0, unknown=0, first=0, rows=ROWS, name="rows"):
        """Write the file of a day; some lines are garbled, and some name a city that there is not."""
        random = np.random.default_rng(1000 * day + first)
        x, cities = random.normal(10, 2, rows), random.choice(["Bonn", "Trier", "Ulm"], rows)
        lines = ["id,x,city,y"]
        for n, (value, city) in enumerate(zip(x, cities, strict=True)):
            if n < garbled:
                lines.append(f"{day}-{n},\x00\x7f{value:.3f};;;")
            else:
                where = "Atlantis" if n < garbled + unknown else city
                lines.append(f"{day}-{first + n},{unit * value:.6f},{where},{2 * value + len(city):.6f}")
        folder = self.root / "delivered" / f"day={window(day)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        name = window(day)
        self.rows[name] = (self.rows.get(name, 0) if first else 0) + rows - garbled - unknown
        if garbled or unknown:
            self.quarantined[name] = garbled + unknown

    def run(self, day, *overrides, spark=None):
        """One run of the day; its record."""
        now = datetime(2026, 3, day, 12, len(self.records) % 60, tzinfo=UTC)
        pipeline = Pipeline.load(self.file, overrides)
        self.records.append(pipeline.run(spark or self.spark, now=now))
        return self.records[-1]

    def start(self):
        """A run in a process of its own, as a scheduler starts it."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(
            [sys.executable, "-m", "sparkdl.cli", "run", str(self.file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def promoted(self, *days):
        """A new model is the champion, and has predicted the two newest days."""
        self.versions += 1
        self.champion = self.versions
        self.scored(*days)

    def scored(self, *days):
        """The champion has predicted these days."""
        self.predicted |= {window(day): (self.champion, self.rows[window(day)]) for day in days}

    @property
    def registry(self):
        return ModelRegistry(f"{self.root}/shop/registry")

    def trainings(self):
        receipts = Table(f"{self.root}/shop/tables/receipts").rows().to_pylist()
        return {receipt["partition"] for receipt in receipts if receipt["step"] == "train"}

    def check(self):
        """Compare what there is with what there should be."""
        registry = self.registry
        assert len(registry.list("shop") if "shop" in registry.models() else []) == self.versions
        if self.versions:
            assert registry.get("shop", "champion").version == self.champion
            made = Table(f"{self.root}/shop/tables/predictions").rows().to_pandas()
            assert made["id"].is_unique
            found = made.groupby(["_window", "model_version"]).size()
            assert {name: (version, rows) for (name, version), rows in found.items()} == self.predicted
            assert len(found) == len(self.predicted)  # no window of two versions
        refused = Table(f"{self.root}/shop/tables/quarantine").rows().to_pandas()
        assert dict(refused["_window"].value_counts()) == self.quarantined
        clean = Table(f"{self.root}/shop/tables/clean").rows().to_pandas()
        assert dict(clean["_window"].value_counts()) == {
            name: rows for name, rows in self.rows.items() if name in set(clean["_window"])
        }
        assert clean["id"].is_unique


def an_ordinary_day(shop, day):
    shop.deliver(day)
    done = shop.run(day)
    assert (done.outcome, done.windows["ingested"]) == ("promoted", [window(day)]), done.message
    shop.promoted(day - 1, day)
    assert done.drift.action == "none", done.drift.reason


def days_too_few_to_learn_from(shop):
    for day in (1, 2, 3):
        shop.deliver(day)
        with pytest.raises(DataError, match="has no window with rows"):
            shop.run(day)
        shop.check()


def a_day_in_another_unit(shop, day):
    """The run ends before it trains or scores; once the day is delivered anew it is done as any other."""
    shop.deliver(day, unit=0.3048)
    with pytest.raises(DataError, match=rf"window {window(day)}: x: psi of .* is above 0.25 .*nothing was trained"):
        shop.run(day)
    shop.check()
    shop.deliver(day)
    done = shop.run(day)
    assert (done.outcome, done.windows["ingested"], done.drift.action) == ("promoted", [window(day)], "none")
    shop.promoted(day - 1, day)


def a_garbled_day(shop, day):
    shop.deliver(day, garbled=7, unknown=4)
    done = shop.run(day)
    assert done.outcome == "promoted", done.message
    assert {name: done.rows[name] for name in ("read", "kept", "quarantined")} == {
        "read": ROWS, "kept": ROWS - 11, "quarantined": 11,
    }  # fmt: skip
    shop.promoted(day - 1, day)
    refused = Table(f"{shop.root}/shop/tables/quarantine").rows().to_pandas()
    assert dict(refused["reason"].value_counts()) == {"malformed in its file": 7, "city_known": 4}


def a_kill(shop, day):
    """Once the model is trained the process is gone; the next run evaluates and publishes that very model."""
    shop.deliver(day)
    before, process = shop.trainings(), shop.start()
    try:
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until and shop.trainings() == before:
            time.sleep(0.05)
        assert process.poll() is None, process.stdout.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(shop.trainings() - before) == 1
    shop.check()
    done = shop.run(day)
    assert (done.outcome, done.windows["ingested"]) == ("promoted", []), done.message
    kept = {note.name: note.kept for note in done.steps}
    assert [kept[name] for name in ("features", "shards", "train")] == [True] * 3
    assert [kept[name] for name in ("evaluate", "publish", "score")] == [False] * 3
    shop.promoted(day - 1, day)


def two_schedulers(shop, day):
    """One does the day, and the other leaves with who is at work."""
    shop.deliver(day)
    processes = [shop.start(), shop.start()]
    said = [process.communicate(timeout=280)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 30], said
    assert "is at work in" in said[codes.index(30)] or "was first in" in said[codes.index(30)]
    shop.promoted(day - 1, day)


def a_day_that_comes_late(shop, day):
    """Without anything new a run starts nothing; the next day both are taken in and predicted."""
    calm = Pipeline.load(shop.file).run(None, now=datetime(2026, 3, day, 12, tzinfo=UTC))
    assert (calm.outcome, calm.exit_code) == ("nothing new", 10)
    shop.check()
    shop.deliver(day)
    shop.deliver(day + 1)
    done = shop.run(day + 1)
    assert (done.outcome, done.windows["ingested"]) == ("promoted", [window(day), window(day + 1)])
    assert done.predictions == {window(day): ROWS, window(day + 1): ROWS}
    shop.promoted(day, day + 1)


def a_rollback(shop, day):
    """The older model predicts again what the newer one had, and no training makes the newer one come back."""
    an_ordinary_day(shop, day)
    shop.check()
    shop.registry.rollback("shop", "champion", reason="a person thinks better of it")
    shop.champion -= 1
    done = shop.run(day)
    assert (done.outcome, done.predictions) == ("scored", {window(day - 1): ROWS, window(day): ROWS})
    shop.scored(day - 1, day)
    shop.check()
    assert shop.run(day).outcome == "nothing new"


def a_row_of_long_ago(shop, day, late):
    """Its own window is done again, and nothing else beside what the new day asks for."""
    shop.deliver(late, first=ROWS, rows=1, name="late")
    shop.deliver(day)
    done = shop.run(day)
    assert (done.outcome, done.windows["ingested"]) == ("promoted", [window(late), window(day)])
    assert done.predictions == {window(late): ROWS + 1, window(day - 1): ROWS, window(day): ROWS}
    shop.promoted(late, day - 1, day)


def nothing_was_done_twice(shop):
    files = Path(f"{shop.root}/shop/runs").glob("*/record.json")
    records = [json.loads(file.read_text()) for file in files]
    done = Counter(
        (note["name"], note["key"])
        for record in records
        for note in record["steps"]
        if not note["kept"] and note["name"] in ("features", "shards", "train", "evaluate", "publish")
    )
    assert {step: times for step, times in done.items() if times > 1} == {}
    assert len({key for name, key in done if name == "publish"}) == shop.versions
    drifts = [record["drift"] for record in records if record["drift"]]
    compared = Counter((drift["against"], name) for drift in drifts for name in drift["looked_at"])
    assert {name for (_, name), times in compared.items() if times > 1} <= {window(10), window(20)}
    ingested = Counter(name for record in records for name in record["windows"].get("ingested", ()))
    assert {name: times for name, times in ingested.items() if times > 1} == {window(10): 2, window(20): 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_days(spark, tmp_path):
    shop = Shop(tmp_path, spark)
    days_too_few_to_learn_from(shop)
    for day in range(4, 31):
        if day == 10:
            a_day_in_another_unit(shop, day)
        elif day == 17:
            a_garbled_day(shop, day)
        elif day == 21:
            a_kill(shop, day)
        elif day == 25:
            two_schedulers(shop, day)
        elif day == 26:
            a_day_that_comes_late(shop, day)
        elif day == 28:
            a_rollback(shop, day)
        elif day == 29:
            a_row_of_long_ago(shop, day, late=20)
        elif day != 27:
            an_ordinary_day(shop, day)
        shop.check()
    assert shop.run(30).outcome == "nothing new"
    nothing_was_done_twice(shop)
    errors = shop.run(30, "report.slices=[city]").live.windows
    assert {one.window for one in errors} == set(shop.predicted)
    for one in errors:
        version, rows = shop.predicted[one.window]
        before = one.window == window(20) and one.version != version  # when its last row had not come yet
        assert one.measured.rows == rows - before
    assert not any(one.waiting or one.trained_on for one in errors)
