"""Records of runs, made of what the gate and the steps really say of made-up predictions."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.judging.baseline import baseline_of, summary_of
from sparkdl.pipeline.judging.diagnostics import diagnose
from sparkdl.pipeline.judging.gate import Gate, decide
from sparkdl.pipeline.judging.slices import Slices
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.receipts import StepNote
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Evaluated, Trained

CLASSES = {"regression": [], "binary": ["no", "yes"], "multiclass": ["a", "b", "c", "d"]}
METRICS = {"regression": "rmse", "binary": "auc", "multiclass": "accuracy"}


def predictions(task, quality, rows=400):
    """Rows of one task, with predictions that are the better the higher ``quality`` (0 to 1)."""
    random = np.random.default_rng(3)
    noise = random.normal(size=rows)
    if task == "regression":
        labels = random.gamma(2, 5, rows)
        return Rows.of(task, labels, labels + (1 - quality) * 5 * noise)
    if task == "binary":
        labels = (random.random(rows) < 0.3).astype(float)
        return Rows.of(task, labels, 1 / (1 + np.exp(-(4 * quality * (labels - 0.5) + noise))))
    labels = random.integers(0, 4, rows)
    logits = random.normal(size=(rows, 4)) + 4 * quality * np.eye(4)[labels]
    powers = np.exp(logits)
    return Rows.of(task, labels, powers / powers.sum(axis=1, keepdims=True))


@pytest.fixture
def record_of_task():
    """A function from a task to the record of a run that trained, was judged and scored."""

    def made(task="regression", mine=0.8, theirs=None, slices=("shop",)):
        rows, other = predictions(task, mine), None if theirs is None else predictions(task, theirs)
        summary = summary_of(task, rows.labels, rows.weights, CLASSES[task])
        baseline = baseline_of(summary, rows, CLASSES[task])
        decision = decide(Gate(metric=METRICS[task]), rows, other, baseline=baseline)
        keys = np.array(["north", "south", "<b>east</b>"])[np.arange(len(rows)) % 3]
        shown, seen = Slices.of(rows, keys), diagnose([rows, *([] if other is None else [other])], CLASSES[task])
        evaluated = Evaluated(
            label="target",
            decision=decision,
            slices={name: shown.measure(rows) for name in slices},
            champion_slices={} if other is None else {name: shown.measure(other) for name in slices},
            values=dict.fromkeys(slices, shown.values),
            challenger=seen[0],
            champion=None if other is None else seen[1],
            part="test",
            windows=("2026-03-05", "2026-03-06"),
            of_rows=len(rows),
            baseline_slices={name: {"north": 7.25, "south": 8.25} for name in slices},
        )
        history = tuple({"epoch": n, "loss": 9.0 / (n + 1), "val_loss": 9.5 / (n + 1) + n * 0.2} for n in range(6))
        trained = Trained(
            bundle="b", content_hash="c", history=history, metrics={}, epochs=6, best_epoch=4, kept_epoch=5,
            steps=600, rows=60_000, ranks=2, backend="torch", seconds={"launch": 2.0, "fit": 3.0},
        )  # fmt: skip
        books = [
            WindowReceipt(
                window=f"2026-03-{day:02d}", fingerprint="f", rules="r", read=110, kept=100, quarantined=7,
                duplicates=3, outcomes={"positive": 5, "known": 2},
            )
            for day in range(1, 8)
        ]  # fmt: skip
        record = RunRecord(pipeline="shop", run_id="20260320T120000-abcdef", started="2026-03-20T12:00:00+00:00")
        record.end("promoted" if decision.promote else "not promoted", decision.reason)
        record.seconds, record.books, record.trained, record.evaluated = 12.5, books, trained, evaluated
        record.windows = {"ingested": [each.window for each in books], "train": ["2026-03-01", "2026-03-02"]}
        record.rows = {"read": 770, "kept": 700, "quarantined": 49, "duplicates": 21, "train": 600}
        record.warned = {"late": 4}
        record.model = {"name": "shop", "version": 2, "champion": 2 if decision.promote else 1}
        record.predictions = {"2026-03-08": 100}
        record.steps = [
            StepNote(name="ingest", key="", kept=False, seconds=2.0),
            StepNote(name="features", key="k", kept=True, seconds=0.01),
            StepNote(name="train", key="k", kept=False, seconds=4.0),
        ]
        record.places, record.settings = {"clean": "/data/clean"}, {"name": "shop"}
        return record

    return made
