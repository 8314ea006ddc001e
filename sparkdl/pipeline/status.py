"""Where a pipeline stands, from what its runs have left: no Spark, no torch.

Enters: the context of a run that is never begun. Leaves: ``Status``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sparkdl.errors import IntegrityError, SparkdlError
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.rows.ledger import WindowBooks
from sparkdl.pipeline.rows.windows import ahead
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.lease import Holder, holder_of
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted
from sparkdl.pipeline.work.ingest import due_windows

__all__ = ["Status", "last_run", "records", "status_of"]

_LOOK_BACK = 10
"""Records that are read: runs with nothing new did not look for drift."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is known of a pipeline now.

    Attributes:
        pipeline: its name.
        last_run: the newest record that can be read; None before the first run.
        champion: the version that the alias points to; None where it points to none.
        drift: what the newest run that looked for drift found; None where none of the last ones did.
        done: books of the windows that were ingested, in order.
        due: windows that the next run ingests; None where only Spark can tell.
        ahead: windows that begin later than now, and are left alone until then; None where only Spark can tell.
        source: why the source cannot be looked at; empty where it can.
        holder: who runs it at this moment; None where nobody does.
    """

    pipeline: str
    last_run: RunRecord | None
    champion: ModelVersion | None
    drift: Drifted | None
    done: tuple[WindowBooks, ...]
    due: tuple[str, ...] | None
    ahead: tuple[str, ...] | None
    source: str
    holder: Holder | None


def status_of(context: Context) -> Status:
    """Look at records, registry, ledger, leases and the source.

    Raises:
        StorageError: the pipeline's own places cannot be read.
    """
    known = context.tables.windows()
    due: list[str] | None = None
    later: list[str] | None = None
    problem = ""
    try:
        due = due_windows(context.spec, context.look, known, context.now)
        later = None if context.look.windows is None else ahead(context.look.windows, context.now)
    except SparkdlError as error:  # the rest is worth knowing all the more
        problem = str(error)
    recent = list(islice(records(context), _LOOK_BACK))
    return Status(
        pipeline=str(context.spec.name),
        last_run=recent[0] if recent else None,
        champion=context.champion(),
        drift=next((record.drift for record in recent if record.drift is not None), None),
        done=tuple(books for books in known.values() if books.read),
        due=None if due is None else tuple(due),
        ahead=None if later is None else tuple(later),
        source=problem,
        holder=holder_of(context.runs.child("leases")),
    )


def last_run(context: Context) -> RunRecord | None:
    """The newest record of a run; one that cannot be read is passed over, with a warning."""
    return next(records(context), None)


def records(context: Context) -> Iterator[RunRecord]:
    """The records of runs, the newest first; one that cannot be read is passed over, with a warning."""
    names = [entry.name for entry in context.runs.list() if entry.is_dir] if context.runs.exists() else []
    for name in sorted(names, reverse=True):
        file = context.runs.child(name).child("record.json")
        if not file.exists():  # a folder of results, leases or models, or a run that is still going on
            continue
        try:
            yield RunRecord.load(file)
        except IntegrityError as error:
            logger.warning("%s", error)
