"""The plan of one table write, decided against the table as it is at the moment of the commit; no Spark."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from sparkdl.columns.names import quoted
from sparkdl.compat.arrow_streams import read_stream
from sparkdl.errors import DataError, SchemaError
from sparkdl.tables.delta import (
    check_same_schema,
    commit_properties,
    creating,
    delta_address,
    delta_options,
    merged_schema,
    open_table,
)
from sparkdl.tables.engine import AppTransaction, WriteRequest, WriteResult, check_version
from sparkdl.tables.features import check_writable
from sparkdl.tables.nulls import check_nulls
from sparkdl.tables.parquet import FileRow, partition_text
from sparkdl.tables.record import (
    Filter,
    Partition,
    TableFile,
    commit_facts,
    partition_predicate,
    path_in_log,
    removal_filter,
)

PARTITION_TYPES = ("string", "long", "integer", "short", "byte", "date", "boolean")


def has_committed(table: DeltaTable, uri: str, transaction: AppTransaction | None) -> bool:
    """Whether this piece of work, or a later one of the same application, is in the table already.

    Raises:
        FencedError: a later one is, and this one is fenced.
    """
    return transaction is not None and transaction.committed(uri, table.transaction_version(transaction.application))


def active_files(table: DeltaTable) -> list[TableFile]:
    """The files of this version."""
    return files_of(read_stream(table.get_add_actions()), table.metadata().partition_columns)


def files_of(actions: pa.Table, names: Sequence[str]) -> list[TableFile]:
    """The files of a version's actions, in their order; ``names`` are the table's partition columns."""
    partitions = actions.column("partition").to_pylist() if names else [{}] * actions.num_rows
    has_statistics = "num_records" in actions.schema.names
    rows = actions.column("num_records").to_pylist() if has_statistics else [None] * actions.num_rows
    paths, sizes = (actions.column(name).to_pylist() for name in ("path", "size_bytes"))
    return [
        TableFile(path_in_log(path), size, {name: partition_text(values[name]) for name in names}, count)
        for path, size, values, count in zip(paths, sizes, partitions, rows, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """A write that knows what it wants, and looks at the table anew on every try to commit it.

    Attributes:
        uri: the table.
        options: delta-rs's storage options.
        schema: of the rows.
        request: what the caller asked for.
    """

    uri: str
    options: Mapping[str, str] | None = field(repr=False)
    schema: Schema
    request: WriteRequest

    def layout(self, table: DeltaTable | None) -> tuple[str, ...]:
        """Check the plan against the table before any row is written; return the partition columns to write by.

        Raises:
            SchemaError: columns differ, or cannot partition.
            ConfigError: the table is partitioned by other columns than asked for.
            StorageError: the table must not be written by sparkdl.
        """
        existing = None if table is None else table.metadata().partition_columns
        layout = self.request.layout(self.uri, existing, [field.name for field in self.schema.fields])
        if table is not None:
            check_writable(table, self.uri, removes=self.request.mode != "append")
            if self.request.new_columns:
                merged_schema(self.uri, table.schema().to_json(), self.schema.to_json())
            elif not self.request.overwrite_schema:
                check_same_schema(self.uri, table.schema().to_json(), self.schema.to_json())
        self._check_partition_columns(layout)
        return layout

    def commit(self, files: Sequence[FileRow], write_id: str) -> WriteResult:
        """One try: look at the table, decide, commit.

        Raises:
            CommitFailedError: somebody else committed since the look (delta-rs's own error, for ``optimistic``).
            DataError: rows lie outside the partitions to replace, or nulls where the table forbids them.
            ConflictError: the table is at another version than the write was decided on at, or a later run has it.
        """
        written = [json.loads(file.partition) for file in files]
        self._check_inside(written)
        table = open_table(self.uri, self.options)
        if table is not None and has_committed(table, self.uri, self.request.transaction):
            return self._result(table.version(), ())
        check_version(self.uri, self.request.expected_version, -1 if table is None else table.version())
        layout = self.layout(table)
        adds = [
            AddAction(file.path, file.bytes, partition, file.modified, True, file.statistics)
            for file, partition in zip(files, written, strict=True)
        ]
        if table is None:
            with creating(self.uri, self.options):
                create_table_with_add_actions(
                    delta_address(self.uri),
                    self.schema,
                    adds,
                    mode="error",
                    partition_by=list(layout),
                    storage_options=delta_options(self.uri, self.options),
                    commit_properties=self._properties(None, files, (), None, write_id),
                )
            return self._result(0, files, committed=True)
        self._check_nulls(table, files)
        active = active_files(table)
        replaced = written if self.request.partitions is None else self.request.partitions
        removed = [file for file in active if self._replaces(file, replaced)]
        if not adds and not removed and self.request.mode != "overwrite" and self.request.transaction is None:
            return self._result(table.version(), ())
        if self._add_columns(table) or self._add_feature(table):
            expected = None if self.request.expected_version is None else table.version()
            return replace(self, request=replace(self.request, expected_version=expected)).commit(files, write_id)
        schema = self.schema if self.request.overwrite_schema else table.schema()
        mode, filters, actions = self._recorded_as(active, removed, layout)
        predicate = partition_predicate(replaced) if self.request.mode == "replace" else None
        properties = self._properties(table.version(), files, removed, predicate, write_id)
        table.create_write_transaction(
            [*actions, *adds], mode, schema, list(layout), filters, commit_properties=properties
        )
        return self._result(table.version() + 1, files, committed=True)

    def _add_columns(self, table: DeltaTable) -> bool:
        """Give the table the columns that it lacks, in a commit of its own; whether there were any."""
        column_names = {field.name for field in table.schema().fields}
        missing_fields = [field for field in self.schema.fields if field.name not in column_names]
        if missing_fields and self.request.new_columns:
            table.alter.add_columns(missing_fields, commit_properties=commit_properties())
        return bool(missing_fields) and self.request.new_columns

    def _add_feature(self, table: DeltaTable) -> bool:
        """Let the table hold times without a zone, in a commit of its own, where new columns need it; whether so."""
        needed = re.search(r'ype": *"timestamp_ntz"', self.schema.to_json())
        if not needed or "timestampNtz" in (table.protocol().reader_features or ()):
            return False
        table.alter.add_feature(
            TableFeatures.TimestampWithoutTimezone,
            allow_protocol_versions_increase=True,
            commit_properties=commit_properties(),
        )
        return True

    def _replaces(self, file: TableFile, replaced: Sequence[Partition]) -> bool:
        if self.request.mode == "replace":
            return any(_inside(file.partition, partition) for partition in replaced)
        return self.request.mode == "overwrite"

    def _recorded_as(
        self, active: Sequence[TableFile], removed: Sequence[TableFile], layout: Sequence[str]
    ) -> tuple[str, Filter | None, list[RemoveAction]]:
        """The mode in delta-rs's words, the filter that finds the files to remove, or else their removal by name."""
        if self.request.mode != "replace":
            return self.request.mode, None, []
        filters = removal_filter(active, removed, layout)
        if filters is not None:
            return "overwrite", filters, []
        now = int(time.time() * 1000)  # delta-rs takes removals by name in commits of the mode "append" alone
        return "append", None, [RemoveAction(file.path, True, now, file.bytes, file.partition) for file in removed]

    def _properties(
        self,
        read_version: int | None,
        files: Sequence[FileRow],
        removed: Sequence[TableFile],
        predicate: str | None,
        write_id: str,
    ) -> CommitProperties:
        facts = commit_facts(
            read_version=read_version,
            blind=self.request.mode == "append",
            predicate=predicate,
            added=files,
            removed=removed,
        )
        write_facts = {"sparkdl.write": write_id, "sparkdl.mode": self.request.mode}
        return commit_properties(self.request.transaction, **{**self.request.metadata, **facts, **write_facts})

    def _check_partition_columns(self, layout: Sequence[str]) -> None:
        types = {field["name"]: field["type"] for field in json.loads(self.schema.to_json())["fields"]}
        for name in layout:
            if name not in types:
                raise SchemaError(f"partition column {name!r} is not among {sorted(types)}: name one of these")
            if types[name] not in PARTITION_TYPES:
                raise SchemaError(
                    f"partition column {name!r} has the type {types[name]}, only {list(PARTITION_TYPES)} can "
                    "partition: derive a date or a number from it"
                )
        if layout and len(layout) == len(types):
            raise SchemaError(f"the partition columns {list(layout)} are all columns there are: keep one to store")

    def _check_inside(self, written: Sequence[Partition]) -> None:
        for partition in written:
            if self.request.partitions is not None and not any(
                _inside(partition, allowed) for allowed in self.request.partitions
            ):
                replaced = [dict(allowed) for allowed in self.request.partitions]
                raise DataError(
                    f"rows lie in the partition {dict(partition)}, only {replaced} are to be replaced: "
                    "filter the rows, or name that partition too"
                )

    def _check_nulls(self, table: DeltaTable, files: Sequence[FileRow]) -> None:
        for file in () if self.request.overwrite_schema else files:
            null_partitions = {name: file.rows for name, value in json.loads(file.partition).items() if value is None}
            counts = json.loads(file.statistics)["nullCount"] | null_partitions
            null_counts = {quoted(name): nulls for name, nulls in counts.items()} | json.loads(file.nulls)
            check_nulls(self.uri, table.schema().to_json(), null_counts)

    def _result(self, version: int, files: Sequence[FileRow], *, committed: bool = False) -> WriteResult:
        distinct = {file.partition: json.loads(file.partition) for file in files}
        return WriteResult(
            version=version,
            rows=sum(file.rows for file in files),
            files=len(files),
            bytes=sum(file.bytes for file in files),
            partitions=tuple(value for _, value in sorted(distinct.items()) if value),
            committed=committed,
        )


def _inside(partition: Partition, allowed: Partition) -> bool:
    return all(partition.get(name) == value for name, value in allowed.items())
