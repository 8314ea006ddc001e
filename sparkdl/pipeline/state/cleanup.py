"""What a pipeline that runs for years would fill its disk with, and nobody needs: it goes at the end of a training.

Shard sets and bundles of trainings that are older than the newest (``keep.trainings``), and after some days
(``keep.days``) the versions of the pipeline's own tables and the records of runs that found nothing new. What was
published lies in the registry and is not touched. The document that makes a set, a bundle or a run whole goes first, so
what is half-deleted counts as gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from datetime import datetime, timedelta
from functools import partial

from sparkdl.columns.numpy_arrow import to_rows
from sparkdl.models.folder import DOCUMENT
from sparkdl.observe import logger
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable, StepNote
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.state.run import State
from sparkdl.storage import Storage

Used = Set[tuple[str, str]]
"""Names of steps, with the key of what a run has made or taken."""
_KEY = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_TABLES = ("clean", "quarantine", "receipts", "predictions", "runs")
_VACUUM_EVERY = 32
"""Versions of the table of clean rows between two vacuums, since listing all folders of a store takes its time."""


def clean_up(project: Project, state: State, notes: Sequence[StepNote], now: datetime) -> None:
    """Delete what earlier trainings left, if this run has trained; what is wrong is logged, and left to the next run.

    Args:
        project: the pipeline.
        state: under the lease of a run whose steps are done.
        notes: of these steps.
        now: the time of the run.

    Raises:
        LeaseLostError: a later run has taken it over.
    """
    if not any(note.name == "train" and not note.kept for note in notes):
        return
    receipts, used = state.receipts, {(note.name, note.key) for note in notes}
    for remove in (
        partial(_shards, project, receipts, used),
        partial(_models, project, receipts, used),
        partial(_versions, project, receipts),
        partial(_idle_runs, project, now),
    ):
        state.check_lease()
        try:
            remove()
        except Exception as error:
            logger.warning("what earlier trainings left was not cleaned up: %s: %s", type(error).__name__, error)


def _shards(project: Project, receipts: ReceiptTable, used: Used) -> None:
    """Sets, and the fitted features that they were cut with."""
    for key in _old(project, receipts, used, "shards"):
        for part in ("train", "validate"):
            _delete(Storage.of(f"{project.spec.places.shards}/{part}-{key}"), "manifest.json")
        receipts.document("shards", key).delete()
    for key in _old(project, receipts, used, "features"):
        receipts.document("features", key).delete()


def _models(project: Project, receipts: ReceiptTable, used: Used) -> None:
    """Bundles that were trained and copied to the registry, or lost a search, and checkpoints of what was given up."""
    if project.spec.keep.trainings is None:
        return
    newest = set(_keys(project, receipts, "train")) - set(_old(project, receipts, used, "train"))
    trainings = [receipts.result("train", key, Trained) for key in newest]
    bundles = {trained.bundle.rstrip("/").rpartition("/")[2] for trained in trainings if trained is not None}
    kept_names = newest | bundles | {key for step, key in used if step == "trial"}
    models, checkpoints = project.runs.child("models"), project.runs.child("training").child("runs")
    for name in _names(models) - kept_names:
        _delete(models.child(name), DOCUMENT)
    for name in _names(checkpoints) - kept_names:
        checkpoints.child(name).delete(recursive=True)


def _versions(project: Project, receipts: ReceiptTable) -> None:
    """Files of the pipeline's own tables that only old versions name, and those of writes that never committed."""
    tables, days = project.tables, project.spec.keep.days
    clean, receipt = tables.table("clean"), receipts.of("vacuum").get("clean")
    last = 0 if receipt is None else receipt.read(int)
    if days is None or 0 <= clean.version() - last < _VACUUM_EVERY:  # a table made anew has fewer than last
        return
    for name in _TABLES:
        if tables.table(name).exists():
            tables.table(name).vacuum(timedelta(days=days), versions=True)
    version = clean.version()
    receipts.write([Receipt(step="vacuum", partition="clean", key=str(version), facts=str(version))])


def _idle_runs(project: Project, now: datetime) -> None:
    """Records of runs that found nothing new; their rows stay in the table of runs."""
    days, table = project.spec.keep.days, project.tables.table("runs")
    if days is None or not table.exists():
        return
    limit = now - timedelta(days=days)
    rows = to_rows(table.rows(columns=["run_id", "started"], where="outcome = 'nothing new'"))
    idle = {row["run_id"] for row in rows if row["started"] < limit}
    for name in _names(project.runs, _RUN) & idle:
        _delete(project.runs.child(name), "record.json")


def _delete(folder: Storage, first: str) -> None:
    folder.child(first).delete()
    folder.delete(recursive=True)


def _names(folder: Storage, form: re.Pattern[str] = _KEY) -> set[str]:
    return {entry.name for entry in folder.list() if form.fullmatch(entry.name)} if folder.exists() else set()


def _old(project: Project, receipts: ReceiptTable, used: Used, step: str) -> list[str]:
    """Keys of what is neither among the newest nor used by this run."""
    most = project.spec.keep.trainings
    return [] if most is None else [key for key in _keys(project, receipts, step)[most:] if (step, key) not in used]


def _keys(project: Project, receipts: ReceiptTable, step: str) -> list[str]:
    """Keys of what a step has made, the newest first, whose documents are still there."""
    folder = project.runs.child("steps").child(step)
    documents = {entry.name.removesuffix(".json") for entry in folder.list()} if folder.exists() else set()
    documented = [receipt for receipt in receipts.of(step).values() if receipt.key in documents]
    return [receipt.key for receipt in sorted(documented, key=lambda receipt: receipt.written_at, reverse=True)]
