"""A table that nobody has described: its kind, a sample of its rows, and counts over all rows.

A sample is spread over all of the table; sample and counts stay within bounds of memory. Spark is asked for a table of
its catalog alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from sparkdl.tables.scan.read import begin_of
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
        root = partition_root(address)
        types = partition_types(files, root)
        self.source, self.notes, self.partitions = {"kind": kind, "path": address}, {}, tuple(types)
        self._files = list(files)
        self._partition_by_file: Mapping[str, Mapping[str, pa.Scalar]] = {
            file: {name: partition_scalar(value, types[name]) for name, value in partition_values(file, root).items()}
            for file in files
        }

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
        partition = self._partition_by_file[file]
        for name in partition if columns is None else columns:
            if name not in rows.column_names:  # of the folder, or of no file from before the column was added
                rows = rows.append_column(name, pa.repeat(partition.get(name, pa.scalar(None)), rows.num_rows))
        return rows if columns is None else rows.select(list(columns))


class ParquetRows(FileRows):
    """Parquet files."""

    _hidden = 0
    """Rows in the files that are deleted all the same."""

    def sample(self) -> Sample:
        """Rows of row groups all over the table, the first and the last among them, drawn at random in each."""
        looked_at = self._files[:: max(1, -(-len(self._files) // _FOOTERS))]
        groups, schemas = [], {}
        for file in looked_at:
            with _opened(file) as parquet:
                facts, schema, address = parquet.metadata, schema_of(parquet.metadata), Storage.of(file).uri
                check_types(schema, address)
                schemas[address] = schema
                row_groups = map(facts.row_group, range(facts.num_row_groups))
                groups += [
                    (file, number, group.num_rows, group.total_byte_size // group.num_rows)
                    for number, group in enumerate(row_groups)
                    if group.num_rows
                ]
        if self.source["kind"] == "parquet":  # files of a Delta table may be older than its columns' types
            check_alike(schemas)
        rows_in_footers = sum(rows for _, _, rows, _ in groups)
        self.about = rows_in_footers * len(self._files) // max(1, len(looked_at)) - self._hidden
        chosen, all_seen = groups, len(looked_at) == len(self._files)
        if groups and (not all_seen or rows_in_footers > SAMPLE_ROWS):
            count = int(max(1, min(_PARTS, _DECODED_ROWS * len(groups) // rows_in_footers, len(groups))))
            chosen = [groups[round(at)] for at in np.linspace(0, len(groups) - 1, count)]
        share = max(1, -(-sum(rows for _, _, rows, _ in chosen) // SAMPLE_ROWS))
        tables, room = [], _SAMPLE_BYTES
        for turn, (file, number, _, row_bytes) in enumerate(chosen):
            draw = np.random.default_rng(number)  # every n-th row would see one weekday, or one of two classes in turn
            left_to_others = room - room // (len(chosen) - turn)
            batch_rows = int(min(8192, max(16, (16 << 20) // max(1, row_bytes))))  # few pictures
            for batch in self._read(file, None, batch_rows, group=number):
                tables.append(_plain(batch if share == 1 else batch.filter(draw.random(len(batch)) * share < 1)))
                room -= tables[-1].nbytes
                if room <= left_to_others:
                    break
        if not tables:
            raise self._nothing()
        rows = pa.concat_tables(tables, promote_options="permissive")
        complete = all_seen and rows.num_rows == self.about
        of = f"{'' if all_seen else 'about '}{self.about:,} rows"
        places = f"{count_of(len(chosen), 'place')} all over {count_of(len(self._files), 'file')}"
        coverage = f"all {of}" if complete else f"{rows.num_rows:,} of {of}, from {places}"
        return Sample(rows=rows, complete=complete, coverage=coverage)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of every row."""
        for file in self._files:
            yield from self._read(file, columns, 1 << 18)

    def _read(
        self, file: str, columns: Sequence[str] | None, batch_rows: int, group: int | None = None
    ) -> Iterator[pa.Table]:
        """Columns of a file, or of one row group of it; all of them by default."""
        with _opened(file) as parquet:
            names = None if columns is None else [name for name in columns if name in parquet.schema_arrow.names]
            groups = None if group is None else [group]
            for batch in parquet.iter_batches(batch_size=batch_rows, row_groups=groups, columns=names):
                yield self._with_partition(pa.Table.from_batches([times_of_spark(batch)]), file, columns)


class DeltaRows(ParquetRows):
    """The rows of a Delta table that are not deleted, its columns by the names that the table has for them."""

    def __init__(self, kind: str, table: str, files: Sequence[str]) -> None:
        address = _address(table).uri
        scan = Table(address).scan()
        mapped_inside = [field.name for field in scan.schema if scan.maps and pa.types.is_nested(field.type)]
        self.source, self.notes, self.partitions = {"kind": kind, "table": address}, {}, scan.layout
        if mapped_inside:
            self.notes["table"] = (
                f"not looked at, since Spark alone reads what it maps inside: {', '.join(mapped_inside)}"
            )
        self._columns = [name for name in scan.schema.names if name not in mapped_inside]
        self._hidden = scan.deleted_rows
        self._part_by_file = {scan.root.child(file.path).uri: scan.part_of(file) for file in scan.files}
        self._files = list(self._part_by_file)
        self._scan = replace(scan, files=())  # whose tasks share out nothing

    def _read(
        self, file: str, columns: Sequence[str] | None, batch_rows: int, group: int | None = None
    ) -> Iterator[pa.Table]:
        part = self._part_by_file[file]
        if group is not None:
            with _opened(file) as parquet:
                begin = begin_of(parquet.metadata.row_group(group))
            part = replace(part, start=begin, end=begin + 1)
        task = self._scan.task(columns or self._columns, slots=1, batch_rows=batch_rows)
        return (pa.Table.from_batches([batch]) for batch in task.read(part))


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
    kinds = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in table.schema.types)
    return table.cast(pa.schema(zip(table.column_names, kinds, strict=True)))
