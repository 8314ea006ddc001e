"""The engine without a JAR: tables written by a Spark stage in one commit, read at a pinned version."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import ColumnProperties, DeltaTable, QueryBuilder, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from sparkdl.columns.names import quoted
from sparkdl.compat.arrow_streams import read_stream
from sparkdl.compat.column_names import named_columns
from sparkdl.config import require
from sparkdl.errors import DataError, StorageError
from sparkdl.storage import Storage, check_places, one_line, sha256_hex
from sparkdl.tables.commit import WritePlan, active_files, has_committed
from sparkdl.tables.delta import (
    check_same_schema,
    commit_properties,
    creating,
    delta_address,
    delta_options,
    delta_schema,
    open_table,
    optimistic,
    schema_of_rows,
)
from sparkdl.tables.engine import AppTransaction, WriteRequest, WriteResult, check_metadata, check_version
from sparkdl.tables.features import check_files, check_readable, check_scannable, check_times, check_writable
from sparkdl.tables.nulls import all_nulls, check_nulls
from sparkdl.tables.parquet import WriteTask, with_statistics
from sparkdl.tables.reading import deletion_vectors, frame_of_files, spark_address
from sparkdl.tables.record import TableFile
from sparkdl.tables.scan.plan import TableScan, Where, scan_of
from sparkdl.tables.staged import StagedWrite
from sparkdl.tables.vacuum import orphans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class DeltaRs:
    """One table by its address; the engine of ``Table`` where no JAR is, and for what Arrow tables are enough for.

    Spark's own tasks write and read the files, delta-rs on the driver the log.

    Attributes:
        root: its files.
        options: delta-rs's own for the store; None takes fsspec's configuration.
        allow_folders: addresses of further folders that files of the table may lie in.
    """

    root: Storage
    options: Mapping[str, str] | None = field(default=None, repr=False)
    allow_folders: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The table's address."""
        return self.root.uri

    def exists(self) -> bool:
        """Whether a table is there."""
        return open_table(self.uri, self.options) is not None

    def version(self) -> int:
        """The newest version.

        Raises:
            StorageError: there is no table.
        """
        return self._open().version()

    def table_id(self) -> str:
        """What tells the table from any other, also from one that is made anew at its address."""
        return str(self._open().metadata().id)

    def schema_json(self, version: int | None = None) -> str:
        """The schema as JSON; Spark's ``StructType.fromJson`` and Delta spell it alike."""
        return str(self._open(version).schema().to_json())

    def check_readable(self) -> None:
        """Refuse a table that Spark's Parquet reader does not read right, even with its vectors and names."""
        check_readable(self._open(), self.root, self.allow_folders)

    def partition_columns(self) -> list[str]:
        """The partition columns' names in order."""
        return list(self._open().metadata().partition_columns)

    def files(self, version: int | None = None) -> list[TableFile]:
        """The files that a version is made of."""
        table = self._open(version)
        check_files(table, self.root, self.allow_folders)
        vectors = {path: sha256_hex(words.tobytes())[:32] for path, words in deletion_vectors(table).items()}
        return [file._replace(deleted=vectors.get(file.path, "")) for file in active_files(table)]

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The commits, newest first: version, timestamp (ms), operation, and what the writer added."""
        return list(self._open().history(limit))

    def transaction_version(self, application: str) -> int | None:
        """The last version that ``application`` committed; None if it never did, or there is no table."""
        table = open_table(self.uri, self.options)
        return None if table is None else table.transaction_version(application)

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        """The rows of a version as Spark reads Parquet, its files pinned."""
        table = self._open(version)
        check_readable(table, self.root, self.allow_folders)
        return frame_of_files(spark, table, spark_address(self.root.spark_uri))

    def scan(self, where: Where, version: int | None = None) -> TableScan:
        """The files of a version that can hold rows of interest."""
        return scan_of(self._open(version), self.root, where, self.allow_folders)

    def write(self, frame: DataFrame, request: WriteRequest) -> WriteResult:
        """One commit of files that Spark's tasks write; nothing is left of one that fails."""
        previous = open_table(self.uri, self.options)
        if previous is not None and has_committed(previous, self.uri, request.transaction):
            return WriteResult(version=previous.version(), rows=0, files=0, bytes=0, partitions=(), committed=False)
        staged = self.stage(frame.schema.json(), request)
        check_places({"table": self.root}, frame.sparkSession)
        return staged.run(*named_columns(frame, staged.task))

    def stage(self, schema: str, request: WriteRequest) -> StagedWrite:
        """The first half of a write: the caller lets tasks write files, then commits or abandons them."""
        spelled_request = request.spelled(schema)
        plan = WritePlan(uri=self.uri, options=self.options, schema=delta_schema(schema), request=spelled_request)
        task = WriteTask(
            root=self.root,
            write_id=uuid.uuid4().hex[:12],
            partition_by=plan.layout(open_table(self.uri, self.options)),
            compression=request.compression,
        )
        return StagedWrite(root=self.root, plan=plan, task=task)

    def append(
        self,
        rows: pa.Table,
        *,
        expected_version: int | None = None,
        transaction: AppTransaction | None = None,
        metadata: Mapping[str, str] | None = None,
        new_columns: bool = False,
    ) -> int:
        """Append a small table; return the version that holds it."""
        check_metadata(metadata or {})
        columns = schema_of_rows(rows).to_json()
        address = delta_address(self.uri)
        letter = None if "://" in address else re.search(r"[\[\]|^]", os.path.realpath(address))
        require(
            letter is None,
            f"{self.uri} has {letter and letter[0]!r} in a folder's name, where delta-rs appends no rows: give the "
            "table another address",
        )
        facts = {**(metadata or {}), "isBlindAppend": expected_version is None}
        write_settings: Any = {
            "commit_properties": commit_properties(transaction, **facts),
            "writer_properties": _writer_properties(rows.schema),
        }

        def attempt() -> int:
            table = open_table(self.uri, self.options)
            newest = -1 if table is None else table.version()
            if table is not None and has_committed(table, self.uri, transaction):
                return newest
            check_version(self.uri, expected_version, newest)
            if table is not None:
                check_writable(table, self.uri)
                check_same_schema(self.uri, table.schema().to_json(), columns, shared=new_columns)
                check_nulls(self.uri, table.schema().to_json(), all_nulls(rows))
                write_deltalake(
                    table, rows, mode="append", schema_mode="merge" if new_columns else None, **write_settings
                )
            else:
                options = delta_options(self.uri, self.options)
                with creating(self.uri, self.options):
                    write_deltalake(address, rows, mode="error", storage_options=options, **write_settings)
            return newest + 1

        return optimistic(self.uri, attempt)

    def merge(self, rows: pa.Table, on: Sequence[str], transaction: AppTransaction | None = None) -> int:
        """Update the rows that agree in the columns ``on`` and insert the others; return the version."""
        columns = schema_of_rows(rows).to_json()
        values = {f"old.{quoted(name)}": f"new.{quoted(name)}" for name in rows.column_names}
        match = " AND ".join(f"old.{quoted(name)} = new.{quoted(name)}" for name in on)

        def attempt() -> int:
            table = self._open()
            if has_committed(table, self.uri, transaction):
                return table.version()
            check_writable(table, self.uri, removes=True)
            check_scannable(table, self.root, self.allow_folders)
            check_times(table, self.root)
            check_same_schema(self.uri, table.schema().to_json(), columns)
            check_nulls(self.uri, table.schema().to_json(), all_nulls(rows))
            merger = table.merge(
                rows,
                match,
                source_alias="new",
                target_alias="old",
                writer_properties=_writer_properties(rows.schema),
                commit_properties=commit_properties(transaction),
            )
            try:
                merger.when_matched_update(values).when_not_matched_insert(values).execute()
            except DeltaError as cause:
                if "multiple source rows" not in str(cause):
                    raise
                raise DataError(
                    f"several of these rows agree in {list(on)} with one row of the Delta table {self.uri}: keep one"
                ) from cause
            return int(table.version())

        return optimistic(self.uri, attempt)

    def claim(self, transaction: AppTransaction) -> None:
        """Commit a transaction without rows, if there is a table."""

        def attempt() -> None:
            table = open_table(self.uri, self.options)
            if table is None or has_committed(table, self.uri, transaction):
                return
            check_writable(table, self.uri)
            columns, properties = table.metadata().partition_columns, commit_properties(transaction)
            table.create_write_transaction([], "append", table.schema(), columns, commit_properties=properties)

        optimistic(self.uri, attempt)

    def rows(
        self, columns: Sequence[str] | None = None, where: str | None = None, version: int | None = None
    ) -> pa.Table:
        """A small table, or a small part of one, in Arrow without Spark."""
        return self._scanned(self._open(version), list(columns) if columns else None, where)

    def snapshot(self) -> tuple[int, pa.Table | None]:
        """The newest version with its rows, for a decision that ``append(expected_version=...)`` commits.

        Returns:
            ``(-1, None)`` where there is no table.
        """
        table = open_table(self.uri, self.options)
        return (-1, None) if table is None else (table.version(), self._scanned(table))

    def compact(self, file_bytes: int | None = None) -> None:
        """Rewrite many small files as few; rows and older versions stay as they are. A lost race is no error.

        The log gets a checkpoint, too: commits that ``journal.py`` made have asked for none.

        Args:
            file_bytes: files of this size are left alone; delta-rs's own choice by default.
        """
        table = self._open()
        check_files(table, self.root, self.allow_folders)
        check_writable(table, self.uri)
        check_times(table, self.root)
        with suppress(CommitFailedError):
            table.optimize.compact(
                target_size=file_bytes,
                writer_properties=_writer_properties(pa.schema(table.schema().to_arrow())),
                commit_properties=commit_properties(),
            )
            table.create_checkpoint()

    def vacuum(
        self, older_than: timedelta = timedelta(days=1), versions: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Delete files of writes that never committed, and on request of versions past; return their paths.

        Args:
            older_than: younger files may belong to a write that is still running, or to a version that is read.
            versions: whether files go that only older versions name: these cannot be read any more; in whole hours.
            dry_run: only say which ones.
        """
        table = self._open()
        removed = orphans(table, self.root, older_than)
        for storage in () if dry_run else removed:
            storage.delete()
        if versions:
            hours = max(0, math.ceil(older_than.total_seconds() / 3600))
            past = table.vacuum(retention_hours=hours, dry_run=dry_run, enforce_retention_duration=False)
            return [*(storage.uri for storage in removed), *(f"{self.uri}/{path}" for path in past)]
        return [storage.uri for storage in removed]

    def _open(self, version: int | None = None) -> DeltaTable:
        table = open_table(self.uri, self.options, version)
        if table is None:
            raise StorageError(f"there is no Delta table at {self.uri}: check the path, or write the table first")
        return table

    def _scanned(self, table: DeltaTable, columns: list[str] | None = None, where: str | None = None) -> pa.Table:
        check_scannable(table, self.root, self.allow_folders)
        try:
            # to_pyarrow_table and to_pandas abort the interpreter at exit with pyarrow 25 and 26; scan does not
            rows = read_stream(_selected(table, columns, where))
            return rows.cast(pa.schema([field.with_type(_without_views(field.type)) for field in rows.schema]))
        except (DeltaError, OSError, pa.ArrowException) as cause:
            reason = f"{one_line(cause)}; check columns, predicate, and its files"
            raise StorageError(f"cannot read from the Delta table {self.uri}: {reason}") from cause


def _selected(table: DeltaTable, columns: Sequence[str] | None, where: str | None) -> Any:
    """The stream of a query, which can be told what ``DeltaTable.scan`` cannot."""
    names = columns or [field.name for field in table.schema().fields]
    settings = {
        "datafusion.execution.parquet.coerce_int96": "us",  # of nanoseconds those before 1677 and after 2262 go wrong
        "datafusion.sql_parser.enable_ident_normalization": "false",  # a column may be called `Id`
    }
    condition = f" WHERE {where}" if where else ""
    query = f"SELECT {', '.join(map(quoted, names))} FROM rows{condition}"
    return QueryBuilder(settings).register("rows", table).execute(query)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """A type with texts and bytes as Spark's engine gives them: few kernels of Arrow take the views of delta-rs."""
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    return kind


def _writer_properties(schema: pa.Schema) -> WriterProperties:
    """How delta-rs writes files of these columns: with bounds that no reader loses rows by."""
    bounded = ColumnProperties(statistics_enabled="CHUNK")
    return WriterProperties(
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties=dict.fromkeys(with_statistics(schema), bounded),
    )
