"""The whole journey: raw events, ETL, shards, training, publication, predictions, report. ``make run`` calls this.

Enters: the configuration. Leaves: a version in the registry, predictions of the next day, a summary, a report. A second
run on the same data finds nothing new and publishes nothing; a new day, or another setting, trains again.

Exit codes: 0 done, or nothing new; 1 refused; 2 cluster; 3 training; 4 unexpected error; 130 interrupted (all of them:
jobs/entry.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: the folder above holds the package `jobs`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.entry import Run, open_session, run_job
from jobs.etl import describe, run_etl
from jobs.make_events import make_events
from jobs.publish import already_published, champion_of, publish_model
from jobs.report import write_report
from jobs.score import days_to_score, score_days
from jobs.train import train_model, training_identity

__all__: list[str] = []


def _job(run: Run) -> None:
    settings = run.settings
    with run.stage("spark"):  # first: a path without a scheme means what it means to the session
        spark = open_session(settings, "lake", "shards", "registry", "runs")
    if settings.events.generate:
        with run.stage("events"):
            make_events(settings)
    with run.stage("etl"):
        etl = run_etl(spark, settings)
    describe(run, etl)
    known = already_published(settings, training_identity(settings, etl))
    if known is None:
        publish_model(run, spark, etl, train_model(run, spark, etl))
    champion = champion_of(settings)
    days = days_to_score(settings, etl, champion) if champion else []
    if champion and days:
        score_days(run, spark, etl, champion, days)
    if known is None or days:
        run.record.status, run.record.message = "done", ""
        run.record.seconds = sum(run.record.stages.values())
        with run.stage("report"):
            run.record.places["report"] = write_report(run.record, f"{run.folder}/report.html")
    else:
        run.nothing_new(
            f"version {known.version} was trained on these {len(etl.days)} days with these settings, and the champion "
            f"has scored {', '.join(etl.split.scoring)}"
        )


if __name__ == "__main__":
    sys.exit(run_job("retrain", _job, summary=True))
