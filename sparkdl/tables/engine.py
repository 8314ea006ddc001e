"""The one interface of both engines, and the rule by which a table gets one of them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from sparkdl.columns.names import check_listed
from sparkdl.config import require
from sparkdl.errors import ConfigError, ConflictError, FencedError, SchemaError
from sparkdl.observe import logger
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.parquet import partition_text
from sparkdl.tables.record import Partition, spelled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EngineName = Literal["auto", "delta-rs", "spark"]

_OF_THE_LOG = {
    *("version", "timestamp", "operation", "operationParameters", "operationMetrics", "engineInfo", "readVersion"),
    *("isBlindAppend", "isolationLevel"),
}
EPOCH_SHIFT = 24
"""Bits of a transaction's version below its epoch: so many commits has a run."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, kw_only=True, slots=True)
class AppTransaction:
    """The identity of one write, kept in the table: the same one never commits twice.

    Attributes:
        application: who writes, e.g. ``"etl/features"``.
        version: a number that grows with every new piece of work of this application.
        fenced: whether a write is refused, and not passed over, where a later one of the application has committed.
    """

    application: str
    version: int
    fenced: bool = False

    def committed(self, uri: str, last: int | None) -> bool:
        """Whether a table has this piece of work, or a later one, already.

        Args:
            uri: the table, for the message.
            last: version of the application's last commit to it; None without one.

        Raises:
            FencedError: a later one has committed, and this one is fenced.
        """
        if self.fenced and last is not None and last > self.version:
            raise FencedError(
                f"a later run of {self.application} (epoch {last >> EPOCH_SHIFT}) has committed to the Delta table "
                f"{uri}, this one has the epoch {self.version >> EPOCH_SHIFT}: nothing of it is committed, run again"
            )
        return last is not None and last >= self.version


