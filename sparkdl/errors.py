"""Every error that sparkdl raises on purpose: the tree is drawn at its root."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

__all__ = [
    "BundleError",
    "CancelledError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "ConflictError",
    "DataError",
    "FencedError",
    "IntegrityError",
    "LaunchTimeoutError",
    "NoRowsError",
    "NonFiniteLossError",
    "PipelineFileError",
    "PreflightError",
    "RankFailedError",
    "RemoteTraceback",
    "SchemaError",
    "SparkdlError",
    "StorageError",
    "StoreUnavailableError",
    "TrainingError",
    "UnreachableError",
    "WorldSizeError",
    "first_line",
]


_SHOWN_FRAMES = 3
LIBRARIES = tuple(
    {str(Path(__file__).parent), *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))}
)
"""Folders whose code is not the user's own."""
_REMOTE_LIBRARY = re.compile(r"/(site-packages|dist-packages|sparkdl|lib/python3\.\d+)/")


class SparkdlError(Exception):
    """The root of the tree: catch it to catch whatever sparkdl refuses or reports.

        SparkdlError
        ├── ConfigError (ValueError)          a parameter or a configuration file is wrong
        │   └── PipelineFileError             a pipeline file is wrong: tells every line that is
        ├── SchemaError (TypeError)           a column is missing, or has a type that cannot be used
        ├── DataError (ValueError)            the rows themselves are wrong: nulls, NaN, ids out of range
        │   └── NoRowsError                   there are none
        ├── StorageError (OSError)            a file or table cannot be read or written
        │   ├── ConflictError                 somebody else committed first
        │   │   └── FencedError               a later run has taken over: an earlier one commits nothing any more
        │   ├── StoreUnavailableError         the store does not answer: another attempt may succeed
        │   └── IntegrityError                a file is not as it was written: its hash, its size, a name in it
        ├── ClusterError (RuntimeError)       ranks cannot be started or reached
        │   ├── PreflightError                the cluster cannot run the job: refused before it starts
        │   ├── WorldSizeError                the number of running ranks is not the number asked for
        │   ├── LaunchTimeoutError            ranks did not start or did not end in time
        │   ├── UnreachableError              a rank lost another, or the driver: another attempt may succeed
        │   ├── RankFailedError               a rank raised, or died: names it, its traceback and its last log lines
        │   └── CancelledError                the user interrupted the run
        └── TrainingError (RuntimeError)      the training itself went wrong
            ├── NonFiniteLossError            the loss became NaN or infinite
            ├── CheckpointError               a checkpoint is missing, damaged or does not fit
            └── BundleError                   a published model is damaged, or cannot be rebuilt safely

    A message is one sentence: what is wrong, both values, and what to do. What else is known, such as the traceback of
    a rank, is an attribute, and in ``__cause__``, which Python prints above the sentence. A notebook shows the
    sentence, and the line of the user's own code. Errors survive pickling, since most of them cross a process boundary.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and Jupyter print of an error that nobody caught: they ask for this method."""
        lines = [f"{type(self).__name__}: {self}", *_own_frames(self.__traceback__)]
        lines += _own_remote_frames(getattr(self, "rank", None), getattr(self, "rank_traceback", ""))
        tail = getattr(self, "log_tail", ())[-_SHOWN_FRAMES:]
        lines += (
            [f"  last printed by rank {getattr(self, 'rank', None)}:", *(f"    {line}" for line in tail)]
            if tail
            else []
        )
        if self.__cause__ is not None:
            lines.append("  the rest: import sys, traceback; traceback.print_exception(sys.last_value)")
        return lines


def first_line(error: object) -> str:
    """The first line of what an error says; the name of its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _own_frames(trace: TracebackType | None) -> list[str]:
    """The lines of the user's own code, of a cell or a file, where an error came up on the driver."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(LIBRARIES)]
    return [
        f"  in {'the cell' if 'ipykernel' in frame.filename else frame.filename}, line {frame.lineno}: {frame.line}"
        for frame in frames[-_SHOWN_FRAMES:]
    ]


def _own_remote_frames(rank: int | None, text: str) -> list[str]:
    """The same on a rank, whose libraries may lie elsewhere; all frames where none is the user's."""
    frames = re.findall(r'^  File "(.+)", line (\d+), in .+\n(?:    (.+))?', text, re.MULTILINE)
    user_frames = [frame for frame in frames if not _REMOTE_LIBRARY.search(frame[0])] or frames
    lines = []
    for file, line, source in user_frames[-_SHOWN_FRAMES:]:
        location = "the cell" if "ipykernel" in file else file  # whose text the driver has, and a rank has not
        source = source or linecache.getline(file, int(line)).strip()
        lines.append(f"  on rank {rank} in {location}, line {line}: {source}")
    return lines


class RemoteTraceback(Exception):
    """What a rank left behind, as text: the last ``__cause__`` of an error that came from one."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


class ConfigError(SparkdlError, ValueError):
    """A parameter or a configuration file is wrong."""


class PipelineFileError(ConfigError):
    """A pipeline file is wrong; the message has one line for each place that is.

    Attributes:
        file: what the file is called.
        problems: one sentence each: ``file:line: section.key ...``.
    """

    def __init__(self, file: str, problems: tuple[str, ...]) -> None:
        self.file, self.problems = file, tuple(problems)
        super().__init__(file, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  ".join((f"{self.file} has {len(self.problems)} mistakes:", *self.problems))


class SchemaError(SparkdlError, TypeError):
    """A column is missing, or has a type that cannot be used."""


class DataError(SparkdlError, ValueError):
    """The rows themselves are wrong: nulls, NaN, ids out of range."""


class NoRowsError(DataError):
    """There are no rows at all."""


class StorageError(SparkdlError, OSError):
    """A file or a table cannot be read or written."""


class ConflictError(StorageError):
    """Somebody else committed first: read again, then decide again."""


class FencedError(ConflictError):
    """A later run has taken over, so that this one may commit nothing more: run again."""


class StoreUnavailableError(StorageError):
    """The store does not answer, or says itself that it cannot now; another attempt may succeed."""


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
        self.__cause__ = _remote(rank, rank_traceback, self.log_tail)

    def __str__(self) -> str:
        return self.message


class UnreachableError(ClusterError):
    """A rank does not reach another, or the driver; another attempt may succeed, and ``max_failures`` makes one."""


class CancelledError(ClusterError):
    """The user interrupted the run; every rank was ended."""


class RankFailedError(ClusterError):
    """A rank raised or died; what it raised itself is in ``__cause__``, where it can be rebuilt on the driver.

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
        self.__cause__ = _remote(rank, rank_traceback, self.log_tail)

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.cause}"


def _remote(rank: int | None, trace: str, log_tail: tuple[str, ...]) -> RemoteTraceback | None:
    parts = [f"Last {len(log_tail)} lines of rank {rank}:", *log_tail, ""] if log_tail else []
    parts += [f"Traceback of rank {rank}:", trace.rstrip()] if trace else []
    return RemoteTraceback("\n".join(parts)) if parts else None


class TrainingError(SparkdlError, RuntimeError):
    """The training itself went wrong."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite; the message names the step, the rank and the batch."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class BundleError(TrainingError):
    """A published model is damaged, or cannot be rebuilt without running code from it."""
