"""Places that executors will read and write, tried from where they run."""

from __future__ import annotations

import os
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.compat.spark_errors import worker_python_error
from sparkdl.compat.spark_master import is_connect, is_local, master_of
from sparkdl.storage.files import TEMPORARY, Storage
from sparkdl.storage.session import is_here

if TYPE_CHECKING:
    import pyarrow

_MOST_TASKS = 64
_known: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # by session, what executors can write


def problems_on_executors(
    places: Mapping[str, Storage], spark: Any, problem_of: Callable[[Storage], str]
) -> dict[str, str]:
    """What executors say of places that the driver can write, by the places' names; nothing where all is well.

    Executors may lack a folder of the driver's own disk, or a right or a way to a filesystem. One short job asks them,
    and only where they may be on other machines than the driver. The session is used by its methods alone: pyspark is
    not imported.

    Args:
        places: by what they are called.
        spark: the session.
        problem_of: tries a place; returns a sentence, or nothing.

    Raises:
        ClusterError: the executors' Python lacks a module.
    """
    reached = _known.setdefault(spark, set())
    new_places = {name: storage for name, storage in places.items() if not _covered(storage, reached)}
    if not new_places or _all_here(spark):
        return {}
    with ExitStack() as stack:
        marks = {name: _disk_mark(storage, stack) for name, storage in new_places.items()}
        look = _Look({name: (storage, marks[name]) for name, storage in new_places.items()}, problem_of)
        try:
            rows = _row_for_each_executor(spark).mapInArrow(look, "name string, problem string").collect()
        except Exception as error:
            lacking = worker_python_error(error)
            if lacking is not None:
                raise lacking from error
            return {}  # the work itself says why, in its own words
    problems: dict[str, str] = {}
    for name, problem in sorted(tuple(row) for row in rows):
        problems.setdefault(name, problem)
    reached |= {storage.uri for name, storage in new_places.items() if name not in problems}
    return problems


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    while not os.path.lexists(path):
        path = path.parent
    return path


@dataclass(frozen=True)
class _Look:
    """What each task does: places by name, and for those of the driver's disk the file that it has put there."""

    places: Mapping[str, tuple[Storage, str | None]]
    problem_of: Callable[[Storage], str]

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            pass
        problems = {name: self.problem(storage, mark) for name, (storage, mark) in self.places.items()}
        rows = [{"name": name, "problem": problem} for name, problem in problems.items() if problem]
        yield pa.RecordBatch.from_pylist(rows, pa.schema([("name", pa.string()), ("problem", pa.string())]))

    def problem(self, storage: Storage, mark: str | None) -> str:
        """What is wrong with one place here."""
        if mark is not None and not os.path.exists(mark):
            return (
                f"the executor on {socket.gethostname()} has another disk at {storage.uri} than the driver: give a "
                "folder that all machines share, or a URI such as s3://bucket/data or hdfs://host/data"
            )
        problem = self.problem_of(storage)
        return f"the executor on {socket.gethostname()} {problem}" if problem else ""


def _disk_mark(storage: Storage, stack: ExitStack) -> str | None:
    """Put a file where a local place will be, for as long as the stack is open."""
    path = storage.local_path()
    if path is None:
        return None
    folder = nearest_folder(path)
    return stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY)).name


def on_one_machine(spark: Any) -> bool:
    """Whether all tasks run on this machine, and so share its disk."""
    return master_of(spark).startswith("local") and (not is_connect(spark) or is_here(spark.client.host))


def _all_here(spark: Any) -> bool:
    """Whether tasks run in a process of this machine, under this user."""
    return is_local(spark) and on_one_machine(spark)


def _covered(storage: Storage, reached: set[str]) -> bool:
    """Whether a place, or a folder that it lies in, has been tried."""
    uri = storage.uri
    return any(uri == parent or uri.startswith(f"{parent.rstrip('/')}/") for parent in reached)


def _row_for_each_executor(spark: Any) -> Any:
    """A row or so for every executor, as far as Spark spreads tasks."""
    if is_connect(spark):
        return spark.range(_MOST_TASKS)  # in as many partitions as the server has slots
    tasks = min(_MOST_TASKS, int(spark.sparkContext.defaultParallelism))
    return spark.range(0, tasks, 1, tasks)
