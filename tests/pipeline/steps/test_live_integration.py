"""Predictions are compared with labels that arrived, for each type of label, and again only where something changed."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
from torch import nn

from sparkdl.documents.typed import encode
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.metrics.sums import quantile_losses
from sparkdl.models.bundle import save_bundle
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.judging.baseline import summary_of
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Scored, Trained
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import live
from sparkdl.pipeline.work.labels import FittedLabel
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
A, B = "2026-03-01", "2026-03-02"
PRICE = FittedLabel(name="price", type="regression", mean=1.0)
SOLD = FittedLabel(name="sold", type="binary", classes=("no", "yes"))
KIND = FittedLabel(name="kind", type="multiclass", classes=("a", "b", "c"))


class Shop:
    """A pipeline with a published version, and predictions that it is said to have made."""

    def __init__(self, root, spark, label, *others, summaries=None):
        self.root, self.spark, self.label = root, spark, label
        labels = [vars(one) for one in (label, *others)]
        self.types = ", ".join(f"{one['name']}: {one['type']}" for one in labels)
        save_bundle(nn.Linear(1, 1), f"{root}/bundle", preprocessing={"labels": labels})
        run = self.new_run()
        trained = Trained(
            bundle="", content_hash="", history=(), metrics={}, epochs=1, best_epoch=None, steps=1, rows=1, ranks=1,
            backend="none", windows={A: "old rows"}, labels=summaries or {},
        )  # fmt: skip
        key = content_key("train", {"by": "hand"})
        run.receipts.keep("train", key, trained)
        self.version = run.registry.publish("shop", f"{root}/bundle", publication=key)

    def new_run(self, *overrides):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.root}/rows, key: [shop, "order.id"], time: at}}
        features: {{x: number}}
        label: {{{self.types}}}
        weight: trust
        publish: {{label: {self.label.name}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=NOW))

    def predict(self, frame, artifact=None):
        run = self.new_run()
        target = Table(str(run.project.spec.score.target))
        target.write(self.spark.createDataFrame(frame.assign(model_version=1)), "overwrite", partition_by=["_window"])
        for name, rows in frame.groupby("_window").size().items():
            self.say_scored(name, f"made {name}", int(rows), artifact)

    def say_scored(self, window, key, rows=20, artifact=None, version=1):
        """Leave the receipt of a window's predictions."""
        run = self.new_run()
        target, artifact = Table(str(run.project.spec.score.target)).uri, artifact or self.version.artifact
        scored = Scored(
            window=window, target=target, content="rows without labels", rows=rows, version=version, artifact=artifact
        )
        receipt = Receipt(step="score", partition=f"{window} in {target}", key=key, facts=encode(scored).decode())
        run.receipts.write([receipt])

    def look(self, clean, content, *overrides):
        """What a run makes of clean rows, and of windows with these hashes of their rows."""
        run, step = self.new_run(*overrides), live.LiveStep()
        run.receipts.write([ingested(name, rows) for name, rows in content.items()])
        rows = None if clean is None else self.spark.createDataFrame(clean)
        run.clean = lambda spark: rows
        if stale := stale_of(step, run):
            step.make(run, self.spark, stale)
        assert not stale_of(step, run)
        step.tell(run)
        return run.record.live


def ingested(window, rows):
    """The receipt of a window of clean rows with this hash."""
    counts = {"read": 20, "kept": 20, "quarantined": 0, "duplicates": 0}
    books = WindowReceipt(window=window, fingerprint="", rules="", content=rows, **counts)
    return Receipt(step="ingest", partition=window, key=rows, facts=encode(books).decode())


