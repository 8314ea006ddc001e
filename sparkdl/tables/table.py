"""Delta tables: one value for a table, whichever engine reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from deltalake import Schema

from sparkdl.columns.names import check_listed
from sparkdl.config import require
from sparkdl.errors import ConfigError, ConflictError
from sparkdl.storage import Storage
from sparkdl.tables.delta import storage_of
from sparkdl.tables.delta_rs import DeltaRs
from sparkdl.tables.engine import (
    AppTransaction,
    Engine,
    EngineName,
    Fence,
    WriteResult,
    has_delta,
    is_name,
    said,
    spark_session,
    write_request,
)
from sparkdl.tables.journal import Journal
from sparkdl.tables.reading import spark_address
from sparkdl.tables.record import TableFile
from sparkdl.tables.scan.plan import TableScan, Where
from sparkdl.tables.spark_delta import SparkDelta
from sparkdl.tables.staged import StagedWrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["AppTransaction", "Fence", "Table", "WriteResult"]

Mode = Literal["append", "overwrite", "replace"]


@dataclass(frozen=True)
class Table:
    """One Delta table.

    ``engine.py`` has the rule by which a table gets its engine: ``delta_rs.py``, or ``spark_delta.py``. One writer
    engine per table: on S3 the two do not see each other's commits in time.

    Attributes:
        uri: its address, a path or URI with a slash or a scheme (``./features``, ``s3://...``), or its name in a
            catalog, ``catalog.schema.table``; Spark's own catalog is called ``spark_catalog``.
        storage_options: delta-rs's options for the store (``AWS_ENDPOINT_URL`` ...); for S3 they default to fsspec's
            configuration.
        allow_folders: paths or URIs of further folders in which files of the table may lie, as those of a shallow clone
            do: the folder of its original. A log that names a file elsewhere is refused.
        engine: ``"delta-rs"``, ``"spark"``, or ``"auto"``: a name goes to Spark's catalog, an address to Spark's Delta
            where the session has its extension and there are no ``storage_options``, else to delta-rs.

    Raises:
        ConfigError: the text is neither address nor name, or the engine or the options do not fit it.
    """

    uri: str
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    engine: EngineName = "auto"
    allow_folders: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_folders", tuple(Storage.of(folder).uri for folder in self.allow_folders))
        require(
            self.engine in ("auto", "delta-rs", "spark"),
            f"engine={self.engine!r} is not one of 'auto', 'delta-rs', 'spark': choose one of these",
        )
        require(
            not self.storage_options or (self.engine != "spark" and not is_name(self.uri)),
            f"storage_options are given for {self.uri}, which Spark opens by its session's settings: leave them out",
        )
        if is_name(self.uri):
            require(
                self.engine != "delta-rs",
                f"{self.uri} is the name of a table in a catalog, which delta-rs does not know: leave engine out",
            )
        else:
            object.__setattr__(self, "uri", self._address.uri)

    @cached_property
    def _address(self) -> DeltaRs:
        """What the given address means; found out once, when the table is made."""
        if is_name(self.uri):
            raise ConfigError(
                f"{self.uri} is the name of a table in a catalog, this needs the address of one: give its path or URI"
            )
        return DeltaRs(storage_of(self.uri, self.storage_options), self.storage_options, tuple(self.allow_folders))

    def _engine(self, spark: SparkSession | None = None) -> Engine:
        """The engine that reads and writes this table in a session, by default that of this process."""
        if self.engine == "delta-rs":  # whether or not a session lives
            said(self.uri, "delta-rs", "it was asked for")
            return self._address
        spark = spark or spark_session()
        if is_name(self.uri):
            if spark is None:
                raise ConfigError(f"{self.uri} is the name of a table in a catalog, and no session is here to ask")
            said(self.uri, "Spark", "it is a name of a catalog")
            return SparkDelta(spark, self.uri, "", self.allow_folders)
        delta = spark is not None and has_delta(spark)
        if self.engine == "spark" or (self.engine == "auto" and delta and not self.storage_options):
            if spark is None or not delta:
                raise ConfigError(
                    f"engine='spark' for {self.uri} needs a session with Delta's extension and catalog "
                    "(io.delta:delta-spark): start one, or leave engine out"
                )
            said(self.uri, "Spark's Delta", "the session has its extension")
            return SparkDelta(spark, self.uri, spark_address(self._address.root.spark_uri), self.allow_folders)
        why = "Spark's Delta takes no storage_options" if delta else "the session has no Delta extension"
        said(self.uri, "delta-rs", why)
        return self._address

    def exists(self) -> bool:
        """Whether a table is there."""
        return self._engine().exists()

    def version(self) -> int:
        """The newest version.

        Raises:
            StorageError: there is no table.
        """
        return self._engine().version()

    def table_id(self) -> str:
        """What tells the table from any other, also from one that is made anew at its address."""
        return self._engine().table_id()

    def schema_json(self, version: int | None = None) -> str:
        """The schema as JSON; Spark's ``StructType.fromJson`` and Delta spell it alike."""
        return self._engine().schema_json(version)

    def columns(self, version: int | None = None) -> list[str]:
        """The columns' names in order."""
        return [field["name"] for field in json.loads(self.schema_json(version))["fields"]]

    def schema(self, version: int | None = None) -> pa.Schema:
        """The columns' names and Arrow types in order."""
        return pa.schema(Schema.from_json(self.schema_json(version)).to_arrow())

    def check_readable(self) -> None:
        """Refuse a table that no engine here reads.

        Raises:
            StorageError: names the feature, or there is no table.
        """
        self._engine().check_readable()

    def partition_columns(self) -> list[str]:
        """The partition columns' names in order."""
        return self._engine().partition_columns()

    def partitions(self, version: int | None = None) -> list[dict[str, str | None]]:
        """The partitions that hold files, values as text; of a table with an address.

        Raises:
            ConfigError: the table has a name only.
        """
        partitions = {tuple(sorted(file.partition.items())) for file in self.files(version)}
        return [dict(values) for values in sorted(partitions, key=str)]

    def files(self, version: int | None = None) -> list[TableFile]:
        """The files that a version is made of; of a table with an address.

        Raises:
            ConfigError: the table has a name only.
        """
        return self._address.files(version)

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The commits, newest first: version, timestamp (ms), operation, and what the writer added."""
        require(limit is None or limit >= 0, f"limit={limit} is no number of commits: give 0 or more, or None for all")
        return self._engine().history(limit)

    def transaction_version(self, application: str) -> int | None:
        """The last version that ``application`` committed; None if it never did, or there is no table."""
        return self._engine().transaction_version(application)

    def read(self, spark: SparkSession, version: int | None = None) -> DataFrame:
        """Read the table at ``version`` (None: the newest) at Spark's native speed.

        The version is pinned when this is called, so later writes never change the DataFrame. Rows that a deletion
        vector hides are left out, and columns have the table's names, whatever the files call them.

        Raises:
            StorageError: there is no such table or version, or it has features that only Spark's Delta reads.
            IntegrityError: its log names a file outside of its folder, and of ``allow_folders``.
        """
        return self._engine(spark).read(spark, version)

    def scan(self, where: Where = (), version: int | None = None) -> TableScan:
        """Find the files of a version that can hold rows of interest, for workers that read them themselves.

        Args:
            where: ``[("day", ">=", "2026-03-01"), ...]``, all of which a row must meet, see ``tables/scan``.
            version: the newest by default; it is pinned when this is called.

        Raises:
            ConfigError: the table has a name only, or ``where`` is no list of conditions.
            SchemaError: ``where`` names a column that the table has not.
            StorageError: there is no such table or version, or it has features that only Spark reads.
        """
        return self._address.scan(where, version)

    def can_stage(self, spark: SparkSession) -> bool:
        """Whether ``stage`` is for this table in a session: not where Spark's Delta writes it."""
        return isinstance(self._engine(spark), DeltaRs)

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
        metadata: Mapping[str, Any] | None = None,
    ) -> WriteResult:
        """Write a DataFrame as one commit; nothing of it is visible before, and nothing if it fails.

        Args:
            frame: the rows; its columns are the table's, in any order.
            mode: ``"append"``; ``"overwrite"`` replaces all rows; ``"replace"`` replaces whole partitions.
            partition_by: partition columns of a table that this call creates; one that is there keeps its own.
            partitions: with ``mode="replace"``, the partitions to replace (``[{"day": date(2024, 1, 2)}]``), also those
                that got no rows; None means those that the rows fall into.
            transaction: the identity of this piece of work: if it has committed before, nothing happens.
            overwrite_schema: with ``mode="overwrite"``, let the rows change the table's columns.
            compression: Parquet codec: ``"snappy"``, ``"zstd"``, ``"lz4"`` or ``"none"``.
            metadata: JSON-able facts for the commit's entry in the history.

        Raises:
            SchemaError: the columns are not the table's, or of a type that Delta cannot hold.
            DataError: rows lie outside ``partitions``, or nulls are in a column that forbids them.
            ConflictError: other writers committed first, again and again.
            StorageError: the place cannot be written, or the table has features that this writer would break.
        """
        request = write_request(mode, partition_by, partitions, transaction, overwrite_schema, compression, metadata)
        return self._engine(frame.sparkSession).write(frame, request)

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
        metadata: Mapping[str, Any] | None = None,
        expected_version: int | None = None,
    ) -> StagedWrite:
        """Begin what ``write`` does as a whole: the caller lets tasks write files, then commits or abandons them.

        This is delta-rs's way of writing: a table that Spark's Delta writes elsewhere is not for it.

        Args:
            schema: of the rows, as ``df.schema.json()``.
            mode: as the others, see ``write``.
            partition_by: see there.
            partitions: see there.
            transaction: see there.
            overwrite_schema: see there.
            compression: see there.
            metadata: see there.
            expected_version: commit only if this is still the newest version; -1 means no table yet, None any.

        Raises:
            ConfigError: the table has a name only.
            SchemaError: the columns are not the table's, or of a type that Delta cannot hold.
            StorageError: the table has features that this writer would break.
        """
        request = write_request(mode, partition_by, partitions, transaction, overwrite_schema, compression, metadata)
        return self._address.stage(schema, replace(request, expected_version=expected_version))

    def stage_partitions(
        self,
        schema: str,
        partition_by: Sequence[str],
        partitions: Sequence[Mapping[str, Any]],
        *,
        transaction: AppTransaction | None = None,
        expected_version: int | None = None,
    ) -> StagedWrite:
        """Begin to replace whole partitions by rows that may bring columns, or lack some: null stands where none is.

        Args:
            schema: of the rows, as ``df.schema.json()``.
            partition_by: partition columns of a table that this creates.
            partitions: those to replace, also those that get no rows.
            transaction: as in ``write``.
            expected_version: as in ``stage``.

        Raises:
            ConfigError: the table has a name only.
            SchemaError: a column is of another type than the table's, or of one that Delta cannot hold.
            StorageError: the table has features that this writer would break.
        """
        request = write_request("replace", partition_by, partitions, transaction)
        return self._address.stage(schema, replace(request, new_columns=True, expected_version=expected_version))

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
            ConfigError: an expected version is given and Spark's Delta would write, which cannot promise it.
            ConflictError: the table is not at ``expected_version``.
            SchemaError: the columns are not the table's.
            DataError: nulls are in a column that forbids them.
        """
        return self._engine().append(
            rows,
            expected_version=expected_version,
            transaction=transaction,
            metadata=metadata,
            new_columns=new_columns,
        )

    def merge(self, rows: pa.Table, on: Sequence[str], *, transaction: AppTransaction | None = None) -> int:
        """Update the rows that agree in the columns ``on`` and insert the others; return the version.

        Args:
            rows: a few thousand at most.
            on: columns by which rows are found.
            transaction: as in ``write``.

        Raises:
            ConfigError: ``on`` names no column, or one that the rows lack; or a transaction is given and Spark's Delta
                would write, whose merges carry none.
            FencedError: a later run of the transaction's application has committed.
            SchemaError: the columns are not the table's.
            DataError: several rows agree with one of the table's, or nulls are in a column that forbids them.
            StorageError: there is no table, or the commit fails.
        """
        check_listed("on", on)
        require(
            bool(on) and set(on) <= set(rows.column_names),
            f"on={list(on)} is to name the columns by which rows are found, of {rows.column_names}: name some of these",
        )
        return self._engine().merge(rows, on, transaction)

    def claim(self, transaction: AppTransaction, schema: pa.Schema | None = None) -> None:
        """Commit a transaction without rows, if there is a table: what earlier ones of a fence do is refused from now.

        Args:
            transaction: of a ``Fence``.
            schema: of the table to make where there is none, by delta-rs; without it, an earlier run may make one yet.

        Raises:
            FencedError: a later run of the application has claimed it.
            StorageError: the table cannot be written.
        """
        if schema is not None and not self.exists():
            with suppress(ConflictError):  # it was made meanwhile
                self.append(schema.empty_table(), expected_version=-1, transaction=transaction)
        self._engine().claim(transaction)

    def rows(
        self, columns: Sequence[str] | None = None, *, where: str | None = None, version: int | None = None
    ) -> pa.Table:
        """Read a small table, or a small part of one, into Arrow.

        Args:
            columns: all by default.
            where: a SQL predicate, e.g. ``"day = '2024-01-02'"``.
            version: the newest by default.

        Raises:
            ConfigError: ``columns`` is one text.
            StorageError: there is no such table or version, or the predicate is wrong.
        """
        check_listed("columns", columns)
        return self._engine().rows(columns, where, version)

    def snapshot(self) -> tuple[int, pa.Table | None]:
        """The newest version with its rows, for a decision that ``append(expected_version=...)`` commits.

        Returns:
            ``(-1, None)`` where there is no table.

        Raises:
            ConfigError: the table has a name only.
        """
        return self._address.snapshot()

    @cached_property
    def journal(self) -> Journal:
        """Its newest commits, without opening it; of a table with an address that nobody but delta-rs writes.

        Raises:
            ConfigError: the table has a name only.
        """
        return Journal(self._address.root, self.storage_options)

    def compact(self, file_bytes: int | None = None) -> None:
        """Rewrite many small files as few; rows and older versions stay as they are. A lost race is no error.

        Args:
            file_bytes: files of this size are left alone; delta-rs's own choice by default.
        """
        self._address.compact(file_bytes)

    def vacuum(
        self, older_than: timedelta = timedelta(days=1), versions: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Delete files of writes of delta-rs that never committed, and on request of versions past; return their paths.

        Args:
            older_than: younger files may belong to a write that is still running, or to a version that is read.
            versions: whether files go that only older versions name: these cannot be read any more; in whole hours.
            dry_run: only say which ones.

        Raises:
            ConfigError: the table has a name only.
        """
        return self._address.vacuum(older_than, versions, dry_run)
