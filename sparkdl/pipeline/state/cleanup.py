"""What a pipeline that runs for years would fill its disk with, and nobody needs: it goes at the end of a training.

Shard sets and bundles of trainings that are older than the newest (``keep.trainings``), and after some days
(``keep.days``) the versions of the pipeline's own tables and the records of runs that found nothing new. What was
published lies in the registry and is not touched. The document that makes a set, a bundle or a run whole goes first, so
what is half-deleted counts as gone.
"""

from __future__ import annotations

import re
from datetime import timedelta

from sparkdl.models.folder import DOCUMENT
from sparkdl.observe import logger
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.results import Trained
from sparkdl.storage import Storage

__all__ = ["clean_up"]

_KEY = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_TABLES = ("clean", "quarantine", "receipts", "predictions", "runs")
_VACUUM_EVERY = 32
"""Versions of the table of clean rows between two vacuums, since listing all folders of a store takes its time."""


def clean_up(context: Context) -> None:
    """Delete what earlier trainings left, if this run has trained; what is wrong is logged, and left to the next run.

    Args:
        context: of a run that holds the lease, its steps done.

    Raises:
        LeaseLostError: a later run has taken it over.
    """
    if not any(note.name == "train" and not note.kept for note in context.notes):
        return
    for remove in (_shards, _models, _versions, _idle_runs):
        context.check_lease()
        try:
            remove(context)
        except Exception as error:
            logger.warning("what earlier trainings left was not cleaned up: %s: %s", type(error).__name__, error)


def _shards(context: Context) -> None:
    """Sets, and the fitted features that they were cut with."""
    for key in _old(context, "shards"):
        for part in ("train", "validate"):
            _delete(Storage.of(f"{context.spec.places.shards}/{part}-{key}"), "manifest.json")
        context.receipts.document("shards", key).delete()
    for key in _old(context, "features"):
        context.receipts.document("features", key).delete()


def _models(context: Context) -> None:
    """Bundles that were trained and copied to the registry, or lost a search, and checkpoints of what was given up."""
    if context.spec.keep.trainings is None:
        return
    newest = set(_keys(context, "train")) - set(_old(context, "train"))
    trainings = [context.receipts.result("train", key, Trained) for key in newest]
    bundles = {trained.bundle.rstrip("/").rpartition("/")[2] for trained in trainings if trained is not None}
    kept = newest | bundles | _made_now(context, "trial")
    models, checkpoints = context.runs.child("models"), context.runs.child("training").child("runs")
    for name in _names(models) - kept:
        _delete(models.child(name), DOCUMENT)
    for name in _names(checkpoints) - kept:
        checkpoints.child(name).delete(recursive=True)


def _versions(context: Context) -> None:
    """Files of the pipeline's own tables that only old versions name, and those of writes that never committed."""
    tables, days = context.tables, context.spec.keep.days
    clean, receipt = tables.table("clean"), context.receipts.of("vacuum").get("clean")
    last = 0 if receipt is None else receipt.read(int)
    if days is None or 0 <= clean.version() - last < _VACUUM_EVERY:  # a table made anew has fewer than last
        return
    for name in _TABLES:
        if tables.table(name).exists():
            tables.table(name).vacuum(timedelta(days=days), versions=True)
    version = clean.version()
    context.receipts.write([Receipt(step="vacuum", partition="clean", key=str(version), facts=str(version))])


def _idle_runs(context: Context) -> None:
    """Records of runs that found nothing new; their rows stay in the table of runs."""
    days, table = context.spec.keep.days, context.tables.table("runs")
    if days is None or not table.exists():
        return
    limit = context.now - timedelta(days=days)
    rows = table.rows(columns=["run_id", "started"], where="outcome = 'nothing new'").to_pylist()
    idle = {row["run_id"] for row in rows if row["started"] < limit}
    for name in _names(context.runs, _RUN) & idle:
        _delete(context.runs.child(name), "record.json")


def _delete(folder: Storage, first: str) -> None:
    folder.child(first).delete()
    folder.delete(recursive=True)


def _names(folder: Storage, form: re.Pattern[str] = _KEY) -> set[str]:
    return {entry.name for entry in folder.list() if form.fullmatch(entry.name)} if folder.exists() else set()


def _made_now(context: Context, step: str) -> set[str]:
    return {note.key for note in context.notes if note.name == step}


def _old(context: Context, step: str) -> list[str]:
    """Keys of what is neither among the newest nor used by this run."""
    most = context.spec.keep.trainings
    used = _made_now(context, step)
    return [] if most is None else [key for key in _keys(context, step)[most:] if key not in used]


def _keys(context: Context, step: str) -> list[str]:
    """Keys of what a step has made, the newest first, whose documents are still there."""
    folder = context.runs.child("steps").child(step)
    documents = {entry.name.removesuffix(".json") for entry in folder.list()} if folder.exists() else set()
    receipts = [receipt for receipt in context.receipts.of(step).values() if receipt.key in documents]
    return [receipt.key for receipt in sorted(receipts, key=lambda receipt: receipt.written_at, reverse=True)]
