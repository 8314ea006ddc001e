"""A table that nobody has described: its kind, a sample of its rows, and counts over all rows.

A sample is spread over all of the table; sample and counts stay within bounds of memory. Spark is asked for a table of
its catalog alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError, DataError, SchemaError, first_line
from sparkdl.pipeline.init.count import count_hours, count_values
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.files import partition_root, partition_scalar, partition_types, partition_values
from sparkdl.pipeline.sources.parquet_times import check_alike, check_types, schema_of, times_of_spark
from sparkdl.pipeline.spec.base import count_of
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.table import Table

SAMPLE_ROWS, _SAMPLE_BYTES = 100_000, 128 << 20
"""The most that a sample has; bytes in memory."""
COUNTED_ROWS = 64_000_000
"""Rows of a table that are counted."""
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
PACKED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was looked at.

    Attributes:
        rows: some of the table's, with all columns.
        complete: whether these are all.
        coverage: how they were chosen, in words.
    """

    rows: pa.Table
    complete: bool
    coverage: str

    def count(self, columns: Sequence[str]) -> tuple[int, int]:
        """As of ``Rows``; of these."""
        return count_values(lambda: [self.rows.select(list(columns))], self.rows.num_rows)

    def hours(self, column: str) -> Mapping[str, int]:
        """As of ``Rows``; of these."""
        return count_hours([self.rows.column(column)])


class Rows(ABC):
    """A table.

    Attributes:
        source: the section of a pipeline file, without key and time; what a sample shows is added to it.
        notes: by key of the section, what was seen.
        partitions: columns that the table is partitioned by.
        about: rows of the table, estimated where nobody has counted; 0 before there is a sample.
    """

    source: dict[str, Any]
    notes: dict[str, str]
    partitions: tuple[str, ...] = ()
    about: int = 0

    @abstractmethod
    def sample(self) -> Sample:
        """Some of its rows.

        Raises:
            DataError: there are none, or they cannot be read.
            SchemaError: a column is of a type that Spark does not read.
        """

    @abstractmethod
    def count(self, columns: Sequence[str]) -> tuple[int, int] | None:
        """Count all rows, and the different values of columns together where none is missing.

        None where that would take too long.
        """

    @abstractmethod
    def hours(self, column: str) -> Mapping[str, int] | None:
        """Count all rows by the hour (``2026-03-01T05``) in a column; None where that would take too long."""

    def _nothing(self) -> DataError:
        address = self.source.get("path") or self.source["table"]
        return DataError(f"{address} has no rows: wait for data, or name another table")


class FileRows(Rows):
    """A table of files, each with the values of the partitions that it lies in."""

    def __init__(self, kind: str, table: str, files: Sequence[str]) -> None:
        address = _address(table).uri
        self.notes = {}
        if kind == "delta":
            self.source = {"kind": kind, "table": address}
            types, values = _delta_files(Table(address))
        else:
            self.source = {"kind": kind, "path": address}
            root = partition_root(address)
            types, values = partition_types(files, root), {file: partition_values(file, root) for file in files}
        self.partitions = tuple(types)
        self._partition_by_file: Mapping[str, Mapping[str, pa.Scalar]] = {
            file: {name: partition_scalar(value, types[name]) for name, value in partition.items()}
            for file, partition in values.items()
        }
        self._files = list(values)

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of every row; of text files, as texts."""

    def count(self, columns: Sequence[str]) -> tuple[int, int] | None:
        """Read these columns of every file."""
        return count_values(lambda: self.batches(columns), self.about) if self._countable else None

    def hours(self, column: str) -> Mapping[str, int] | None:
        """Read this column of every file."""
        return count_hours(table.column(0) for table in self.batches([column])) if self._countable else None

    @property
    def _countable(self) -> bool:
        return self.about <= COUNTED_ROWS

    def _with_partition(self, rows: pa.Table, file: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows with the columns of the folder that their file lies in, or exactly with ``columns``."""
        for name, value in self._partition_by_file[file].items():
            if name not in rows.column_names and (columns is None or name in columns):
                rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
        if columns is None:
            return rows
        for name in columns:
            if name not in rows.column_names:  # a file from before the column was added
                rows = rows.append_column(name, pa.nulls(rows.num_rows))
        return rows.select(list(columns))


