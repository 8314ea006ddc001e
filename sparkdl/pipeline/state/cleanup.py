"""What a pipeline that runs for years would fill its disk with, and nobody needs: it goes at the end of a training.

Enters: the context of a run that holds the lease and has trained. Leaves: shard sets and bundles of the newest
trainings (``keep.trainings``), and of the last days (``keep.days``) the versions of the pipeline's own tables and the
records of runs that found nothing new. What was published lies in the registry and is not touched. Names to delete
are names of a listing that look like keys of results or ids of runs, never what a document says; the document that
makes a set, a bundle or a run whole goes first, so what is half-deleted counts as gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from sparkdl.documents.typed import Count
from sparkdl.models.folder import DOCUMENT
from sparkdl.observe import logger
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.results import Trained
from sparkdl.storage import Storage

__all__ = ["clean_up"]

_KEY = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_TABLES = ("clean", "quarantine", "ledger", "receipts", "predictions", "runs")
_VACUUM_EVERY = 32
"""Versions of the table of clean rows between two vacuums, since listing all folders of a store takes its time."""


@dataclass(frozen=True, kw_only=True)
class _Vacuumed:
    """What the last vacuum left.

    Attributes:
        version: of the table of clean rows, after it.
    """

    version: Count


def clean_up(context: Context) -> None:
    """Delete what earlier trainings left, if this run has trained; what is wrong is logged, and left to the next run.

    Args:
        context: of a run that holds the lease, its steps done.

    Raises:
        LeaseLostError: a later run has taken it over.
    """
    if not any(note.name == "train" and not note.kept for note in context.steps.notes):
        return
    for remove in (_shards, _models, _versions, _idle_runs):
        context.check_lease()
        try:
            remove(context)
        except Exception as error:
            logger.warning("what earlier trainings left was not cleaned up: %s: %s", type(error).__name__, error)


def _shards(context: Context) -> None:
    """Sets, and the fitted features that they were cut with."""
    steps = context.runs.child("steps")
    for key in _old(context, "shards"):
        for part in ("train", "validate"):
            _delete(Storage.of(f"{context.spec.places.shards}/{part}-{key}"), "manifest.json")
        steps.child("shards").child(f"{key}.json").delete()
    for key in _old(context, "features"):
        steps.child("features").child(f"{key}.json").delete()


def _models(context: Context) -> None:
    """Bundles that were trained and copied to the registry, or lost a search, and checkpoints of what was given up."""
    if context.spec.keep.trainings is None:
        return
    newest = set(_keys(context, "train")) - set(_old(context, "train"))
    results = [context.steps.result("train", key, Trained) for key in newest]
    bundles = {str(result.bundle).rstrip("/").rpartition("/")[2] for result in results if result is not None}
    kept = newest | bundles | _made_now(context, "trial")
    models, checkpoints = context.runs.child("models"), context.runs.child("training").child("runs")
    for name in _names(models) - kept:
        _delete(models.child(name), DOCUMENT)
    for name in _names(checkpoints) - kept:
        checkpoints.child(name).delete(recursive=True)


def _versions(context: Context) -> None:
    """Files of the pipeline's own tables that only old versions name, and those of writes that never committed."""
    tables, days = context.tables, context.spec.keep.days
    clean, place = tables.table("clean"), {"tables": tables.folder}
    last = context.steps.find("vacuum", place, _Vacuumed) or _Vacuumed(version=0)
    if days is None or 0 <= clean.version() - last.version < _VACUUM_EVERY:  # a table made anew has fewer than last
        return
    started = time.perf_counter()
    for name in _TABLES:
        if tables.table(name).exists():
            tables.table(name).vacuum(timedelta(days=days), versions=True)
    context.steps.put("vacuum", place, _Vacuumed(version=clean.version()), time.perf_counter() - started)


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
    return {note.key for note in context.steps.notes if note.name == step}


def _old(context: Context, step: str) -> list[str]:
    """Keys of results that are neither among the newest nor used by this run."""
    most = context.spec.keep.trainings
    used = _made_now(context, step)
    return [] if most is None else [key for key in _keys(context, step)[most:] if key not in used]


def _keys(context: Context, step: str) -> list[str]:
    """Keys of a step's results, the newest first; none where the store does not say when they were written."""
    folder = context.runs.child("steps").child(step)
    entries: Iterable[tuple[float | None, str]] = (
        [(entry.modified, entry.name.removesuffix(".json")) for entry in folder.list()] if folder.exists() else []
    )
    dated = [(modified, key) for modified, key in entries if modified is not None and _KEY.fullmatch(key)]
    return [key for _, key in sorted(dated, reverse=True)]
