"""The HTML report of a run: one file that needs nothing beside it.

Enters: the run's record, and nothing else. Leaves: a page that stands alone, with the verdict first.
"""

from __future__ import annotations

from sparkdl.pipeline.report.drift import came_true, drifted
from sparkdl.pipeline.report.figures import diagnosed
from sparkdl.pipeline.report.page import document
from sparkdl.pipeline.report.quality import compared, learned, sliced, tried
from sparkdl.pipeline.report.rows import rows_in, rows_predicted, rows_refused
from sparkdl.pipeline.report.run import environment, places, steps
from sparkdl.pipeline.report.verdict import headline, verdict
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.storage import Storage

__all__ = ["has_report", "report_html", "write_report"]


def report_html(record: RunRecord) -> str:
    """Return the report as one HTML document; what the record does not hold is left out."""
    body = [
        verdict(record),
        compared(record),
        diagnosed(record.evaluated),
        sliced(record),
        came_true(record.live),
        drifted(record.drift),
        learned(record.trained),
        tried(record.trained),
        rows_in(record),
        rows_refused(record),
        rows_predicted(record),
        steps(record),
        places(record),
        environment(record),
    ]
    return document(f"{record.pipeline}: {headline(record)}", body)


def has_report(record: RunRecord) -> bool:
    """Whether there is anything to tell of a run: it did something, or it was refused or failed."""
    return record.outcome in ("refused", "failed") or bool(record.steps and record.outcome != "nothing new")


def write_report(record: RunRecord, file: Storage) -> None:
    """Write the report, whole or not at all; the record then says where it lies.

    Raises:
        StorageError: it cannot be written there.
    """
    before = dict(record.places)
    record.places["report"] = file.uri
    try:
        file.write_atomic(report_html(record).encode())
    except BaseException:
        record.places = before
        raise
