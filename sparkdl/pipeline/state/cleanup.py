"""What goes at the end of a training: what older ones left (``keep.trainings``, ``keep.days``) and nobody needs."""

from __future__ import annotations

import re
from datetime import timedelta

from sparkdl.columns.numpy_arrow import to_rows
from sparkdl.models.folder import DOCUMENT
from sparkdl.observe import logger
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.state.run import Run
from sparkdl.storage import Storage

_KEY = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_TABLES = ("clean", "quarantine", "receipts", "predictions", "runs")
_VACUUM_EVERY = 32
"""Versions of the table of clean rows between two vacuums, since listing all folders of a store takes its time."""


def clean_up(run: Run) -> None:
    """Delete what earlier trainings left, if this run has trained; what is wrong is logged, and left to the next run.

    Args:
        run: whose steps are done, and which still has its lease.

    Raises:
        LeaseLostError: a later run has taken it over.
    """
    if "train" not in run.made:
        return
    for remove in (_shards, _models, _versions, _idle_runs):
        run.check_lease()
        try:
            remove(run)
        except Exception as error:
            logger.warning("what earlier trainings left was not cleaned up: %s: %s", type(error).__name__, error)


def _shards(run: Run) -> None:
    """Sets, and the fitted features that they were cut with."""
    for key in _old(run, "shards"):
        for part in ("train", "validate"):
            _delete(Storage.of(f"{run.spec.places.shards}/{part}-{key}"), "manifest.json")
        run.receipts.document("shards", key).delete()
    for key in _old(run, "features"):
        run.receipts.document("features", key).delete()


def _models(run: Run) -> None:
    """Bundles that were trained and copied to the registry, or lost a search, and checkpoints of what was given up."""
    if run.spec.keep.trainings is None:
        return
    newest = set(_keys(run, "train")) - set(_old(run, "train"))
    trainings = [run.receipts.result("train", key, Trained) for key in newest]
    bundles = {trained.bundle.rstrip("/").rpartition("/")[2] for trained in trainings if trained is not None}
    kept_names = newest | bundles | {note.key for note in run.record.steps if note.name == "trial"}
    runs = run.project.runs
    models, checkpoints = runs.child("models"), runs.child("training").child("runs")
    for name in _names(models) - kept_names:
        _delete(models.child(name), DOCUMENT)
    for name in _names(checkpoints) - kept_names:
        checkpoints.child(name).delete(recursive=True)


def _versions(run: Run) -> None:
    """Files of the pipeline's own tables that only old versions name, and those of writes that never committed."""
    project, days = run.project, run.spec.keep.days
    clean, receipt = project.table("clean"), run.receipts.of("vacuum").get("clean")
    last = 0 if receipt is None else receipt.read(int)
    if days is None or 0 <= clean.version() - last < _VACUUM_EVERY:  # a table made anew has fewer than last
        return
    for name in _TABLES:
        if project.table(name).exists():
            project.table(name).vacuum(timedelta(days=days), versions=True)
    version = str(clean.version())
    run.receipts.write([Receipt(step="vacuum", partition="clean", key=version, facts=version)])


def _idle_runs(run: Run) -> None:
    """Records of runs that found nothing new; their rows stay in the table of runs."""
    days, table = run.spec.keep.days, run.project.table("runs")
    if days is None or not table.exists():
        return
    limit = run.request.now - timedelta(days=days)
    rows = to_rows(table.rows(columns=["run_id", "started"], where="outcome = 'nothing new'"))
    idle = {row["run_id"] for row in rows if row["started"] < limit}
    for name in _names(run.project.runs, _RUN) & idle:
        _delete(run.project.runs.child(name), "record.json")


def _delete(folder: Storage, first: str) -> None:
    """Delete a folder; the document that makes it whole goes first, so that what is half-deleted counts as gone."""
    folder.child(first).delete()
    folder.delete(recursive=True)


def _names(folder: Storage, form: re.Pattern[str] = _KEY) -> set[str]:
    return {entry.name for entry in folder.list() if form.fullmatch(entry.name)} if folder.exists() else set()


def _old(run: Run, step: str) -> list[str]:
    """Keys of what is neither among the newest nor used by this run."""
    most, used = run.spec.keep.trainings, {note.key for note in run.record.steps if note.name == step}
    return [] if most is None else [key for key in _keys(run, step)[most:] if key not in used]


def _keys(run: Run, step: str) -> list[str]:
    """Keys of what a step has made, the newest first, whose documents are still there."""
    folder = run.project.runs.child("steps").child(step)
    documents = {entry.name.removesuffix(".json") for entry in folder.list()} if folder.exists() else set()
    documented = [receipt for receipt in run.receipts.of(step).values() if receipt.key in documents]
    return [receipt.key for receipt in sorted(documented, key=lambda receipt: receipt.written_at, reverse=True)]
