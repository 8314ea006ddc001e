"""A table that nobody has described: its kind, a sample of its rows, and counts over all rows.

A sample is spread over all of the table; sample and counts stay within bounds of memory. Spark is asked for a table of
its catalog alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError, DataError, SchemaError, first_line
from sparkdl.pipeline.init.count import COUNTED_ROWS, Counted, count_hours, count_values
from sparkdl.pipeline.init.profile import count_of
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.files import partition_root, partition_scalar, partition_types, partition_values
from sparkdl.pipeline.sources.parquet_times import check_alike, check_types, schema_of, times_of_spark
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.table import Table

SAMPLE_ROWS, SAMPLE_BYTES = 100_000, 128 << 20
"""The most that a sample has; bytes in memory."""
_PARTS = 32
"""Row groups that a sample of a large table is taken from."""
_DECODED_ROWS = 2_000_000
"""Rows that are unpacked for a sample."""
_FOOTERS = 512

Kind = Literal["delta", "parquet", "csv", "json", "catalog"]
_ENDINGS: Mapping[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json",
    ".ndjson": "json",
}  # fmt: skip
_PACKED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was looked at.

    Attributes:
        rows: some of the table's, with all columns.
        total: rows of the table; None where nobody has counted.
        complete: whether these are all.
        coverage: how they were chosen, in words.
    """

    rows: pa.Table
    total: int | None
    complete: bool
    coverage: str


class Rows(ABC):
    """A table.

    Attributes:
        source: the section of a pipeline file, without key and time.
        notes: by key of the section, what was seen.
        partitions: columns that the table is partitioned by.
        about: rows of the table, estimated; 0 where there is nothing to estimate by.
    """

    source: dict[str, Any]
    notes: dict[str, str]
    partitions: tuple[str, ...] = ()
    about: int = 0

    @abstractmethod
    def sample(self) -> Sample:
        """Some of its rows."""

    @abstractmethod
    def count(self, columns: Sequence[str]) -> Counted | None:
        """Count the different values of columns together, over all rows; None where that would take too long."""

    @abstractmethod
    def hours(self, column: str) -> Mapping[str, int] | None:
        """Count all rows by the hour (``2026-03-01T05``) in a column; None where that would take too long."""


def kind_of(table: str) -> tuple[Kind, list[str]]:
    """What a table is, and the addresses of its files.

    Raises:
        ConfigError: there is nothing of the name, or its files are of several kinds or of none that is known.
        StorageError: the place cannot be read.
    """
    if looks_like_a_table(table) and not Storage.of(f"./{table}").exists():
        return "catalog", []
    address = Storage.of(f"./{table}" if looks_like_a_table(table) else table)
    if set(table) & set("*?["):
        if address.exists():
            raise ConfigError(f"{table} has a character in its name that patterns are made of, *, ? or [: rename it")
    elif not address.exists():
        raise ConfigError(
            f"{table} is not there: give a Delta table, a file or folder of Parquet, CSV or JSON, or "
            "catalog.schema.table"
        )
    elif address.child("_delta_log").exists():
        return "delta", []
    try:
        files = list(source_of(ParquetSource(path=address.uri)).snapshot().files)
    except DataError as error:
        raise ConfigError(f"{table} holds no files: give a folder with rows, or wait for them") from error
    files_by_kind = Counter(_ending_of(file) for file in files)
    kind = next(iter(files_by_kind))
    if len(files_by_kind) > 1 or kind is None:
        shown = ", ".join(
            f"{count} of {file_kind or 'a kind that is not known'}" for file_kind, count in files_by_kind.most_common()
        )
        raise ConfigError(
            f"{table} holds files that are not all of one kind, {shown}: name a folder or file of .parquet, .csv, "
            ".tsv, .json or .jsonl alone, or a pattern such as *.csv"
        )
    return kind, files


def _ending_of(file: str) -> Kind | None:
    name = file.rpartition("/")[2].lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