def keyed(rows=40):
    return pd.DataFrame({"_window": np.repeat([A, B], rows // 2), "shop": "s", "order.id": np.arange(rows)})


def truth_of(label, random, rows=40):
    if label is PRICE:
        return random.normal(size=rows), random.normal(size=rows)
    if label is SOLD:
        return np.array(["no", "yes"])[random.integers(0, 2, rows)], random.uniform(size=rows)
    shares = random.dirichlet([1, 1, 1], rows)
    return np.array(["a", "b", "c"])[random.integers(0, 3, rows)], list(shares)


def test_quantiles_are_compared_by_what_they_lose(spark, tmp_path):
    label = FittedLabel(name="price", type="regression", levels=(0.1, 0.5, 0.9))
    random, shop = np.random.default_rng(0), Shop(tmp_path, spark, label)
    actual, quantiles = random.normal(size=40), np.sort(random.normal(size=(40, 3)), axis=1)
    columns = dict(zip(("q10", "q50", "q90"), quantiles.T, strict=True))
    shop.predict(keyed().assign(prediction=quantiles[:, 1], **columns))
    clean = keyed().assign(trust=1.0, x=0.0, price=actual)
    asked = ("label.price={type: quantiles}", "publish.metric=pinball")
    found = shop.look(clean, {A: "rows of a", B: "rows of b"}, *asked)
    losses = quantile_losses(actual.astype(np.float32), quantiles, label.levels).reshape(2, 20).mean(axis=1)
    assert [window.measured.values["pinball"] for window in found.windows] == pytest.approx(losses)


@pytest.mark.parametrize("label", [PRICE, SOLD, KIND], ids=lambda one: one.type)
def test_every_type_of_label_is_compared_by_key_and_weight(spark, tmp_path, label):
    random, shop = np.random.default_rng(0), Shop(tmp_path, spark, label)
    actual, output = truth_of(label, random)
    column = {"regression": "prediction", "binary": "probability", "multiclass": "probabilities"}[label.type]
    shop.predict(keyed().assign(**{column: output}))
    clean = (
        keyed().assign(trust=random.uniform(0.5, 2, 40), x=0.0, **{label.name: actual}).sample(frac=1, random_state=1)
    )
    found = shop.look(clean, {A: "rows of a", B: "rows of b"})
    assert [(one.window, one.version, one.waiting, one.unknown) for one in found.windows] == [
        (A, 1, 0, 0),
        (B, 1, 0, 0),
    ]
    assert [one.trained_on for one in found.windows] == [True, False]
    of_all_rows = shop.look(clean, {A: "a, again", B: "b, again"}, "split={by: hash}", "score.window=all")
    assert [one.trained_on for one in of_all_rows.windows] == [True, False]
    codes = actual.astype(np.float32) if label is PRICE else [label.classes.index(value) for value in actual]
    weights = clean.sort_index()["trust"].to_numpy()
    for place, one in enumerate(found.windows):
        here = slice(20 * place, 20 * place + 20)
        expected = measure(Rows.of(label.type, codes[here], output[here], weights=weights[here]))
        assert one.measured.values == pytest.approx(expected.values)


def test_only_what_has_changed_is_compared_again_and_older_versions_stay(spark, tmp_path):
    shop = Shop(tmp_path, spark, KIND)
    shop.predict(keyed().assign(probabilities=[[0.2, 0.3, 0.5]] * 40))
    clean = keyed().assign(trust=1.0, kind=["b"] * 20 + [None] * 15 + ["z"] * 2 + ["c"] * 3)
    first = shop.look(clean, {A: "one", B: "two"})
    assert [(one.waiting, one.unknown, one.measured.rows) for one in first.windows] == [(0, 0, 20), (15, 2, 3)]
    assert first.windows[1].measured.values["accuracy"] == 1
    assert shop.look(None, {A: "one", B: "two"}) == first  # no rows: nothing is read

    later = clean.assign(kind=clean["kind"].fillna("a"))
    second = shop.look(later, {A: "one", B: "two, with labels"})
    assert second.windows[0] == first.windows[0]
    assert (second.windows[1].waiting, second.windows[1].measured.rows) == (0, 18)

    shop.predict(keyed().assign(probabilities=[[0.2, 0.3, 0.5]] * 40), artifact="of another model")
    shop.say_scored(B, "made anew", artifact="of another model")
    strange = shop.look(later, {A: "one", B: "two, with labels"})
    assert strange.reason == "the predictions of version 1 cannot be compared: another model than shop has made them"
    assert strange.windows == second.windows


def test_predicted_rows_whose_key_no_clean_row_has_are_counted(spark, tmp_path):
    shop = Shop(tmp_path, spark, PRICE)
    rows = keyed().assign(shop=[None] * 3 + ["s"] * 37)
    shop.predict(rows.assign(prediction=1.0))
    prices = pd.Series([None] * 5 + [3.0] * 35, dtype=object)
    clean = rows.assign(trust=1.0, price=prices).drop(index=[18, 19])
    error_of_a, error_of_b = shop.look(clean, {A: "one", B: "two"}).windows
    assert (error_of_a.unmatched, error_of_a.waiting, error_of_a.measured.rows) == (5, 2, 13)
    assert (error_of_b.unmatched, error_of_b.measured.rows) == (0, 20)
    assert error_of_a.measured.values["rmse"] == 2.0


def test_predictions_that_were_replaced_or_removed_wait_for_no_label(spark, tmp_path):
    shop = Shop(tmp_path, spark, PRICE)
    shop.predict(keyed().assign(prediction=1.0))
    clean = keyed().assign(trust=1.0, price=pd.Series([None] * 20 + [3.0] * 5 + [None] * 15, dtype=object))
    first = shop.look(clean, {A: "one", B: "two"})
    assert [(one.window, one.version, one.waiting) for one in first.windows] == [(A, 1, 20), (B, 1, 15)]

    run = shop.new_run()
    again = run.registry.publish("shop", f"{tmp_path}/bundle")
    table = Table(str(run.project.spec.score.target))
    predictions = keyed().assign(prediction=2.0, model_version=again.version)
    table.write(spark.createDataFrame(predictions), "overwrite", partition_by=["_window"])
    for window in (A, B):
        shop.say_scored(window, f"{window} by another", artifact=again.artifact, version=again.version)
    second = shop.look(clean, {A: "one", B: "two"})
    waiting = [(one.window, one.version, one.waiting) for one in second.windows]
    assert waiting == [(A, 2, 20), (B, 1, 0), (B, 2, 15)]  # what was measured of the first version stays
    assert [one.measured.values["rmse"] for one in second.windows[1:]] == [2.0, 1.0]

    gone = shop.new_run()
    counts = {"read": 0, "kept": 0, "quarantined": 0, "duplicates": 0}
    books = WindowReceipt(window=A, fingerprint="", rules="", content="", **counts)
    gone.receipts.write([Receipt(step="ingest", partition=A, key="emptied", facts=encode(books).decode())])
    third = shop.look(clean, {B: "two"})
    assert [(one.window, one.version, one.waiting) for one in third.windows] == [(B, 1, 0), (B, 2, 15)]


def test_one_label_of_several_is_compared_and_a_column_that_is_gone_is_one_sentence(spark, tmp_path):
    shop = Shop(tmp_path, spark, PRICE, SOLD)
    shop.predict(keyed().assign(price_prediction=1.0, sold_probability=0.5, sold_prediction="no"))
    clean = keyed().assign(trust=1.0, price=3.0, sold="no")
    found = shop.look(clean, {A: "one", B: "two"})
    assert (found.label, found.metric) == ("price", "rmse")
    assert [one.measured.values["rmse"] for one in found.windows] == [2.0, 2.0]
    gone = shop.look(clean.drop(columns="price"), {A: "other", B: "two"})
    assert "the rows have no label 'price'" in gone.reason


def test_another_metric_is_compared_with_its_own_guess_also_where_a_window_is_not_compared_again(
    spark, tmp_path, monkeypatch
):
    summary = summary_of("regression", np.array([0.0, 4.0]), np.ones(2), [])
    shop = Shop(tmp_path, spark, PRICE, summaries={"price": summary})
    shop.predict(keyed().assign(prediction=1.0))
    clean = keyed().assign(trust=1.0, price=[3.0] * 20 + [2.0, 6.0] * 10)
    found = shop.look(clean, {A: "one", B: "two"})
    assert [one.baseline for one in found.windows] == pytest.approx([1.0, 8**0.5])
    monkeypatch.setattr(live, "_MOST_WINDOWS", 1)
    other = shop.look(clean, {A: "one", B: "two"}, "publish.metric=mae")
    assert (other.metric, [one.baseline for one in other.windows]) == ("mae", [None, 2.0])


def test_labels_that_come_hundreds_of_windows_later_are_joined(spark, tmp_path, monkeypatch):
    shop = Shop(tmp_path, spark, PRICE)
    shop.predict(keyed().assign(prediction=1.0))
    clean = keyed().assign(trust=1.0, price=pd.Series([None] * 20 + [3.0] * 20, dtype=object))
    content = {f"2026-03-03T{n:03d}": "rows that nobody predicted" for n in range(120)}
    content |= dict.fromkeys((A, B), "rows without labels")
    monkeypatch.setattr("sparkdl.pipeline.steps.live._MOST_KEPT", 1)
    found = shop.look(clean, content)
    assert [(one.window, one.waiting, one.measured is None) for one in found.windows] == [(A, 20, True), (B, 0, False)]

    monkeypatch.setattr("sparkdl.pipeline.steps.live._MOST_KEPT", 2)
    monkeypatch.setattr("sparkdl.pipeline.steps.live._MOST_WINDOWS", 1)
    late = shop.look(clean.assign(price=3.0), content | {A: "rows with labels"})
    assert [(one.waiting, one.measured.values["rmse"]) for one in late.windows] == [(0, 2.0), (0, 2.0)]

    looked_at, key_of = [], live.content_key

    def spied(step, inputs):
        if isinstance(inputs["rows"], str):  # else the key is of all windows together
            looked_at.append(inputs["rows"])
        return key_of(step, inputs)

    monkeypatch.setattr(live, "content_key", spied)
    monkeypatch.setattr(live, "_MOST_KEPT", 1)
    assert shop.look(None, content | {A: "rows with labels"}).windows == late.windows
    assert looked_at == []
    shop.say_scored(B, "made anew")
    again = shop.look(clean.assign(price=4.0), content | {A: "rows with labels"})
    assert looked_at == ["rows without labels"]  # of B; not each window whose labels ever came, in each run
    assert [(one.window, one.measured.values["rmse"]) for one in again.windows] == [(B, 3.0)]
