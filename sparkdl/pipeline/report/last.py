"""The report of an earlier run: where it lies, and written anew where it is gone or of an older version.

Enters: the context of a run that is never begun, and perhaps the id of a run. Leaves: the address of its report.
"""

from __future__ import annotations

from sparkdl.errors import ConfigError
from sparkdl.pipeline.report.page import GENERATOR
from sparkdl.pipeline.report.report import has_report, write_report
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.runs import records
from sparkdl.storage import Storage

__all__ = ["report_of"]

_HEAD = 2000
"""Bytes of a page that say what wrote it."""


def report_of(context: Context, run_id: str | None = None) -> Storage:
    """The report of a run.

    Args:
        context: of the pipeline.
        run_id: of the run; None takes the last one that did something.

    Raises:
        ConfigError: there is no such run.
        IntegrityError: its record was altered.
        StorageError: the report is not there and cannot be written.
    """
    record = _last(context) if run_id is None else _named(context, run_id)
    file = context.runs.child(record.run_id).child("report.html")
    if not (file.exists() and f'content="{GENERATOR}"'.encode() in file.read_bytes(0, _HEAD)):
        write_report(record, file)
    return file


def _last(context: Context) -> RunRecord:
    found = next(filter(has_report, records(context)), None)
    if found is None:
        raise ConfigError(f"no run of {context.spec.name} has done anything yet in {context.runs.uri}: run it first")
    return found


def _named(context: Context, run_id: str) -> RunRecord:
    known = {entry.name for entry in context.runs.list() if entry.is_dir} if context.runs.exists() else set()
    file = context.runs.child(run_id).child("record.json") if run_id in known else None
    if file is None or not file.exists():
        newest = [record.run_id for record, _ in zip(records(context), range(3), strict=False)]
        remedy = f"the last ones are {', '.join(newest)}" if newest else "there are none yet"
        raise ConfigError(f"{context.spec.name} has no run {run_id!r} in {context.runs.uri}: {remedy}")
    return RunRecord.load(file)
