"""The record of a run: what it read, did, decided and left behind, as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.documents.typed import Count, encode, read
from sparkdl.errors import (
    CancelledError,
    ClusterError,
    ConflictError,
    PreflightError,
    SparkdlError,
    StoreUnavailableError,
    TrainingError,
)
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.lease import LeaseTakenError
from sparkdl.pipeline.state.receipts import StepNote
from sparkdl.pipeline.state.results import Drifted, Evaluated, Live, Trained
from sparkdl.storage import Storage

Outcome = Literal[
    "running", "promoted", "scored", "stopped", "nothing new", "not promoted", "lost", "refused", "failed"
]
EXIT_CODES: Mapping[Outcome, int] = {
    "promoted": 0,
    "scored": 0,
    "stopped": 0,
    "nothing new": 10,
    "not promoted": 20,
    "lost": 30,
}
"""The exit codes of runs that raised nothing, by outcome."""


@dataclass(kw_only=True)
class RunRecord:
    """One run of a pipeline.

    Attributes:
        pipeline: its name.
        run_id: sorts by time.
        started: ISO 8601 in UTC.
        outcome: what came of it.
        message: one sentence about that.
        until: the last step that was asked for; None asks for all.
        train: whether learning was asked for.
        exit_code: 0 promoted, scored, or stopped as asked or where neither a model nor predictions followed from what
            was done, 10 nothing new, 20 not promoted, 30 lost a race, 1 refused, 2 cluster, 3 training, 4 an error
            nobody foresaw, 5 a store that did not answer, 130 interrupted.
        seconds: wall-clock.
        settings: the file, after overrides and defaults, as ``PipelineFile.resolved`` shows it.
        windows: what was ingested, and what trains, validates and is scored; ``deleted`` are those that the source no
            longer holds and whose rows stay, ``removed`` those whose rows this run has taken out, ``ahead`` those that
            begin later.
        source_state: the hash of the source as it was ingested; None where only Spark can tell, or it was not.
        rows: read, kept, quarantined and duplicates of the windows that were ingested; by part of the split, those
            that were learned from.
        warned: rows of these windows that were kept and broke an expectation that only warns, by its name.
        unlabelled: rows that have no label yet and were left out, by part of the split.
        books: the receipt of each of these windows, with its rows in the source and by reason.
        steps: what was done, and what was kept of earlier runs.
        trained: what the training showed; None where none was due.
        evaluated: what the gate said.
        drift: how new windows compare with the champion's training rows; None where the run did not come so far.
        live: errors of earlier predictions whose labels have arrived; None likewise.
        model: name and version that was published, the champion's version now, and, of a run that came to work,
            ``before`` it.
        predictions: rows by window that this run scored.
        places: address by what lies there.
        error: type of the error that ended it.
        versions: of Python and of the libraries that decide results, and of the file's modules where git knows them.
    """

    pipeline: str
    run_id: str
    started: str
    outcome: Outcome = "running"
    message: str = ""
    exit_code: int = 0
    seconds: float = 0.0
    until: str | None = None
    train: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    windows: dict[str, list[str]] = field(default_factory=dict)
    source_state: str | None = None
    rows: dict[str, Count] = field(default_factory=dict)
    warned: dict[str, Count] = field(default_factory=dict)
    unlabelled: dict[str, Count] = field(default_factory=dict)
    books: list[WindowReceipt] = field(default_factory=list)
    steps: list[StepNote] = field(default_factory=list)
    trained: Trained | None = None
    evaluated: Evaluated | None = None
    drift: Drifted | None = None
    live: Live | None = None
    model: dict[str, int | str | None] = field(default_factory=dict)
    predictions: dict[str, Count] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def promoted(self) -> bool:
        """Whether the version that it published became the champion, also where it failed afterwards."""
        version, champion = self.model.get("version"), self.model.get("champion")
        moved = self.model.get("before", champion) != champion
        return self.outcome == "promoted" or (moved and version == champion)

    def end(self, outcome: Outcome, message: str) -> None:
        """Say what came of it."""
        self.outcome, self.message, self.exit_code = outcome, message, EXIT_CODES.get(outcome, 1)

    def fail(self, error: BaseException) -> None:
        """Say which error ended it."""
        self.exit_code = exit_code_of(error)
        self.outcome = {1: "refused", 30: "lost"}.get(self.exit_code, "failed")  # type: ignore[assignment]
        self.error = type(error).__name__
        text = str(error).encode(errors="backslashreplace").decode()  # of names of files that are no UTF-8
        without_words = "interrupted" if isinstance(error, KeyboardInterrupt) else self.error
        self.message = " ".join(text.split()) or without_words

    def write(self, file: Storage) -> None:
        """Write it, whole or not at all."""
        file.write_atomic(encode(self))

    @staticmethod
    def load(file: Storage) -> RunRecord:
        """Read what ``write`` wrote.

        Raises:
            StorageError: it cannot be read.
            IntegrityError: it holds something else.
        """
        return read(file, RunRecord, "it was altered, or another sparkdl wrote it", 256 << 20)


def exit_code_of(error: BaseException) -> int:
    """The exit code that an error ends a run with, see ``RunRecord``."""
    if isinstance(error, KeyboardInterrupt | CancelledError):
        return 130
    if isinstance(error, LeaseTakenError | ConflictError):
        return 30
    if isinstance(error, ClusterError) and not isinstance(error, PreflightError):
        return 2
    if isinstance(error, TrainingError):
        return 3
    if isinstance(error, StoreUnavailableError):
        return 5
    return 1 if isinstance(error, SparkdlError) else 4
