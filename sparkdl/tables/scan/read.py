"""A worker's share of a table: parts of files in, record batches in the types of the table out; no Spark."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkdl.columns.numpy_arrow import from_numpy, from_values
from sparkdl.compat.column_names import Task
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.worker_errors import encodable_errors
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.errors import DataError, SchemaError
from sparkdl.storage import RangeReader, Storage, storage_errors
from sparkdl.tables.record import Partition
from sparkdl.tables.scan.conditions import Condition

_BUFFER, _BUFFERS = 256 << 10, 16 << 20  # bytes of a column that are read at once, and of all columns together
_BATCH_BYTES = 32 << 20
"""Bytes of a batch, as the file holds them before it compresses them."""
_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")


@dataclass(frozen=True, slots=True)
class FilePart:
    """Some row groups of a file: those that begin in a range of its bytes.

    Attributes:
        path: below the table's folder.
        size: of the whole file, bytes.
        start: where the range begins.
        end: where it ends, exclusive.
        partition: its values as the log spells them.
        deleted: a bit for each row of the whole file, least significant first, set where it is deleted; compressed by
            zlib, and None where none is. Rows beyond its end are not deleted.
    """

    path: str
    size: int
    start: int
    end: int
    partition: Partition
    deleted: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """The function that every task of a scan runs.

    Rows that are deleted, or that ``where`` does not hold for, are left out. A task holds one batch, and of remote
    files what it reads of one row group. It runs inside a Spark worker, and in a test without one.

    Attributes:
        root: the table's folder.
        schema: of the batches that leave.
        names: of the columns in the files, by those of the table.
        layout: the partition columns, which the files need not hold.
        where: what rows have to meet.
        batch_rows: most rows of a batch; of long texts or pictures it has fewer.
        shares: what each task reads, by its number.
    """

    root: Storage
    schema: pa.Schema
    names: Mapping[str, str]
    layout: tuple[str, ...]
    where: tuple[Condition, ...]
    batch_rows: int
    shares: tuple[tuple[FilePart, ...], ...]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the shares whose numbers come in the first column.

        Raises:
            StorageError: a file cannot be read.
            SchemaError: a file holds a column in a type that is not the table's.
        """
        for batch in promptly(numbers):
            for number in batch.column(0).to_pylist():
                for part in self.shares[number] if number < len(self.shares) else ():
                    yield from self.read(part)

    def mapped(self, spark: Any, tasks: Sequence[Task], schema: Any) -> Any:
        """What tasks, one behind the other, make of the rows: a DataFrame with this schema, a text or a StructType."""
        use_drivers_python(spark)
        count = max(1, len(self.shares))
        return spark.range(0, count, 1, count).mapInArrow(Chain((self, *tasks)), schema)

    def collected(self, tasks: Sequence[Task] = ()) -> pa.Table:
        """What tasks, one behind the other, make of the rows, read by the driver; without a row, all of the columns."""
        batches = (batch for share in self.shares for part in share for batch in self.read(part))
        made_batches = list(Chain(tuple(tasks))(batches))
        return pa.Table.from_batches(made_batches, made_batches[0].schema if made_batches else self.schema)

    def read(self, part: FilePart) -> Iterator[pa.RecordBatch]:
        """Read one part of a file."""
        file = self.root.child(part.path)
        with storage_errors(file.uri, "read"), _opened(file, part.size, len(self.schema) + len(self.where)) as parquet:
            stored = self._stored(file.uri, parquet)
            leaves = _leaves(parquet.metadata.schema, {*stored.values()})
            first = 0
            for number in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(number)
                if part.start <= begin_of(group) and (begin_of(group) < part.end or part.end >= part.size):
                    bytes_of_rows = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
                    rows = parquet.iter_batches(
                        min(self.batch_rows, max(1, _BATCH_BYTES * group.num_rows // max(1, bytes_of_rows))),
                        row_groups=[number],
                        columns=list(stored.values()),
                        use_threads=False,
                    )
                    yield from self._given(rows, part, stored, first)
                first += group.num_rows

    def _stored(self, uri: str, parquet: pq.ParquetFile) -> dict[str, str]:
        """The columns that a file has of those that are needed, by their names in the table."""
        schema = parquet.schema_arrow
        stored_names = {name.lower(): name for name in schema.names}  # as Spark finds them
        stored_names |= {name: name for name in schema.names}
        needed_names = dict.fromkeys([*self.schema.names, *(condition.column for condition in self.where)])
        columns = {}
        for name in needed_names:
            name_in_files = self.names[name]
            stored_name = stored_names.get(name_in_files, stored_names.get(name_in_files.lower()))
            if name not in self.layout and stored_name is not None:
                columns[name] = stored_name
        _check_calendar(uri, parquet.metadata.metadata or {}, [schema.field(name) for name in columns.values()])
        return columns

    def _given(
        self, rows: Iterator[pa.RecordBatch], part: FilePart, stored: Mapping[str, str], first: int
    ) -> Iterator[pa.RecordBatch]:
        """What leaves of the rows of a row group, of which ``first`` is the place in the file."""
        deleted = None if part.deleted is None else np.frombuffer(zlib.decompress(part.deleted), np.uint8)
        for batch in rows:
            count = batch.num_rows
            mask = None if deleted is None else from_numpy(_unpacked_bits(deleted, first, count) == 0)
            for condition in self.where:
                met = condition.mask(
                    batch.column(stored[condition.column])
                    if condition.column in stored
                    else pa.nulls(count, condition.kind)
                )
                mask = met if mask is None else pc.and_(mask, met)
            columns = [self._column(field, batch, part, stored) for field in self.schema]
            selected = pa.RecordBatch.from_arrays(columns, schema=self.schema) if columns else batch.select([])
            if mask is not None:
                selected = selected.filter(mask)
            if selected.num_rows:
                yield selected
            first += count

    def _column(self, field: pa.Field, batch: pa.RecordBatch, part: FilePart, stored: Mapping[str, str]) -> pa.Array:
        """One column in the type that it has in the table: the partition's value, the file's, or nulls."""
        if field.name in self.layout:
            value = from_values([part.partition[field.name]], pa.string()).cast(field.type)
            return pa.repeat(value[0], batch.num_rows)
        if field.name not in stored:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(stored[field.name])
        if column.type == field.type:
            return column
        try:
            return column.cast(field.type)
        except pa.ArrowException as cause:
            raise SchemaError(
                f"column {field.name!r} is {column.type} in the file {part.path} and {field.type} in the table "
                f"{self.root.uri}: write the file again"
            ) from cause


@dataclass(frozen=True)
class Chain:
    """Functions on batches, one behind the other, as the one function of a task."""

    tasks: tuple[Task, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What the last makes of what the others made."""
        for task in self.tasks:
            batches = task(batches)
        with encodable_errors():
            yield from batches


@contextmanager
def _opened(file: Storage, size: int, columns: int) -> Iterator[pq.ParquetFile]:
    """A Parquet file: of this machine in small buffers, of others each row group's columns in few large requests."""
    remote = file.local_path() is None
    buffer = 0 if remote else max(4096, min(_BUFFER, _BUFFERS // max(1, columns)))
    with (
        RangeReader(size, file.read_bytes) if remote else file.open_input() as source,
        pq.ParquetFile(source, pre_buffer=remote, buffer_size=buffer, coerce_int96_timestamp_unit="us") as parquet,
    ):
        yield parquet


def _leaves(schema: pq.ParquetSchema, columns: Collection[str]) -> list[int]:
    """The numbers of columns, and of what is inside of them, among all leaves that a file holds."""
    paths = [schema.column(leaf).path for leaf in range(len(schema))]
    return [leaf for leaf, path in enumerate(paths) if path in columns or path.partition(".")[0] in columns]


def begin_of(group: pq.RowGroupMetaData) -> int:
    """The place where a row group begins in its file."""
    column = group.column(0)
    return int(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)


def _unpacked_bits(packed: np.ndarray[Any, Any], first: int, count: int) -> np.ndarray[Any, Any]:
    """``(count,)`` bits from ``first`` on, zeros beyond the end."""
    bits = np.unpackbits(packed[first // 8 : -(-(first + count) // 8)], bitorder="little")[first % 8 :][:count]
    return np.pad(bits, (0, count - len(bits)))


def _check_calendar(uri: str, marks: Mapping[bytes, bytes], fields: Iterable[pa.Field]) -> None:
    """Refuse times that Spark wrote in the calendar of before 1582, which it alone turns into today's."""
    calendar_marks = [name.decode() for name in _OLD_CALENDAR if name in marks]
    times = [field.name for field in fields if pa.types.is_temporal(field.type)]
    if calendar_marks and times:
        raise DataError(
            f"the file {uri} holds {times} in the calendar of before 1582 ({calendar_marks[0]}): write it again "
            "without spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY, or score the DataFrame that Spark reads"
        )