@dataclass(frozen=True)
class _File:
    """A Parquet file, and the values of the partitions that it lies in."""

    storage: Storage
    partition: Mapping[str, pa.Scalar] = field(default_factory=dict)

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        """The file, closed again afterwards."""
        with self.storage.open_input() as stream:
            try:
                yield pq.ParquetFile(stream, coerce_int96_timestamp_unit="us")
            except pa.ArrowInvalid as error:
                raise DataError(f"{self.storage.uri} cannot be read as Parquet ({error}): remove it") from error

    def with_partition(self, rows: pa.Table, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows with the columns of the folder that they lie in, or exactly with ``columns``."""
        for name, value in self.partition.items():
            if name not in rows.column_names and (columns is None or name in columns):
                rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        if columns is None:
            return rows
        for name in columns:
            if name not in rows.column_names:  # a file from before the column was added
                rows = rows.append_column(name, pa.nulls(rows.num_rows))
        return rows.select(list(columns))


class ParquetRows(Rows):
    """Parquet files, or those of a Delta table."""

    def __init__(self, kind: str, table: str, files: Sequence[str]) -> None:
        address = Storage.of(f"./{table}" if looks_like_a_table(table) else table)
        self.notes = {}
        if kind == "delta":
            delta = Table(address.uri)
            self.source = {"kind": "delta", "table": address.uri}
            self._files, self.partitions = _delta_files(delta), tuple(delta.partition_columns())
        else:
            root = partition_root(address.uri)
            types = partition_types(files, root)
            self.source = {"kind": "parquet", "path": address.uri}
            self._files = [_File(Storage.of(file), _typed(partition_values(file, root), types)) for file in files]
            self.partitions = tuple(types)

    @cached_property
    def _groups(self) -> dict[int, list[int]]:
        """Rows of each row group of each file, by its number in the list; of some where there are very many."""
        step = max(1, -(-len(self._files) // _FOOTERS))
        rows_by_group, schemas = {}, {}
        for index in range(0, len(self._files), step):
            with self._files[index].opened() as file:
                facts = file.metadata
                schemas[self._files[index].storage.uri] = schema_of(facts)
                check_types(schema_of(facts), self._files[index].storage.uri)
                rows_by_group[index] = [facts.row_group(at).num_rows for at in range(facts.num_row_groups)]
        if self.source["kind"] == "parquet":  # files of a Delta table may be older than its columns' types
            check_alike(schemas)
        return rows_by_group

    def sample(self) -> Sample:
        """Rows of row groups all over the table, the first and the last among them, drawn at random in each."""
        groups = [
            (index, at, rows)
            for index, group_rows in self._groups.items()
            for at, rows in enumerate(group_rows)
            if rows
        ]
        rows_in_footers = sum(rows for _, _, rows in groups)
        total = rows_in_footers if len(self._groups) == len(self._files) else None
        self.about = rows_in_footers * len(self._files) // max(1, len(self._groups))
        if not groups:
            raise DataError(f"{next(reversed(self.source.values()))} has no rows: wait for data, or name another table")
        chosen = groups
        if total is None or total > SAMPLE_ROWS:
            count = int(max(1, min(_PARTS, _DECODED_ROWS * len(groups) // rows_in_footers, len(groups))))
            chosen = [groups[round(at)] for at in np.linspace(0, len(groups) - 1, count)]
        share = max(1, -(-sum(rows for _, _, rows in chosen) // SAMPLE_ROWS))
        tables, room = [], SAMPLE_BYTES
        for turn, (index, at, _) in enumerate(chosen):
            rows = _sampled(self._files[index], at, share, room // (len(chosen) - turn))
            tables.append(rows)
            room -= rows.nbytes
        sampled = pa.concat_tables(tables, promote_options="permissive")
        is_complete = sampled.num_rows == total
        of = f"{total:,} rows" if total is not None else f"about {self.about:,} rows"
        parts = f"{count_of(len(chosen), 'place')} all over {count_of(len(self._files), 'file')}"
        coverage = f"all {of}" if is_complete else f"{sampled.num_rows:,} of {of}, from {parts}"
        return Sample(rows=sampled, total=total, complete=is_complete, coverage=coverage)

    def count(self, columns: Sequence[str]) -> Counted | None:
        """Read these columns of every file."""
        return None if self.about > COUNTED_ROWS else count_values(lambda: self.batches(columns))

    def hours(self, column: str) -> Mapping[str, int] | None:
        """Read this column of every file."""
        return None if self.about > COUNTED_ROWS else count_hours(self.batches([column]))

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of every row."""
        for parquet_file in self._files:
            with parquet_file.opened() as file:
                names = [name for name in columns if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=1 << 18, columns=names):
                    yield parquet_file.with_partition(times_of_spark(pa.Table.from_batches([batch])), columns)


def _delta_files(table: Table) -> list[_File]:
    table.check_readable()
    schema, root = table.schema(), Storage.of(table.uri)
    types = {name: schema.field(name).type for name in table.partition_columns()}
    files = []
    for file in table.files():
        partition = {name: partition_scalar(value, types[name]) for name, value in file.partition.items()}
        files.append(_File(Storage.of(file.path) if "://" in file.path else root.child(file.path), partition))
    return files


def _typed(values: Mapping[str, str], types: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    return {name: partition_scalar(value, types[name]) for name, value in values.items()}


def _sampled(parquet_file: _File, group: int, share: int, room: int) -> pa.Table:
    """One row in ``share`` of a row group, drawn at random, within ``room`` bytes."""
    tables: list[pa.Table] = []
    draw = np.random.default_rng(group)  # every n-th row would see one weekday, or one of two alternating classes
    with parquet_file.opened() as file:
        facts = file.metadata.row_group(group)
        size = int(min(8192, max(16, (16 << 20) // max(1, facts.total_byte_size // facts.num_rows))))  # pictures
        for batch in file.iter_batches(batch_size=size, row_groups=[group]):
            rows = times_of_spark(pa.Table.from_batches([batch]))
            tables.append(_plain(rows if share == 1 else rows.filter(draw.random(rows.num_rows) * share < 1)))
            room -= tables[-1].nbytes
            if room <= 0:
                break
    return parquet_file.with_partition(pa.concat_tables(tables))


def _plain(table: pa.Table) -> pa.Table:
    """The table with dictionaries as the values that they stand for."""
    for index, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(index, column.name, table.column(index).cast(column.type.value_type))
    return table


class CatalogRows(Rows):
    """A table of Spark's catalog."""

    def __init__(self, table: str, spark: Any) -> None:
        from pyspark.errors import PySparkException

        self.source, self.notes = {"kind": "delta", "table": table}, {}
        try:
            self._frame = spark.read.table(table)
            self._names = self._frame.columns
        except PySparkException as error:
            raise SchemaError(f"Spark cannot read the table {table}: {first_line(error)}") from error

    def sample(self) -> Sample:
        """A share of its rows, drawn at random."""
        total = self.about = self._frame.count()
        if not total:
            raise DataError(f"{self.source['table']} has no rows: wait for data, or name another table")
        is_complete = total <= SAMPLE_ROWS
        drawn = self._frame if is_complete else self._frame.sample(min(1.0, 1.1 * SAMPLE_ROWS / total), seed=0)
        rows = drawn.limit(SAMPLE_ROWS).toArrow()
        coverage = f"all {total:,} rows" if is_complete else f"{rows.num_rows:,} of {total:,} rows, drawn at random"
        return Sample(rows=_plain(rows), total=total, complete=is_complete, coverage=coverage)

    def hours(self, column: str) -> Mapping[str, int]:
        """Let Spark count."""
        from pyspark.sql import functions as F

        by_hour = self._frame.groupBy(F.date_format(F.col(quoted(column)), "yyyy-MM-dd'T'HH").alias("hour")).count()
        return {row["hour"]: row["count"] for row in by_hour.collect() if row["hour"] is not None}

    def count(self, columns: Sequence[str]) -> Counted:
        """Let Spark count."""
        from pyspark.sql import functions as F

        named = [F.col(quoted(name)) for name in columns]
        keyed = self._frame.where(~F.greatest(F.lit(False), F.lit(False), *[column.isNull() for column in named]))
        counts = keyed.agg(F.count("*").alias("rows"), F.count_distinct(F.struct(*named)).alias("distinct")).first()
        return Counted(rows=self.about, distinct=counts["distinct"], missing=self.about - counts["rows"])
