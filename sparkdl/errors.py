"""Every error that sparkdl raises on purpose, drawn as one tree.

Enters: nothing. Leaves: exception classes that survive pickling, since most of them cross a process boundary.

    SparkdlError
    ├── ConfigError (ValueError)          a parameter or a configuration file is wrong
    ├── SchemaError (TypeError)           a column is missing, or has a type that cannot be used
    ├── DataError (ValueError)            the rows themselves are wrong: nulls, NaN, ids out of range, no rows
    ├── StorageError (OSError)            a file or table cannot be read or written
    │   ├── ConflictError                 somebody else committed first
    │   └── IntegrityError                a file is not as it was written: its hash, its size, a name in it
    ├── ClusterError (RuntimeError)       ranks cannot be started or reached
    │   ├── PreflightError                the cluster cannot run the job: refused before it starts
    │   ├── WorldSizeError                the number of running ranks is not the number asked for
    │   ├── LaunchTimeoutError            ranks did not start or did not end in time
    │   ├── RankFailedError               a rank raised, or died: names it, its traceback and its last log lines
    │   └── CancelledError                the user interrupted the run
    └── TrainingError (RuntimeError)      the training itself went wrong
        ├── NonFiniteLossError            the loss became NaN or infinite
        ├── CheckpointError               a checkpoint is missing, damaged or does not fit
        └── BundleError                   a published model is damaged, or cannot be rebuilt safely

A message is one sentence: what is wrong, both values, and what to do.
"""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CancelledError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "ConflictError",
    "DataError",
    "IntegrityError",
    "LaunchTimeoutError",
    "NonFiniteLossError",
    "PreflightError",
    "RankFailedError",
    "SchemaError",
    "SparkdlError",
    "StorageError",
    "TrainingError",
    "WorldSizeError",
]


class SparkdlError(Exception):
    """The root of the tree: catch it to catch whatever sparkdl refuses or reports."""


class ConfigError(SparkdlError, ValueError):
    """A parameter or a configuration file is wrong."""


class SchemaError(SparkdlError, TypeError):
    """A column is missing, or has a type that cannot be used."""


class DataError(SparkdlError, ValueError):
    """The rows themselves are wrong: nulls, NaN, ids out of range, no rows at all."""


class StorageError(SparkdlError, OSError):
    """A file or a table cannot be read or written."""


class ConflictError(StorageError):
    """Somebody else committed first: read again, then decide again."""


class IntegrityError(StorageError):
    """A file is not as it was written: its hash or size differs, or a name in it leads elsewhere."""


class ClusterError(SparkdlError, RuntimeError):
    """Ranks cannot be started or reached."""


class PreflightError(ClusterError):
    """The cluster cannot run the job; nothing was started."""


class WorldSizeError(ClusterError):
    """The number of ranks that run is not the number that was asked for."""


class LaunchTimeoutError(ClusterError):
    """Ranks did not start, or did not end, within the time they were given.

    Attributes:
        rank: the first one that holds the others up; None where ranks did not start.
        rank_traceback: where that rank was when the time was up, empty when it did not answer.
        log_tail: that rank's last lines of output, at most 100.
    """

    def __init__(
        self, message: str, rank: int | None = None, rank_traceback: str = "", log_tail: tuple[str, ...] = ()
    ) -> None:
        self.message = message
        self.rank = rank
        self.rank_traceback = rank_traceback
        self.log_tail = tuple(log_tail)
        super().__init__(message, rank, rank_traceback, self.log_tail)

    def __str__(self) -> str:
        return self.message + _details(self.rank, self.rank_traceback, self.log_tail)


class CancelledError(ClusterError):
    """The user interrupted the run; every rank was ended."""


class RankFailedError(ClusterError):
    """A rank raised or died.

    Attributes:
        rank: the first rank at fault.
        cause: ``"ExceptionType: message"`` as that rank raised it.
        rank_traceback: that rank's traceback, empty when the process died without one.
        log_tail: that rank's last lines of output, at most 100.
    """

    def __init__(self, rank: int, cause: str, rank_traceback: str = "", log_tail: tuple[str, ...] = ()) -> None:
        self.rank = rank
        self.cause = cause
        self.rank_traceback = rank_traceback
        self.log_tail = tuple(log_tail)
        super().__init__(rank, cause, rank_traceback, self.log_tail)

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.cause}" + _details(self.rank, self.rank_traceback, self.log_tail)


def _details(rank: int | None, traceback: str, log_tail: tuple[str, ...]) -> str:
    text = ""
    if traceback:
        text += f"\n\nTraceback of rank {rank}:\n{traceback.rstrip()}"
    if log_tail:
        lines = "\n".join(log_tail)
        text += f"\n\nLast {len(log_tail)} lines of rank {rank}:\n{lines}"
    return text


class TrainingError(SparkdlError, RuntimeError):
    """The training itself went wrong."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite; the message names the step, the rank and the batch."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class BundleError(TrainingError):
    """A published model is damaged, or cannot be rebuilt without running code from it."""
