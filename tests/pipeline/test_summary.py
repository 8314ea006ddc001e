"""A training in a few words."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.report import report_html
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.summary import summary_lines


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 rank (solo), 1 epoch (best 1), 1 step"), (1200, "1,200 ranks (solo), 1,200 epochs (best 1), 1,200 steps")],
)
def test_one_of_a_kind_is_told_as_one(count, text):
    record = RunRecord(pipeline="shop", run_id="r", started="2026-03-20T12:00:00+00:00")
    record.end("stopped", "done")
    record.trained = Trained(
        bundle="b", content_hash="c", history=({"epoch": 1},), metrics={}, epochs=count, best_epoch=0, steps=count,
        rows=1, ranks=count, backend="solo",
    )  # fmt: skip
    assert dict(summary_lines(record))["training"] == f"0 rows, {text}"
    ranks, epochs, _ = text.split(", ")
    page = report_html(record)
    assert f"<p>{epochs.partition(' (')[0]}" in page
    assert f"on {ranks}." in page
