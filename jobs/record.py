"""The result record of a run: JSON for machines, ten seconds of reading for a person.

Enters: what the stages of a job have to tell. Leaves: ``record.json`` in the run's folder, written also when the job is
refused or fails, and a summary on the terminal.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from sparkdl.storage import Storage

__all__ = [
    "Predictions",
    "Publication",
    "Quality",
    "RowCounts",
    "RunRecord",
    "Training",
    "print_summary",
    "summary_lines",
    "versions",
    "without_secrets",
    "write_record",
]

_SECRET = re.compile(r"secret|passw|token|access[._-]?key|account[._-]?key|credential|\bsas\b", re.IGNORECASE)
STATUS_STYLE = {"done": "green", "nothing new": "cyan", "refused": "yellow", "failed": "red", "interrupted": "red"}


@dataclass(kw_only=True)
class RowCounts:
    """Rows of the days that this run processed; ``read`` is the sum of the others.

    Attributes:
        read: raw rows.
        written: rows in the feature table.
        quarantined: rows with a reason against them.
        duplicates: rows that repeat an event.
        reasons: quarantined rows by reason.
        days: the days processed.
    """

    read: int
    written: int
    quarantined: int
    duplicates: int
    reasons: dict[str, int] = field(default_factory=dict)
    days: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Training:
    """One training.

    Attributes:
        ranks: processes that trained together.
        backend: the collective that was used.
        shards: files of the training and validation shard sets.
        steps, epochs: done; ``best_epoch`` counts from 1.
        rows_per_second: over all ranks, while training.
        stopped_early: validation did not improve any more.
    """

    ranks: int
    backend: str
    shards: int
    steps: int
    epochs: int
    best_epoch: int
    rows_per_second: float
    stopped_early: bool = False


@dataclass(kw_only=True)
class Quality:
    """Errors in minutes on the same days; ``champion_rmse`` is the former champion's there, None without one.

    Attributes:
        days: the held-out days.
        rmse, mae: the model's error.
        floor_rmse: best reachable; None where the truth is unknown.
        mean_rmse: error of the mean of the training days.
        champion_rmse: error of the champion before this run.
    """

    days: list[str]
    rmse: float
    mae: float
    floor_rmse: float | None = None
    mean_rmse: float | None = None
    champion_rmse: float | None = None

    @property
    def above_floor(self) -> float | None:
        """How far the model is above the noise floor: 0.05 is 5 %."""
        return self.rmse / self.floor_rmse - 1 if self.floor_rmse else None


@dataclass(kw_only=True)
class Publication:
    """What the registry got.

    Attributes:
        model: name in the registry.
        version: the new version.
        alias_moved: whether ``champion`` points to it now.
        champion: version that ``champion`` points to now.
        reason: why the alias moved or stayed, in half a sentence.
    """

    model: str
    version: int
    alias_moved: bool
    champion: int | None
    reason: str = ""


@dataclass(kw_only=True)
class Predictions:
    """What scoring wrote; the errors are of the scored days, where their labels are known."""

    days: list[str]
    rows: int
    version: int
    rmse: float | None = None
    floor_rmse: float | None = None


@dataclass(kw_only=True)
class RunRecord:
    """Everything a run leaves on record.

    Attributes:
        job: name of the job.
        run_id: unique, sorts by time.
        started_at: ISO time, UTC.
        status: ``done``, ``nothing new``, ``refused``, ``failed`` or ``interrupted``.
        exit_code: what the process returned.
        seconds: of the whole job; ``stages`` holds them by stage.
        message: why it was refused, failed or had nothing to do.
        error: the type of the error.
        places: where things lie, by name.
        results: whatever else a job has to tell.
        settings: the configuration after overrides.
        versions: of the code and its frameworks.
    """

    job: str
    run_id: str
    started_at: str
    status: str = "done"
    exit_code: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    message: str = ""
    error: str = ""
    rows: RowCounts | None = None
    training: Training | None = None
    quality: Quality | None = None
    publication: Publication | None = None
    predictions: Predictions | None = None
    places: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def write_record(record: RunRecord, place: str) -> str:
    """Write the record as JSON to ``place`` (a path or URI), atomically; return the place.

    Raises:
        StorageError: it cannot be written there.
    """
    content = json.dumps(asdict(record), indent=1, default=str, ensure_ascii=False)
    Storage.of(place).write_atomic(content.encode())
    return place


def without_secrets(value: Any) -> Any:
    """The same nesting of dicts and lists; what a key calls a secret is replaced: records and reports are passed on."""
    if isinstance(value, dict):
        return {
            name: "(not shown)" if _SECRET.search(str(name)) and isinstance(part, str) else without_secrets(part)
            for name, part in value.items()
        }
    return [without_secrets(part) for part in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
    """Return the versions of Python, of the libraries that decide results, and of this code in git."""
    found = {"python": platform.python_version()}
    for name in ("sparkdl", "pyspark", "torch", "horovod", "pyarrow", "deltalake", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found["code"] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["code"] = "unknown"
    return found


def print_summary(record: RunRecord, console: Console | None = None) -> None:
    """Print what a person wants to know in ten seconds."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary_lines(record):
        table.add_row(name, text)
    style = STATUS_STYLE.get(record.status, "white")
    title = f"[bold {style}]{record.job}: {record.status}[/] in {record.seconds:.1f} s"
    (console or Console()).print(Panel(table, title=title, title_align="left", border_style=style, expand=False))


