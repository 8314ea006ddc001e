"""Delta tables without a JAR: written by a Spark stage in one commit, read by Spark at a pinned version.

Enters: a Spark DataFrame, or a small Arrow table. Leaves: committed versions of a Delta table; DataFrames and Arrow
tables of any version. The files are written and read by Spark's own tasks, the log by delta-rs on the driver. One
writer engine per table: do not let Spark's Delta JAR and this module write the same one at the same time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from sparkdl.compat.column_names import named_columns
from sparkdl.compat.spark_errors import task_errors
from sparkdl.errors import ConflictError, StorageError
from sparkdl.storage import Storage, check_places
from sparkdl.tables.commit import TableFile, WritePlan, WriteResult, active_files, has_committed
from sparkdl.tables.delta import (
    AppTransaction,
    check_same_schema,
    commit_properties,
    creating,
    delta_address,
    delta_options,
    delta_schema,
    open_table,
    optimistic,
    table_of,
)
from sparkdl.tables.features import check_readable, check_scannable, check_writable
from sparkdl.tables.parquet import FILE_ROW_DDL, FileRow, WriteTask, partition_text
from sparkdl.tables.reading import frame_of_files, spark_address
from sparkdl.tables.staged import StagedWrite
from sparkdl.tables.vacuum import orphans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["AppTransaction", "Table", "WriteResult"]

Mode = Literal["append", "overwrite", "replace"]


@dataclass(frozen=True)
class Table:
    """One Delta table, by its address.

    Attributes:
        uri: a path or URI (``s3://...``); a name of a catalog is none.
        storage_options: delta-rs's options for the store (``AWS_ENDPOINT_URL`` ...); for S3 they default to fsspec's
            configuration.
    """

    uri: str
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", self._root.uri)

    @cached_property
    def _root(self) -> Storage:
        """What the given address means; found out once, when the table is made."""
        return table_of(self.uri, self.storage_options)

    def exists(self) -> bool:
        """Whether a table is there."""
        return open_table(self.uri, self.storage_options) is not None

    def version(self) -> int:
        """The newest version.

        Raises:
            StorageError: there is no table.
        """
        return self._open().version()

    def schema_json(self, version: int | None = None) -> str:
        """The schema as JSON; Spark's ``StructType.fromJson`` and Delta spell it alike."""
        return str(self._open(version).schema().to_json())

    def columns(self, version: int | None = None) -> list[str]:
        """The columns' names in order."""
        return [field["name"] for field in json.loads(self.schema_json(version))["fields"]]

    def schema(self, version: int | None = None) -> pa.Schema:
        """The columns' names and Arrow types in order."""
        return pa.schema(self._open(version).schema().to_arrow())

    def check_readable(self) -> None:
        """Refuse a table whose files alone do not carry its rows.

        Raises:
            StorageError: names the feature, or there is no table.
        """
        check_readable(self._open(), self.uri)

    def partition_columns(self) -> list[str]:
        """The partition columns' names in order."""
        return list(self._open().metadata().partition_columns)

    def partitions(self, version: int | None = None) -> list[dict[str, str | None]]:
        """The partitions that hold files, values as text."""
        found = {tuple(sorted(file.partition.items())) for file in self.files(version)}
        return [dict(values) for values in sorted(found, key=str)]

    def files(self, version: int | None = None) -> list[TableFile]:
        """The files that a version is made of."""
        return active_files(self._open(version))

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The commits, newest first: version, timestamp (ms), operation, and what the writer added."""
        return list(self._open().history(limit))

    def transaction_version(self, application: str) -> int | None:
        """The last version that ``application`` committed; None if it never did, or there is no table."""
        table = open_table(self.uri, self.storage_options)
        return None if table is None else table.transaction_version(application)

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        """Read the table at ``version`` (None: the newest) as Spark reads Parquet, at native speed.

        The files are pinned when this is called, so later writes never change the DataFrame. Rows that a deletion
        vector hides are left out, and columns have the table's names, whatever the files call them.

        Raises:
            StorageError: there is no such table or version, or it has features that only Spark's Delta reads.
        """
        table = self._open(version)
        check_readable(table, self.uri)
        return frame_of_files(spark, table, spark_address(self._root.spark_uri))

    def write(
        self,
        frame: DataFrame,
        mode: Mode = "append",
        *,
        partition_by: Sequence[str] = (),
        partitions: Sequence[Mapping[str, Any]] | None = None,
        transaction: AppTransaction | None = None,
        overwrite_schema: bool = False,
        compression: str = "snappy",
    ) -> WriteResult:
        """Write a DataFrame as one commit; nothing of it is visible before, and nothing if it fails.

        Args:
            frame: the rows; its columns are the table's, in any order.
            mode: ``"append"``; ``"overwrite"`` replaces all rows; ``"replace"`` replaces whole partitions.
            partition_by: partition columns of a table that this call creates or overwrites with a new schema.
            partitions: with ``mode="replace"``, the partitions to replace (``[{"day": date(2024, 1, 2)}]``), also those
                that got no rows; None means those that the rows fall into.
            transaction: the identity of this piece of work: if it has committed before, nothing happens.
            overwrite_schema: with ``mode="overwrite"``, let the rows change the table's columns.
            compression: Parquet codec: ``"snappy"``, ``"zstd"``, ``"lz4"`` or ``"none"``.

        Raises:
            SchemaError: the columns are not the table's, or of a type that Delta cannot hold.
            DataError: rows lie outside ``partitions``, or nulls are in a column that forbids them.
            ConflictError: other writers committed first, again and again.
            StorageError: the place cannot be written, or the table has features that this writer would break.
        """
        before = open_table(self.uri, self.storage_options)
        if before is not None and has_committed(before, transaction):
            return WriteResult(version=before.version(), rows=0, files=0, bytes=0, partitions=(), committed=False)
        staged = self.stage(
            frame.schema.json(),
            mode,
            partition_by=partition_by,
            partitions=partitions,
            transaction=transaction,
            overwrite_schema=overwrite_schema,
            compression=compression,
        )
        check_places({"table": self._root}, frame.sparkSession)
        try:
            with task_errors():
                plain, named = named_columns(frame, staged.task)
                files = [FileRow(*row) for row in plain.mapInArrow(named, FILE_ROW_DDL).collect()]
        except BaseException:  # a task failed for good: remove what the others wrote
            staged.abandon()
            raise
        return staged.commit(files)

    def stage(
        self,
        schema: str,
        mode: Mode = "append",
        *,
        partition_by: Sequence[str] = (),
        partitions: Sequence[Mapping[str, Any]] | None = None,
        transaction: AppTransaction | None = None,
        overwrite_schema: bool = False,
        compression: str = "snappy",
    ) -> StagedWrite:
        """Begin what ``write`` does as a whole: the caller lets tasks write files, then commits or abandons them.

        Args:
            schema: of the rows, as ``df.schema.json()``.
            mode: as the others, see ``write``.
            partition_by: see there.
            partitions: see there.
            transaction: see there.
            overwrite_schema: see there.
            compression: see there.

        Raises:
            SchemaError: the columns are not the table's, or of a type that Delta cannot hold.
            StorageError: the table has features that this writer would break.
        """
        plan = WritePlan(
            uri=self.uri,
            options=self.storage_options,
            mode=mode,
            schema=delta_schema(schema),
            partition_by=tuple(partition_by),
            partitions=None if partitions is None else tuple(_as_text(partition) for partition in partitions),
            transaction=transaction,
            overwrite_schema=overwrite_schema,
        )
        layout = plan.layout(open_table(self.uri, self.storage_options))
        task = WriteTask(root=self._root, write_id=uuid.uuid4().hex[:12], partition_by=layout, compression=compression)
        return StagedWrite(root=self._root, plan=plan, task=task)

    def append(
        self,
        rows: pa.Table,
        *,
        expected_version: int | None = None,
        transaction: AppTransaction | None = None,
        metadata: Mapping[str, str] | None = None,
        new_columns: bool = False,
    ) -> int:
        """Append a small Arrow table and return the version that holds it; creates the table if there is none.

        Args:
            rows: a few thousand rows at most; more belong into ``write``.
            expected_version: commit only if this is still the newest version; -1 means no table yet, None any.
            transaction: as in ``write``.
            metadata: JSON-able facts for the commit's entry in the history.
            new_columns: let the rows bring columns that the table lacks, and lack some that it has: null stands there.

        Raises:
            ConflictError: the table is not at ``expected_version``.
            SchemaError: the columns are not the table's.
        """
        properties = commit_properties(transaction, **{**(metadata or {}), "isBlindAppend": expected_version is None})

        def attempt() -> int:
            table = open_table(self.uri, self.storage_options)
            newest = -1 if table is None else table.version()
            if transaction and table is not None and has_committed(table, transaction):
                return newest
            if expected_version is not None and newest != expected_version:
                raise self._moved_on(expected_version, newest)
            if table is not None:
                check_writable(table, self.uri)
                check_same_schema(self.uri, table.schema(), Schema.from_arrow(rows.schema), shared=new_columns)
                how: Literal["merge"] | None = "merge" if new_columns else None
                write_deltalake(table, rows, mode="append", schema_mode=how, commit_properties=properties)
            else:
                address, options = delta_address(self.uri), delta_options(self.uri, self.storage_options)
                with creating(self.uri, self.storage_options):
                    write_deltalake(address, rows, mode="error", storage_options=options, commit_properties=properties)
            return newest + 1

        return optimistic(self.uri, attempt)

    def merge(self, rows: pa.Table, on: Sequence[str]) -> int:
        """Update the rows that agree in the columns ``on`` and insert the others; return the version.

        Raises:
            StorageError: there is no table, or the commit fails.
        """
        match = " AND ".join(f"old.`{name}` = new.`{name}`" for name in on)

        def attempt() -> int:
            table = self._open()
            check_writable(table, self.uri)
            check_scannable(table, self.uri)
            check_same_schema(self.uri, table.schema(), Schema.from_arrow(rows.schema))
            merger = table.merge(
                rows, match, source_alias="new", target_alias="old", commit_properties=commit_properties()
            )
            merger.when_matched_update_all().when_not_matched_insert_all().execute()
            return int(table.version())

        return optimistic(self.uri, attempt)

    def rows(
        self, columns: Sequence[str] | None = None, *, where: str | None = None, version: int | None = None
    ) -> pa.Table:
        """Read a small table, or a small part of one, into Arrow without Spark.

        Args:
            columns: all by default.
            where: a SQL predicate, e.g. ``"day = '2024-01-02'"``.
            version: the newest by default.

        Raises:
            StorageError: there is no such table or version, or the predicate is wrong.
        """
        table = self._open(version)
        check_scannable(table, self.uri)
        try:
            # to_pyarrow_table and to_pandas abort the interpreter at exit with pyarrow 25 and 26; scan does not
            return pa.table(table.scan(list(columns) if columns else None, where))
        except DeltaError as cause:
            raise StorageError(
                f"cannot read from the Delta table {self.uri}: {cause}; check columns and predicate"
            ) from cause

    def snapshot(self) -> tuple[int, pa.Table | None]:
        """The newest version with its rows, for a decision that ``append(expected_version=...)`` commits.

        Returns:
            ``(-1, None)`` where there is no table.
        """
        table = open_table(self.uri, self.storage_options)
        if table is None:
            return -1, None
        check_scannable(table, self.uri)
        return table.version(), pa.table(table.scan())

    def compact(self) -> None:
        """Rewrite many small files as few; rows and older versions stay as they are. A lost race is no error."""
        table = self._open()
        check_writable(table, self.uri)
        with suppress(CommitFailedError):
            table.optimize.compact(commit_properties=commit_properties())

    def vacuum(self, older_than: timedelta = timedelta(days=1)) -> list[str]:
        """Delete files of writes that never committed; return their paths.

        Args:
            older_than: younger files may belong to a write that is still running.
        """
        removed = orphans(self._open(), self._root, older_than)
        for storage in removed:
            storage.delete()
        return [storage.uri for storage in removed]

    def _open(self, version: int | None = None) -> DeltaTable:
        table = open_table(self.uri, self.storage_options, version)
        if table is None:
            raise StorageError(f"there is no Delta table at {self.uri}: check the path, or write the table first")
        return table

    def _moved_on(self, expected: int, newest: int) -> ConflictError:
        return ConflictError(
            f"the Delta table {self.uri} is at version {newest}, this commit was made for {expected}: read it again"
        )


def _as_text(partition: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: partition_text(value) for name, value in partition.items()}
