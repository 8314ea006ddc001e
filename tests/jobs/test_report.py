from __future__ import annotations

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from rich.console import Console

from jobs.plots import Group
from jobs.record import (
    Predictions,
    Publication,
    Quality,
    RowCounts,
    RunRecord,
    Training,
    print_summary,
    versions,
    write_record,
)
from jobs.report import report_html, write_report

DAYS = ["2026-03-16", "2026-03-17"]


@pytest.fixture
def record():
    rng = np.random.default_rng(0)
    true = rng.uniform(5, 90, 50)
    return RunRecord(
        job="retrain",
        run_id="20260318T000000-retrain-abc",
        started_at="2026-03-18T00:00:00+00:00",
        seconds=71.25,
        stages={"etl": 13.2, "training": 14.5},
        rows=RowCounts(
            read=1000, written=900, quarantined=70, duplicates=30, reasons={"distance_km: missing": 70}, days=DAYS
        ),
        training=Training(
            ranks=2, backend="horovod", shards=4, steps=924, epochs=2, best_epoch=2, rows_per_second=151234.4
        ),
        quality=Quality(days=DAYS, rmse=6.6, mae=4.6, floor_rmse=6.0, mean_rmse=25.8, champion_rmse=6.71),
        publication=Publication(model="ride-duration", version=3, alias_moved=False, champion=2, reason="not better"),
        predictions=Predictions(days=["2026-03-18"], rows=11207, version=2, rmse=6.44, floor_rmse=6.39),
        places={"report": "/data/<b>report.html"},
        results={
            "history": [{"loss": 160.0, "val_loss": 47.8}, {"loss": 46.0, "val_loss": 45.9}],
            "evaluation": {
                "sample": [[value, value + 1] for value in true],
                "by_hour": [{"key": hour + 1, "rows": 40, "bias": 0.1, "rmse": 6.0} for hour in range(24)],
                "by_zone": [{"key": zone, "rows": 100 - zone, "bias": -0.1, "rmse": 6.0} for zone in range(30)],
            },
            "etl": {"zones": {"1": "Z001", "2": "Z002"}},
        },
        settings={"name": "ride-duration"},
        versions={"code": "abc"},
    )


def test_the_report_stands_alone_and_shows_every_figure(record, tmp_path):
    place = write_report(record, str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    assert place.endswith("report.html")
    assert text.count("<svg") == 5
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    words = [
        "Learning curves",
        "noise floor, 6.00 min",
        "50 rides, predicted against true",
        "hour of the pick-up (UTC)",
    ]
    for word in [*words, "Z001 (99)", "16 others", "unknown (100)", "Time by stage", "RMSE (minutes)", "+10.0 %"]:
        assert word in text, word
    assert "/data/&lt;b&gt;report.html" in text


def test_ids_of_two_figures_never_meet(record):
    ids = re.findall(r' id="([^"]+)"', report_html(record))
    assert len(ids) == len(set(ids)) > 0


def test_a_report_can_be_drawn_from_a_stored_record(record, tmp_path):
    write_record(record, str(tmp_path / "record.json"))
    stored = json.loads((tmp_path / "record.json").read_text())
    assert stored == json.loads(json.dumps(asdict(record)))
    again = RunRecord(job="retrain", run_id="x", started_at="y", results=stored["results"])
    assert report_html(again).count("<svg") == 4


def test_a_report_of_a_run_without_training_is_a_page_too():
    text = report_html(RunRecord(job="etl", run_id="x", started_at="y", status="nothing new"))
    assert "nothing new" in text
    assert "<svg" not in text


def test_the_margin_is_the_confidence_interval_of_the_mean():
    residuals = np.random.default_rng(0).normal(0.5, 2.0, 400)
    group = Group(name="8", rows=400, bias=residuals.mean(), rmse=np.sqrt((residuals**2).mean()))
    assert group.margin == pytest.approx(1.96 * residuals.std() / 20)


def test_the_summary_says_what_a_person_wants_to_know(record):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(record, console)
    text = console.export_text()
    for words in [
        "1,000 read = 900 features + 70 quarantined + 30 duplicates",
        "924 steps",
        "151,234 rows/s",
        "10.0 % above the noise floor 6.000; plain mean 25.800; former champion 6.710",
        "champion stays at version 2 (not better)",
        "11,207 rows, 2026-03-18, by version 2",
        "training 14.5 s",
        "71.2 s",
    ]:
        assert words in text, words


def test_the_versions_name_the_code():
    found = versions()
    assert found["torch"].startswith("2.")
    assert found["code"]