def summary_lines(record: RunRecord) -> list[tuple[str, str]]:
    """Return the summary as pairs of a name and a text."""
    lines: list[tuple[str, str]] = []
    if record.message:
        lines.append(("why", record.message))
    if record.rows:
        rows = record.rows
        lines.append(
            (
                "rows",
                f"{rows.read:,} read = {rows.written:,} features + {rows.quarantined:,} quarantined "
                f"+ {rows.duplicates:,} duplicates, {_days(rows.days)}",
            )
        )
    if record.training:
        run = record.training
        early = ", stopped early" if run.stopped_early else ""
        lines.append(
            (
                "training",
                f"{run.ranks} ranks ({run.backend}), {run.shards} shards, {run.steps:,} steps, {run.epochs} epochs "
                f"(best {run.best_epoch}{early}), {run.rows_per_second:,.0f} rows/s",
            )
        )
    if record.quality:
        lines.append(("error", _quality(record.quality)))
    if record.publication:
        done = record.publication
        moved = "moved to it" if done.alias_moved else f"stays at version {done.champion}"
        reason = f" ({done.reason})" if done.reason else ""
        lines.append(("model", f"{done.model} version {done.version}, champion {moved}{reason}"))
    if record.predictions:
        scored = record.predictions
        error = f", RMSE {scored.rmse:.3f} min" if scored.rmse is not None else ""
        floor = f" (noise floor {scored.floor_rmse:.3f})" if scored.floor_rmse is not None else ""
        lines.append(
            ("predictions", f"{scored.rows:,} rows, {_days(scored.days)}, by version {scored.version}{error}{floor}")
        )
    if record.stages:
        spent = sorted(record.stages.items(), key=lambda item: -item[1])
        lines.append(("time", " · ".join(f"{name} {seconds:.1f} s" for name, seconds in spent)))
    lines += [(name, place) for name, place in record.places.items()]
    return lines


def _quality(quality: Quality) -> str:
    text = f"RMSE {quality.rmse:.3f} min on {_days(quality.days)}"
    if quality.floor_rmse and quality.above_floor is not None:
        text += f": {100 * quality.above_floor:.1f} % above the noise floor {quality.floor_rmse:.3f}"
    if quality.mean_rmse is not None:
        text += f"; plain mean {quality.mean_rmse:.3f}"
    if quality.champion_rmse is not None:
        text += f"; former champion {quality.champion_rmse:.3f}"
    return text


def _days(days: list[str]) -> str:
    if len(days) <= 1:
        return days[0] if days else "no days"
    return f"{len(days)} days {days[0]} to {days[-1]}"
