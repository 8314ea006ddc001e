"""Windows are compared with what the champion's bundle says of its training rows, each of them once."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from torch import nn

from sparkdl.documents.typed import encode
from sparkdl.errors import DataError
from sparkdl.features.fitted import fit
from sparkdl.features.statistics import statistics_of
from sparkdl.models.bundle import save_bundle
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps.drift import DriftStep, Looked, decided

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
TRAINED = {"2026-03-01": "one", "2026-03-02": "two"}
CONTENT = TRAINED | {"2026-02-27": "older", "2026-03-03": "three", "2026-03-04": "four", "none": "undated"}


def rows_of(day, rows=300, *, shift=0.0, cities=("Bonn", "Trier"), **columns):
    random = np.random.default_rng(day)
    frame = pd.DataFrame({"x": random.normal(shift, 1, rows), "city": random.choice(cities, rows), **columns})
    return frame.assign(_window=f"2026-03-{day:02d}")


class Shop:
    """A pipeline whose champion was trained, so its bundle says, on 1 and 2 March."""

    def __init__(self, root):
        self.root = root
        training = pd.concat([rows_of(1), rows_of(2)])
        spec = self.new_run().project.spec
        statistics = statistics_of(pa.Table.from_pandas(training), spec.features)
        save_bundle(
            nn.Linear(1, 1), f"{root}/bundle", preprocessing=preprocessing_of(fit(spec.features, statistics), labels=[])
        )
        run = self.new_run()
        trained = Trained(
            bundle=f"{root}/bundle", content_hash="", history=(), metrics={}, epochs=1, best_epoch=None, steps=1,
            rows=1, ranks=1, backend="none", windows=TRAINED,
        )  # fmt: skip
        key = content_key("train", {"by": "hand"})
        run.receipts.keep("train", key, trained)
        run.registry.publish("shop", f"{root}/bundle", publication=key)
        run.registry.set_alias("shop", "champion", 1, expected=None)

    def new_run(self, *overrides):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.root}/rows, key: id, time: at}}
        features: {{x: number, city: category}}
        label: {{y: regression}}
        split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=NOW))

    def look(self, clean, *overrides, content=None):
        """What a run makes of clean rows, and of windows with these hashes of their rows."""
        run, step = self.new_run(*overrides), DriftStep()
        run.receipts.write([ingested(name, rows) for name, rows in (content or CONTENT).items()])
        run.clean = lambda spark: clean
        if stale := stale_of(step, run):
            step.make(run, None, stale)
        looked = [run.receipts.of("drift")[name].read(Looked) for name in stale_of(step, run).keys]
        assert all(each.problem for each in looked), "only what could not be compared is looked at again"
        if decided(run).action == "fail":
            with pytest.raises(DataError, match=r"drift from version 1, .*: nothing was trained or scored"):
                step.tell(run)
        else:
            step.tell(run)
        return run.record.drift


def ingested(window, rows):
    """The receipt of a window of clean rows with this hash."""
    counts = {"read": 300, "kept": 300, "quarantined": 0, "duplicates": 0}
    books = WindowReceipt(window=window, fingerprint="", rules="", content=rows, **counts)
    return Receipt(step="ingest", partition=window, key=rows, facts=encode(books).decode())


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def clean(spark):
    """Two windows that the champion does not know: one like its training rows, and one unlike them."""
    rows = pd.concat([rows_of(3), rows_of(4, shift=1.5, cities=("Bonn", "Ulm")), rows_of(27), rows_of(1)])
    return spark.createDataFrame(rows)


def test_windows_that_the_champion_was_not_trained_on_are_compared_once(shop, clean):
    found = shop.look(clean)
    assert (found.against, found.action, found.looked_at) == (1, "warn", ("2026-03-03", "2026-03-04"))
    assert {name: one.alarmed for name, one in found.windows.items()} == {
        "2026-03-03": [], "2026-03-04": ["x", "city"],
    }  # fmt: skip
    assert found.windows["2026-03-04"].rows == 300
    assert "window 2026-03-04: x: psi of " in found.reason
    assert "is above 0.25 (chance alone: " in found.reason
    assert "city: new_categories went from 0.00% to " in found.reason

    again = shop.look(None)  # no rows: nothing is read
    assert (again.looked_at, again.windows, again.reason) == ((), found.windows, found.reason)
    assert shop.look(None, "drift={action: fail, after: 1, of: 2}").action == "fail"

    changed = shop.look(clean, content=CONTENT | {"2026-03-03": "a late row"})
    assert changed.looked_at == ("2026-03-03",)
    other = shop.look(clean, "drift.ignore=[city]")
    assert other.looked_at == ("2026-03-03", "2026-03-04")
    assert other.windows["2026-03-04"].alarmed == ["x"]


def test_a_champion_that_cannot_be_compared_with_is_one_sentence(shop, clean):
    found = shop.look(clean.drop("x", "city"), "drift.psi=0.3")
    assert (found.action, found.windows, found.looked_at) == ("none", {}, ())
    assert found.reason.startswith("the windows cannot be compared with version 1: its features x, city read columns")
    some = shop.look(clean.drop("x"), "drift.psi=0.4")
    assert list(some.windows["2026-03-03"].features) == ["city"]
    other = shop.look(clean.withColumn("x", clean["city"]), "drift.psi=0.5")
    assert "column 'x' is string, no number" in other.reason


def test_a_champion_that_no_pipeline_has_trained_is_one_sentence(tmp_path, clean):
    shop = Shop(tmp_path)
    save_bundle(nn.Linear(1, 1), f"{tmp_path}/other")
    registry = shop.new_run().registry
    registry.publish("shop", f"{tmp_path}/other")
    registry.set_alias("shop", "champion", 2, expected=1)
    found = shop.look(clean, "drift.action=fail")
    assert (found.against, found.action, found.windows) == (2, "none", {})
    assert found.reason == (
        "the windows cannot be compared with version 2: it carries no statistics of its training rows, so no pipeline "
        "has trained it"
    )
