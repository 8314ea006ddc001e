"""One task's share of a table write: Arrow batches in, Parquet files with their statistics out; no Spark."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.columns.numpy_arrow import from_numpy, from_rows, to_numpy
from sparkdl.compat.quick_ack import promptly
from sparkdl.config import require
from sparkdl.storage import Storage, storage_errors
from sparkdl.tables.nulls import nested_nulls

_CODECS = ("snappy", "zstd", "lz4", "none")
_ROW_GROUP_BYTES = 32 << 20
_HELD_BYTES = 128 << 20  # of all files of one task that are open
OPEN_FILES = 32
"""Most files that a task holds open."""
_STATISTICS_COLUMNS = 32  # Delta's own default for the number of columns that get minima and maxima
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = {chr(code) for code in range(1, 32)} | set("\"#%'*/:=?\\{}[]^\x7f") | {" "}


@dataclass(frozen=True, slots=True)
class FileRow:
    """One written file: what a Delta add action says about it.

    Attributes:
        path: relative to the table.
        bytes: its size.
        rows: how many it holds.
        partition: JSON object, partition column to text or null.
        statistics: JSON object as the Delta protocol defines it.
        nulls: JSON object, nested columns and what is inside of them to nulls, which the statistics do not tell.
        modified: milliseconds since the epoch.
    """

    path: str
    bytes: int
    rows: int
    partition: str
    statistics: str
    nulls: str
    modified: int


FILE_ROW_DDL = ", ".join(
    f"{column.name} {'string' if column.type == 'str' else 'bigint'}" for column in fields(FileRow)
)
FILE_ROW_SCHEMA = pa.schema(
    [(column.name, pa.string() if column.type == "str" else pa.int64()) for column in fields(FileRow)]
)


def partition_text(value: Any) -> str | None:
    """A partition value as the Delta log spells it: ISO dates, ``true``/``false``, digits; null and ``""`` are null."""
    if isinstance(value, bytes):
        value = value.decode()
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def directory(partition: Mapping[str, str | None]) -> str:
    """``day=2024-01-01/hour=3``, escaped as Hive and Spark do, so that Spark finds the values in the path again."""
    parts = []
    for name, value in partition.items():
        text = HIVE_NULL if value is None else "".join(_escape(letter) for letter in value)
        parts.append("".join(_escape(letter) for letter in name) + "=" + text)
    return "/".join(parts)


def _escape(letter: str) -> str:
    return f"%{ord(letter):02X}" if letter in _ESCAPED else letter


class _Counted:
    """A sink that knows how many bytes went into it: streams of object stores do not tell."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.bytes = 0
        self.aborted = False

    @property
    def closed(self) -> bool:
        return self._sink.closed and not self.aborted

    def write(self, data: Any) -> int:
        if not self.aborted:
            self._sink.write(data)
        count = memoryview(data).nbytes
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Nothing: what is whole is written when the file is closed."""

    def close(self) -> None:
        """Nothing: the stack that opened the sink closes it, or aborts it."""


@dataclass(slots=True)
class _OpenFile:
    path: str
    storage: Storage
    stack: ExitStack
    sink: _Counted
    writer: pq.ParquetWriter
    collected: list[pq.FileMetaData]
    rows: int = 0
    nulls: Counter[str] = field(default_factory=Counter)  # of floats, which get no statistics in the file
    nested: Counter[str] = field(default_factory=Counter)
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0

    def write(self) -> None:
        """Write what is held as one row group."""
        if self.held:
            self.writer.write_table(pa.Table.from_batches(self.held), row_group_size=1 << 20)
            self.held, self.held_bytes = [], 0


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """The function that every Spark task of a table write runs.

    Files have names that no other attempt uses, and the driver makes a Delta action of each one's row. A file that no
    committed action names does not exist for a reader, so a task may die anywhere. It runs inside a Spark worker, and
    in a test without one.

    Attributes:
        root: the table's folder.
        write_id: of this write; part of every file name.
        partition_by: partition columns, in order.
        compression: Parquet codec.
        file_bytes: a file is closed once it has grown to this size.
    """

    root: Storage
    write_id: str
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    file_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        require(
            self.compression in _CODECS,
            f"compression={self.compression!r} is not one of {_CODECS}: choose one of these",
        )

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches; yield ``FILE_ROW_SCHEMA`` rows."""
        yield from from_rows([asdict(row) for row in self.write(batches)], FILE_ROW_SCHEMA).to_batches()

    def write(self, batches: Iterator[pa.RecordBatch]) -> list[FileRow]:
        """Write the batches into files of this task's own; on failure none of them is left.

        Raises:
            StorageError: the table's place cannot be written.
        """
        with self.open() as files:
            for batch in promptly(batches):
                files.write(batch)
            return files.finish()

    def open(self) -> Files:
        """The files of this task, for batches that come one by one; a context manager, on failure none is left."""
        return Files(self)


