"""Where a pipeline stands, from what its runs have left: no Spark, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from sparkdl.errors import SparkdlError
from sparkdl.models.registry import ModelVersion
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.lease import Holder, holder_of
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted, Evaluated
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.steps import STEPS
from sparkdl.pipeline.steps.ingest import source_windows
from sparkdl.pipeline.windows import ahead

_LOOK_BACK = 10
"""Records that are read: runs with nothing new did not look for drift."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is known of a pipeline now.

    Attributes:
        pipeline: its name.
        last_run: the newest record that can be read; None before the first run.
        champion: the version that the alias points to; None where it points to none.
        drift: what the newest run that looked for drift found, from a champion where there is one by now; None where
            none of the last ones did.
        done: the receipts of ingested windows, in order.
        metric: that judges models.
        judged: what held-out rows said of the champion; None where none of the last runs published it.
        due: windows that the next run ingests; None where only Spark can tell.
        taken_in: what is known of the source where only Spark can tell what is due, in words.
        ahead: windows that begin later than now, and are left alone until then; None where only Spark can tell.
        source: why the source cannot be looked at; empty where it can.
        holder: who runs it at this moment; None where nobody does.
    """

    pipeline: str
    last_run: RunRecord | None
    champion: ModelVersion | None
    drift: Drifted | None
    metric: str
    judged: Evaluated | None
    done: tuple[WindowReceipt, ...]
    due: tuple[str, ...] | None
    taken_in: str
    ahead: tuple[str, ...] | None
    source: str
    holder: Holder | None


def status_of(run: Run) -> Status:
    """Look at records, registry, receipts, leases and the source.

    Raises:
        StorageError: the pipeline's own places cannot be read.
    """
    known_windows = run.windows()
    due: tuple[str, ...] | None = None
    later: tuple[str, ...] | None = None
    problem = ""
    try:
        windows, ingest = source_windows(run), stale_of(STEPS[0], run)
        if windows is not None:
            due, later = tuple(ingest.keys), tuple(ahead(windows, run.request.now))
    except SparkdlError as error:  # the rest is worth knowing all the more
        problem = str(error)
    recent = list(islice(records(run.project.runs), _LOOK_BACK))
    last_read = "" if due is not None or problem else _last_read(run.snapshot, recent)
    champion, version, spec = run.champion(), run.champion_version(), run.spec
    drifts = (record.drift for record in recent if record.drift is not None)
    published = (record.evaluated for record in recent if version and record.model.get("version") == version)
    return Status(
        pipeline=str(spec.name),
        last_run=recent[0] if recent else None,
        champion=champion,
        metric=spec.judged_metric,
        judged=next((evaluated for evaluated in published if evaluated is not None), None),
        drift=next((drift for drift in drifts if champion is None or drift.against is not None), None),
        done=tuple(receipt for receipt in known_windows.values() if receipt.read),
        due=due,
        taken_in=last_read,
        ahead=later,
        source=problem,
        holder=holder_of(run.project.runs.child("leases")),
    )


def _last_read(snapshot: SourceSnapshot, recent: Sequence[RunRecord]) -> str:
    """What is known of a source that shows no windows before Spark reads it."""
    last = next((record for record in recent if "ingested" in record.windows), None)
    if last is None:
        return "the source shows no windows before it is read"
    reader = f"run {last.run_id} of {last.started} read it"
    if last.source_state is None:
        return f"the source shows nothing before it is read; {reader}, and left nothing out that was there then"
    if last.source_state != snapshot.state:
        return f"the source has changed since {reader}, and shows no windows before it is read"
    return f"the source is as it was when {reader}, and its settings differ or a run was cut short since"