class Fence:
    """The right of one run to commit: it ends with the first commit of a run whose epoch is later, table by table.

    Each commit carries a number that begins with the epoch, as a transaction of one application. A run that takes over
    commits it to every table first (``Table.claim``), then reads: what a run before it decided is refused from then on,
    by the table's own log, so that nothing can come between a look at the epoch and the commit.

    Args:
        application: whose runs these are.
        epoch: of this run; each later run has a greater one.
    """

    def __init__(self, application: str, epoch: int) -> None:
        self._application, self._epoch, self._numbers = application, epoch, itertools.count()

    def transaction(self) -> AppTransaction:
        """The identity of the run's next commit."""
        number = (self._epoch << EPOCH_SHIFT) + next(self._numbers)
        return AppTransaction(application=self._application, version=number, fenced=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """What ``Table.write`` was asked for.

    Attributes:
        mode: ``"append"``, ``"overwrite"`` or ``"replace"``.
        partition_by: asked for by the caller; empty takes an existing table's.
        partitions: those to replace; None means those that got rows.
        transaction: identity of the piece of work.
        overwrite_schema: whether ``"overwrite"`` may change the columns.
        compression: Parquet codec.
        metadata: JSON-able facts for the commit's entry in the history.
        new_columns: whether rows may bring columns that the table lacks, and lack some that it has.
        expected_version: the newest version when this was decided on, -1 for no table; None takes any.
    """

    mode: str
    partition_by: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] | None = None
    transaction: AppTransaction | None = None
    overwrite_schema: bool = False
    compression: str = "snappy"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    new_columns: bool = False
    expected_version: int | None = None

    def __post_init__(self) -> None:
        require(
            self.mode in ("append", "overwrite", "replace"),
            f"mode={self.mode!r} is not one of 'append', 'overwrite', 'replace': choose one of these",
        )
        require(
            len(set(self.partition_by)) == len(self.partition_by),
            f"partition_by={list(self.partition_by)} names a column twice: name each once",
        )
        require(
            self.partitions is None or self.mode == "replace",
            f"partitions are given with mode={self.mode!r}: they only say what mode='replace' replaces",
        )
        require(
            not self.overwrite_schema or self.mode == "overwrite",
            f"overwrite_schema=True is given with mode={self.mode!r}: only mode='overwrite' can change the columns",
        )

        check_metadata(self.metadata)

    def spelled(self, schema: str) -> WriteRequest:
        """The request, with the values of ``partitions`` as the log spells those of their columns' types.

        Args:
            schema: of the rows, as JSON.

        Raises:
            ConfigError: a value is none of its column's type.
        """
        types = {field["name"]: field["type"] for field in json.loads(schema)["fields"]}
        named = [
            {name: spelled(name, value, types.get(name)) for name, value in partition.items()}
            for partition in self.partitions or ()
        ]
        return self if self.partitions is None else replace(self, partitions=tuple(named))

    def layout(self, uri: str, existing: Sequence[str] | None, columns: Collection[str]) -> tuple[str, ...]:
        """The partition columns to write by: a table keeps those that it was made with.

        Args:
            uri: the table, for messages.
            existing: its partition columns; None where there is no table.
            columns: of the rows.

        Raises:
            ConfigError: they are not those asked for, or not those that ``partitions`` names.
            SchemaError: the rows are to bring other columns, and lack one of these.
        """
        layout = self.partition_by
        if existing is not None:
            layout = tuple(existing)
            require(
                not self.partition_by or self.partition_by == layout,
                f"partition_by={list(self.partition_by)} is asked for, the Delta table {uri} is partitioned by "
                f"{list(layout)}, and stays so: leave partition_by out, or write to another table",
            )
            lacking = sorted(set(layout) - set(columns))
            if self.overwrite_schema and lacking:
                raise SchemaError(
                    f"the Delta table {uri} is partitioned by {list(layout)}, which overwrite_schema keeps, and the "
                    f"rows lack {lacking}: keep these columns, or write to another table"
                )
        require(
            self.mode != "replace" or bool(layout),
            f"mode='replace' needs a partitioned table, {uri} has no partition columns: use mode='overwrite'",
        )
        unknown = sorted({name for partition in self.partitions or () for name in partition} - set(layout))
        require(not unknown, f"partitions name {unknown}, {uri} is partitioned by {list(layout)}: use these columns")
        return layout


def write_request(
    mode: str,
    partition_by: Sequence[str],
    partitions: Sequence[Mapping[str, Any]] | None,
    transaction: AppTransaction | None = None,
    overwrite_schema: bool = False,
    compression: str = "snappy",
    metadata: Mapping[str, Any] | None = None,
) -> WriteRequest:
    """What a caller of ``Table.write`` asks for, with the partitions' values as text."""
    check_listed("partition_by", partition_by)
    require(
        partitions is None
        or (isinstance(partitions, Sequence) and all(isinstance(partition, Mapping) for partition in partitions)),
        f"partitions={partitions!r} is no list of dicts: give one a partition, as in [{{'day': date(2024, 1, 2)}}]",
    )
    named = None if partitions is None else tuple(_as_text(partition) for partition in partitions)
    return WriteRequest(
        mode=mode,
        partition_by=tuple(partition_by),
        partitions=named,
        transaction=transaction,
        overwrite_schema=overwrite_schema,
        compression=compression,
        metadata=metadata or {},
    )


