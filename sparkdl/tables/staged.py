"""A write of a table between its halves: tasks write files, the driver commits them or takes them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.compat.column_names import Task
from sparkdl.compat.spark_errors import task_errors
from sparkdl.errors import ConfigError, ConflictError, DataError, SchemaError
from sparkdl.storage import Storage
from sparkdl.tables.commit import WritePlan
from sparkdl.tables.delta import optimistic
from sparkdl.tables.engine import WriteResult
from sparkdl.tables.parquet import FILE_ROW_DDL, FileRow, WriteTask
from sparkdl.tables.vacuum import written_by


@dataclass(frozen=True, kw_only=True)
class StagedWrite:
    """One write of a table; until its commit no reader sees anything of it.

    ``Table.write`` does both halves; whoever writes two tables in one pass over the rows, or looks at what was written
    first, has the halves here.

    Attributes:
        root: the table's folder.
        plan: what the commit replaces.
        task: writes the files, in Spark's tasks.
    """

    root: Storage
    plan: WritePlan
    task: WriteTask

    def run(self, frame: Any, task: Task) -> WriteResult:
        """Let the tasks of a frame write, then commit what they wrote; if one fails for good, nothing is left.

        Args:
            frame: a Spark DataFrame; each of its partitions is the input of a task.
            task: for ``mapInArrow``: takes batches of the frame, hands them or others to ``self.task``.

        Raises:
            SparkdlError: as ``commit``, and what a task raised.
        """
        try:
            with task_errors():
                files = [FileRow(*row) for row in frame.mapInArrow(task, FILE_ROW_DDL).collect()]
        except BaseException:  # a task failed for good: remove what the others wrote
            self.abandon()
            raise
        return self.commit(files)

    def commit(self, files: Sequence[FileRow]) -> WriteResult:
        """Make the files that the tasks have written the table's, in one commit; if it is refused, remove them.

        Raises:
            SchemaError: the columns are not the table's.
            DataError: rows lie outside of the partitions to replace, or nulls are in a column that forbids them.
            ConflictError: other writers committed first, again and again.
            StorageError: the commit failed.
        """
        try:
            result = optimistic(self.plan.uri, lambda: self.plan.commit(files, self.task.write_id))
        except (ConfigError, SchemaError, DataError, ConflictError):
            self.abandon()  # it was refused: after any other error it may have landed
            raise
        if files and not result.committed:  # another writer committed the same piece of work meanwhile
            self.abandon()
        return result

    def abandon(self) -> None:
        """Remove what the tasks have written."""
        for storage in written_by(self.root, self.task.write_id, len(self.task.partition_by)):
            storage.delete()