class ParquetRows(FileRows):
    """Parquet files, or those of a Delta table."""

    def sample(self) -> Sample:
        """Rows of row groups all over the table, the first and the last among them, drawn at random in each."""
        looked_at = self._files[:: max(1, -(-len(self._files) // _FOOTERS))]
        groups, schemas = [], {}
        for file in looked_at:
            with _opened(file) as parquet:
                facts, schema, address = parquet.metadata, schema_of(parquet.metadata), Storage.of(file).uri
                check_types(schema, address)
                schemas[address] = schema
                sizes = enumerate(facts.row_group(at).num_rows for at in range(facts.num_row_groups))
                groups += [(file, at, rows) for at, rows in sizes if rows]
        if self.source["kind"] == "parquet":  # files of a Delta table may be older than its columns' types
            check_alike(schemas)
        rows_in_footers = sum(rows for *_, rows in groups)
        self.about = rows_in_footers * len(self._files) // max(1, len(looked_at))
        if not groups:
            raise self._nothing()
        chosen, all_seen = groups, len(looked_at) == len(self._files)
        if not all_seen or rows_in_footers > SAMPLE_ROWS:
            count = int(max(1, min(_PARTS, _DECODED_ROWS * len(groups) // rows_in_footers, len(groups))))
            chosen = [groups[round(at)] for at in np.linspace(0, len(groups) - 1, count)]
        share = max(1, -(-sum(rows for *_, rows in chosen) // SAMPLE_ROWS))
        tables, room = [], _SAMPLE_BYTES
        for turn, (file, at, _) in enumerate(chosen):
            tables.append(self._drawn(file, at, share, room // (len(chosen) - turn)))
            room -= tables[-1].nbytes
        rows = pa.concat_tables(tables, promote_options="permissive")
        complete = all_seen and rows.num_rows == self.about
        of = f"{'' if all_seen else 'about '}{self.about:,} rows"
        places = f"{count_of(len(chosen), 'place')} all over {count_of(len(self._files), 'file')}"
        coverage = f"all {of}" if complete else f"{rows.num_rows:,} of {of}, from {places}"
        return Sample(rows=rows, complete=complete, coverage=coverage)

    def _drawn(self, file: str, group: int, share: int, room: int) -> pa.Table:
        """One row in ``share`` of a row group, drawn at random, within ``room`` bytes."""
        tables: list[pa.Table] = []
        draw = np.random.default_rng(group)  # every n-th row would see one weekday, or one of two alternating classes
        with _opened(file) as parquet:
            facts = parquet.metadata.row_group(group)
            size = int(min(8192, max(16, (16 << 20) // max(1, facts.total_byte_size // facts.num_rows))))  # pictures
            for batch in parquet.iter_batches(batch_size=size, row_groups=[group]):
                rows = times_of_spark(pa.Table.from_batches([batch]))
                tables.append(_plain(rows if share == 1 else rows.filter(draw.random(rows.num_rows) * share < 1)))
                room -= tables[-1].nbytes
                if room <= 0:
                    break
        return self._with_partition(pa.concat_tables(tables), file)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of every row."""
        for file in self._files:
            with _opened(file) as parquet:
                names = [name for name in columns if name in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(batch_size=1 << 18, columns=names):
                    yield self._with_partition(times_of_spark(pa.Table.from_batches([batch])), file, columns)


class CatalogRows(Rows):
    """A table of Spark's catalog, which Spark reads and counts."""

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
            raise self._nothing()
        complete = total <= SAMPLE_ROWS
        drawn = self._frame if complete else self._frame.sample(min(1.0, 1.1 * SAMPLE_ROWS / total), seed=0)
        rows = drawn.limit(SAMPLE_ROWS).toArrow()
        coverage = f"all {total:,} rows" if complete else f"{rows.num_rows:,} of {total:,} rows, drawn at random"
        return Sample(rows=_plain(rows), complete=complete, coverage=coverage)

    def hours(self, column: str) -> Mapping[str, int]:
        """Let Spark count."""
        from pyspark.sql import functions as F

        by_hour = self._frame.groupBy(F.date_format(F.col(quoted(column)), "yyyy-MM-dd'T'HH").alias("hour")).count()
        return {row["hour"]: row["count"] for row in by_hour.collect() if row["hour"] is not None}

    def count(self, columns: Sequence[str]) -> tuple[int, int]:
        """Let Spark count, which leaves rows out that have a null in one of the columns."""
        from pyspark.sql import functions as F

        distinct = self._frame.agg(F.count_distinct(*[F.col(quoted(name)) for name in columns])).first()
        return self.about, distinct[0]


def kind_of(table: str) -> tuple[Kind, list[str]]:
    """What a table is, and the addresses of its files; of a Delta table its log tells them.

    Raises:
        ConfigError: there is nothing of the name, or its files are of several kinds or of none that is known.
        StorageError: the place cannot be read.
    """
    address = _address(table)
    if looks_like_a_table(table) and not address.exists():
        return "catalog", []
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


def _address(table: str) -> Storage:
    return Storage.of(f"./{table}" if looks_like_a_table(table) else table)


def _ending_of(file: str) -> Kind | None:
    name = file.rpartition("/")[2].lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def _delta_files(table: Table) -> tuple[dict[str, pa.DataType], dict[str, Mapping[str, str | None]]]:
    """The types of a table's partitions; and the addresses of its files, each with their values."""
    table.check_readable()
    schema, root = table.schema(), Storage.of(table.uri)
    files: dict[str, Mapping[str, str | None]] = {
        (Storage.of(file.path) if "://" in file.path else root.child(file.path)).uri: file.partition
        for file in table.files()
    }
    return {name: schema.field(name).type for name in table.partition_columns()}, files


@contextmanager
def _opened(file: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file, closed again afterwards."""
    storage = Storage.of(file)
    with storage.open_input() as stream:
        try:
            yield pq.ParquetFile(stream, coerce_int96_timestamp_unit="us")
        except pa.ArrowInvalid as error:
            raise DataError(f"{storage.uri} cannot be read as Parquet ({error}): remove it") from error


def _plain(table: pa.Table) -> pa.Table:
    """The table with dictionaries as the values that they stand for."""
    for index, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(index, column.name, table.column(index).cast(column.type.value_type))
    return table
