"""Earlier runs: their records, and the table with one row a run, for whoever watches a pipeline over months."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from sparkdl.columns.numpy_arrow import from_rows
from sparkdl.errors import IntegrityError
from sparkdl.observe import logger
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.storage import Storage
from sparkdl.tables.table import Table

RUNS = pa.schema(
    [
        ("run_id", pa.string()),
        ("pipeline", pa.string()),
        ("started", pa.timestamp("us", "UTC")),
        ("seconds", pa.float64()),
        ("outcome", pa.string()),
        ("exit_code", pa.int32()),
        ("message", pa.string()),
        ("error", pa.string()),
        ("rows_read", pa.int64()),
        ("rows_kept", pa.int64()),
        ("rows_quarantined", pa.int64()),
        ("rows_duplicate", pa.int64()),
        ("rows_predicted", pa.int64()),
        ("label", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("champion_value", pa.float64()),
        ("version", pa.int32()),
        ("champion", pa.int32()),
        ("drift", pa.string()),
        ("record", pa.string()),
        ("report", pa.string()),
        ("sparkdl", pa.string()),
        ("baseline_value", pa.float64()),
    ]
)
"""Columns of the table. ``value`` and ``champion_value`` are the metric of challenger and champion on the same rows,
``baseline_value`` that of the best guess without a model,
``version`` is the challenger, ``champion`` who is the champion after the run; ``drift`` is what was done about it.
A later sparkdl adds columns and never changes one; rows of an earlier one hold nulls there."""

_COMPACT_EVERY = 32
_LONGEST = 2000
"""Characters of a message: the record has the whole."""


def add_run(table: Table, record: RunRecord) -> None:
    """Add the row of a run, also of one that found nothing new, so that a scheduler that fell silent shows as a gap.

    Raises:
        StorageError: the table cannot be written.
        SchemaError: it is another table than this one.
    """
    version = table.append(from_rows([row_of(record)], RUNS), new_columns=True)
    if version % _COMPACT_EVERY == _COMPACT_EVERY - 1:
        table.compact()


def row_of(record: RunRecord) -> dict[str, Any]:
    """The row of a run; what it does not know is null."""
    decision = record.evaluated.decision if record.evaluated is not None else None
    metric = decision.gate.metric if decision is not None else None
    challenger_values = decision.challenger.values if decision is not None else {}
    champion_values = decision.champion.values if decision is not None and decision.champion is not None else {}
    baseline = decision.baseline if decision is not None else None
    rows, model, places = record.rows, record.model, record.places
    came_to_score = "score" in record.windows or bool(record.predictions)
    return {
        "run_id": record.run_id,
        "pipeline": record.pipeline,
        "started": datetime.fromisoformat(record.started).astimezone(UTC),
        "seconds": record.seconds,
        "outcome": record.outcome,
        "exit_code": record.exit_code,
        "message": record.message[:_LONGEST],
        "error": record.error or None,
        "rows_read": rows.get("read"),
        "rows_kept": rows.get("kept"),
        "rows_quarantined": rows.get("quarantined"),
        "rows_duplicate": rows.get("duplicates"),
        "rows_predicted": sum(record.predictions.values()) if came_to_score else None,
        "label": record.evaluated.label if record.evaluated is not None else None,
        "metric": metric,
        "value": challenger_values.get(str(metric)),
        "champion_value": champion_values.get(str(metric)),
        "version": model.get("version"),
        "champion": model.get("champion"),
        "drift": record.drift.action if record.drift is not None else None,
        "record": places.get("record"),
        "report": places.get("report"),
        "sparkdl": record.versions.get("sparkdl"),
        "baseline_value": None if baseline is None else baseline.values.get(str(metric)),
    }


def records(folder: Storage) -> Iterator[RunRecord]:
    """The records of runs, the newest first; one that cannot be read is passed over, with a warning."""
    names = [entry.name for entry in folder.list() if entry.is_dir] if folder.exists() else []
    for name in sorted(names, reverse=True):
        file = folder.child(name).child("record.json")
        if not file.exists():  # a folder of results, leases or models, or a run that is still going on
            continue
        try:
            yield RunRecord.load(file)
        except IntegrityError as error:
            logger.warning("%s", error)