def _as_text(partition: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: partition_text(value) for name, value in partition.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What a write did.

    Attributes:
        version: the version it made, or the newest one where it committed nothing.
        rows: rows written.
        files: files added.
        bytes: their size.
        partitions: the partitions that got rows, values as text; empty where Spark's Delta wrote, which does not tell.
        committed: False if the same transaction had committed before, or there was nothing to do.
    """

    version: int
    rows: int
    files: int
    bytes: int
    partitions: tuple[Partition, ...]
    committed: bool


class Engine(Protocol):
    """What a table needs; each engine raises the errors that ``Table`` has in its docstrings.

    A name of a catalog goes to Spark's catalog. An address goes to Spark's Delta where the session has its extension
    and catalog, and no options are given, which it does not take; and to delta-rs elsewhere.
    """

    def exists(self) -> bool:
        """Whether a table is there."""

    def version(self) -> int:
        """The newest version."""

    def table_id(self) -> str:
        """What tells the table from any other."""

    def schema_json(self, version: int | None) -> str:
        """The schema of a version as JSON."""

    def check_readable(self) -> None:
        """Refuse a table that this engine does not read."""

    def partition_columns(self) -> list[str]:
        """The partition columns' names in order."""

    def history(self, limit: int | None) -> list[dict[str, Any]]:
        """The commits, newest first."""

    def transaction_version(self, application: str) -> int | None:
        """The last version that an application committed."""

    def read(self, spark: SparkSession, version: int | None) -> DataFrame:
        """The rows of a version, pinned."""

    def write(self, frame: DataFrame, request: WriteRequest) -> WriteResult:
        """One commit."""

    def append(
        self,
        rows: pa.Table,
        *,
        expected_version: int | None,
        transaction: AppTransaction | None,
        metadata: Mapping[str, str] | None,
        new_columns: bool,
    ) -> int:
        """Append a small table; return the version that holds it."""

    def merge(self, rows: pa.Table, on: Sequence[str], transaction: AppTransaction | None) -> int:
        """Update and insert; return the version."""

    def claim(self, transaction: AppTransaction) -> None:
        """Commit a transaction without rows, if there is a table."""

    def rows(self, columns: Sequence[str] | None, where: str | None, version: int | None) -> pa.Table:
        """A small table, or a small part of one."""


def check_version(uri: str, expected: int | None, newest: int) -> None:
    """Refuse a commit that was decided on at another version than the newest one.

    Raises:
        ConflictError: says both.
    """
    if expected is not None and newest != expected:
        raise ConflictError(
            f"the Delta table {uri} is at version {newest}, this commit was made for {expected}: read it again"
        )


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse facts for the history under names that the log uses itself, and what JSON cannot hold.

    Raises:
        ConfigError: names them.
    """
    reserved = sorted(_OF_THE_LOG & set(metadata))
    require(
        not reserved, f"metadata names {reserved}, which the history says of each commit itself: call these otherwise"
    )
    for name, fact in metadata.items():
        try:
            json.dumps(fact, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise ConfigError(
                f"metadata[{name!r}]={fact!r} is nothing that JSON can hold ({cause}): give text, finite numbers, or "
                "lists and dicts of them"
            ) from cause


def is_name(text: str | os.PathLike[str]) -> bool:
    """Whether a text is the name of a table in a catalog, and not an address.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(text, str) or "/" in text or _SCHEME.match(text):
        return False
    if looks_like_a_table(text):
        return True
    raise ConfigError(
        f"{text!r} is neither an address, which has a slash or a scheme, nor a name catalog.schema.table: "
        f"write ./{text} for a folder, or spark_catalog.schema.table for a table of Spark's own catalog"
    )


def spark_session() -> SparkSession | None:
    """The session of this process; None where there is none. Nothing is imported for it."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as Session

    active = Session.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:  # of another thread
        active = Session.builder.getOrCreate()
    return active


def has_delta(spark: SparkSession) -> bool:
    """Whether Delta's own extension is in a session, which then reads and writes tables by their addresses."""
    extensions = spark.conf.get("spark.sql.extensions", "") or ""
    catalog = spark.conf.get("spark.sql.catalog.spark_catalog", "") or ""
    return "DeltaSparkSessionExtension" in extensions and "DeltaCatalog" in catalog


@functools.lru_cache(maxsize=1024)
def said(table: str, engine: str, why: str) -> None:
    """Say once in a process which engine a table has."""
    logger.info("the Delta table %s is read and written by %s: %s", table, engine, why)