class Files:
    """The files that one task has open, at most ``OPEN_FILES`` at once, and those it has finished.

    Args:
        task: whose they are.
    """

    def __init__(self, task: WriteTask) -> None:
        self._task = task
        self._root = task.root
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}
        self._done: list[tuple[Storage, FileRow]] = []

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            return
        for file in self._open.values():
            with suppress(Exception):
                file.sink.aborted = True  # or the Parquet writer, when it is collected, would write its footer
                file.stack.__exit__(kind, value, trace)  # aborts the upload, or removes the local file
            with suppress(Exception):
                file.storage.delete()
        for storage, _ in self._done:
            with suppress(Exception):
                storage.delete()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch to the files of their partitions.

        Raises:
            StorageError: the table's place cannot be written.
        """
        if batch.num_rows:
            for partition, part in split(normalised(batch), self._task.partition_by):
                self._append(partition, part)

    def finish(self) -> list[FileRow]:
        """Close all files; return a row for each.

        Raises:
            StorageError: the table's place cannot be written.
        """
        for partition in list(self._open):
            self._close(partition)
        return [row for _, row in self._done]

    def _append(self, partition: tuple[str | None, ...], batch: pa.RecordBatch) -> None:
        file = self._open.pop(partition, None)
        if file is None:
            if len(self._open) >= OPEN_FILES:  # the one that was not written to for longest
                self._close(next(iter(self._open)))
            file = self._create(partition, batch)
        self._open[partition] = file
        file.held.append(batch)
        file.held_bytes += batch.nbytes
        file.rows += batch.num_rows
        for name in _floating(batch.schema):
            file.nulls[name] += batch.column(name).null_count
        file.nested.update(nested_nulls(batch))
        if file.held_bytes >= min(_ROW_GROUP_BYTES, self._task.file_bytes):
            self._flush(file)
        elif sum(file_writer.held_bytes for file_writer in self._open.values()) >= _HELD_BYTES:
            self._flush(max(self._open.values(), key=lambda file_writer: file_writer.held_bytes))
        if file.sink.bytes >= self._task.file_bytes:
            self._close(partition)

    def _flush(self, file: _OpenFile) -> None:
        with storage_errors(file.storage.uri, "write"):
            file.write()

    def _create(self, partition: tuple[str | None, ...], batch: pa.RecordBatch) -> _OpenFile:
        values = dict(zip(self._task.partition_by, partition, strict=True))
        name = f"part-{self._task.write_id}-{uuid.uuid4().hex}.parquet"
        path = f"{directory(values)}/{name}" if values else name
        storage = self._root.child(path)
        with storage_errors(storage.uri, "write"), ExitStack() as stack:
            sink = _Counted(stack.enter_context(storage.open_output()))
            collected: list[pq.FileMetaData] = []
            writer = pq.ParquetWriter(
                sink,
                batch.schema,
                compression=self._task.compression,
                use_dictionary=_worth_a_dictionary(batch.schema),
                write_statistics=with_statistics(batch.schema),
                metadata_collector=collected,
            )
            return _OpenFile(path, storage, stack.pop_all(), sink, writer, collected)

    def _close(self, partition: tuple[str | None, ...]) -> None:
        file = self._open[partition]
        with storage_errors(file.storage.uri, "write"):
            file.write()
            file.writer.close()
            file.stack.close()
        del self._open[partition]
        values = dict(zip(self._task.partition_by, partition, strict=True))
        stats = statistics(file.collected[0], file.writer.schema, file.nulls)
        row = FileRow(
            path=file.path,
            bytes=file.sink.bytes,
            rows=file.rows,
            partition=json.dumps(values),
            statistics=json.dumps(stats, ensure_ascii=False),  # of escaped letters delta-rs misreads some
            nulls=json.dumps(file.nested),
            modified=int(time.time() * 1000),
        )
        self._done.append((file.storage, row))


def _worth_a_dictionary(schema: pa.Schema) -> list[str]:
    """Columns that repeat: a dictionary of floating-point features costs more time than it saves bytes."""
    return [column.name for column in schema if pa.types.is_string(column.type) or pa.types.is_integer(column.type)]


def _floating(schema: pa.Schema) -> list[str]:
    return [column.name for column in schema if pa.types.is_floating(column.type)]


def with_statistics(schema: pa.Schema) -> list[str]:
    """Columns that readers may skip row groups by.

    Arrow and delta-rs leave NaN out of the bounds that they write, and Spark takes NaN for greater than any number: by
    bounds of floats its filters would lose rows.
    """
    return [
        arrow_field.name
        for arrow_field in schema
        if not pa.types.is_floating(arrow_field.type) and not pa.types.is_nested(arrow_field.type)
    ]


def normalised(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as a Delta file holds it: instants in UTC, every column nullable."""
    target = pa.schema([pa.field(column.name, _utc(column.type)) for column in batch.schema])
    if target == batch.schema:
        return batch
    columns = [column.cast(kind.type) for column, kind in zip(batch.columns, target, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(inner.name, _utc(inner.type)) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _utc(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_utc(kind.key_type), _utc(kind.item_type))
    return kind


def split(
    batch: pa.RecordBatch, partition_by: Sequence[str]
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Cut a batch by its partition values, order kept inside each; the partition columns leave the batch."""
    if not partition_by:
        yield (), batch
        return
    stored = batch.select([name for name in batch.schema.names if name not in partition_by])
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for name in partition_by:
        encoded = batch.column(name).dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + to_numpy(encoded.indices)
    distinct, first, which = np.unique(codes, return_index=True, return_inverse=True)
    for number, position in enumerate(first):
        values = tuple(partition_text(batch.column(name)[int(position)].as_py()) for name in partition_by)
        if len(distinct) == 1:
            yield values, stored
        else:
            yield values, stored.take(from_numpy(np.flatnonzero(which == number)))


def statistics(metadata: pq.FileMetaData, schema: pa.Schema, counted: Mapping[str, int]) -> dict[str, Any]:
    """Delta's statistics of a file: rows, nulls of each column, minima and maxima of ordered ones.

    Args:
        metadata: of the file, whose statistics give all but what ``counted`` has.
        schema: of it.
        counted: nulls by column that has no statistics in the file: of floating-point ones, see ``with_statistics``.
    """
    nulls, lows, highs = dict(counted), dict[str, Any](), dict[str, Any]()
    bounded = {name for name in schema.names[:_STATISTICS_COLUMNS] if is_ordered(schema.field(name).type)}
    leaves = [arrow_field.name for arrow_field in schema for _ in range(_leaves(arrow_field.type))]
    for index, name in enumerate(leaves):  # by place: a column `a.b` has the path of what is inside of a struct `a`
        if pa.types.is_nested(schema.field(name).type):
            continue
        chunks = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(chunk is None or not chunk.has_null_count for chunk in chunks):
            continue
        nulls[name] = sum(chunk.null_count for chunk in chunks)
        filled = [chunk for chunk in chunks if chunk.num_values]
        if name in bounded and filled and all(chunk.has_min_max for chunk in filled):
            kind = schema.field(name).type
            raw = "_raw" if pa.types.is_timestamp(kind) else ""  # an instant of Arrow's would import pandas
            with suppress(OverflowError):  # Python knows no year before 1 or after 9999
                lows[name] = _bound(min(getattr(chunk, f"min{raw}") for chunk in filled), kind, upper=False)
            with suppress(OverflowError):
                highs[name] = _bound(max(getattr(chunk, f"max{raw}") for chunk in filled), kind, upper=True)
    return {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


def _leaves(kind: pa.DataType) -> int:
    """How many columns of a file one of this type takes."""
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields)) or 1


def is_ordered(kind: pa.DataType) -> bool:
    """Whether least and greatest values of a type are kept by all writers alike."""
    test = (pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
    return any(is_one(kind) for is_one in test)


def _bound(value: Any, kind: pa.DataType, *, upper: bool) -> Any:
    """A least or greatest value as Delta's log spells it; of an instant, of microseconds since 1970."""
    if isinstance(value, str) and len(value) > 32:
        return value[:32] + ("\U0010ffff" if upper else "")
    if pa.types.is_timestamp(kind):
        moment = datetime(1970, 1, 1) + timedelta(microseconds=value)
        return moment.isoformat(timespec="microseconds") + ("Z" if kind.tz else "")
    return value.isoformat() if hasattr(value, "isoformat") else value
