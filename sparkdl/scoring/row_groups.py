"""Pieces of Parquet files as record batches, as Spark would read them.

Enters: files, cut by row groups, and the columns that are wanted. Leaves: record batches of at most 4 MiB with these
columns under the caller's names and types. No Spark: a worker reads with it, and a test without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.errors import SchemaError
from sparkdl.storage import storage_errors

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

__all__ = ["Field", "Piece", "PieceReader"]

_BATCH_BYTES = 4 << 20
_BUFFER_BYTES, _LEAST_READ, _MOST_READ = 16 << 20, 16 << 10, 256 << 10
_MOST_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Field:
    """A column that is read.

    Attributes:
        name: in the result.
        source: in the files.
        kind: Arrow's type in the result.
        from_path: whether its value stands in the path of the file.
    """

    name: str
    source: str
    kind: pa.DataType
    from_path: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Some row groups of a file.

    Attributes:
        path: of the file.
        part: counted from 0.
        parts: in how many the file's row groups are divided.
        values: name and text of the columns that stand in the path.
    """

    path: str
    part: int
    parts: int
    values: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class PieceReader:
    """What one task reads.

    Attributes:
        pieces: of files, in order.
        fields: the wanted columns.
        case_sensitive: whether names that differ in case are different columns.
    """

    pieces: tuple[Piece, ...]
    fields: tuple[Field, ...]
    case_sensitive: bool = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Read the pieces one after another.

        Raises:
            StorageError: a file is gone or damaged.
            SchemaError: a file's column is of a type that is not read as the DataFrame's.
        """
        for piece in self.pieces:
            yield from self._read(piece)

    def check(self, index: int) -> None:
        """Look whether the file of a piece can be read, without reading rows; raises what reading would."""
        with storage_errors(self.pieces[index].path, "read"):
            self._columns(_opened(self.pieces[index].path, 1), self.pieces[index].path)

    def _read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        with storage_errors(piece.path, "read"):
            file = _opened(piece.path, len(self.fields))
            columns = self._columns(file, piece.path)
            known = dict(piece.values)
            groups = file.metadata.num_row_groups
            mine = range(piece.part * groups // piece.parts, (piece.part + 1) * groups // piece.parts)
            wanted = sorted({column for column in columns.values() if column is not None})
            for group in mine:
                rows = _batch_rows(file, group)
                read = file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)
                for batch in read:
                    arrays = [self._array(field, columns.get(field.name), batch, known) for field in self.fields]
                    yield pa.RecordBatch.from_arrays(arrays, names=[field.name for field in self.fields])

    def _array(self, field: Field, column: str | None, batch: pa.RecordBatch, known: dict[str, str | None]) -> pa.Array:
        if field.from_path:
            text = known[field.name]
            value = pa.scalar(text, pa.string()).cast(field.kind)
            return pa.repeat(value, batch.num_rows)
        if column is None:
            return pa.nulls(batch.num_rows, field.kind)
        array = batch.column(column)
        return array if array.type == field.kind else array.cast(field.kind)

    def _columns(self, file: ParquetFile, path: str) -> dict[str, str | None]:
        """The file's column of each field, None where it has none: then the column is null, as Spark has it."""
        schema = file.schema_arrow
        exact = {name: name for name in schema.names}
        folded = {name.lower(): name for name in schema.names}
        found: dict[str, str | None] = {}
        for field in self.fields:
            if field.from_path:
                continue
            name = exact.get(field.source)
            if name is None and not self.case_sensitive:
                name = folded.get(field.source.lower())
            if name is not None and not _reads_as(schema.field(name).type, field.kind, _is_rebased(file)):
                raise SchemaError(
                    f"column {name!r} of {path} is {schema.field(name).type}, and {field.name!r} of the DataFrame "
                    f"{field.kind}: let Spark read the files, with ScoreConfig(read_files=False) or df.where('true')"
                )
            found[field.name] = name
        return found


def _opened(path: str, columns: int) -> ParquetFile:
    """The file, read through one small buffer a column: its size is nothing a worker's memory depends on."""
    from pyarrow.parquet import ParquetFile

    buffer = max(_LEAST_READ, min(_MOST_READ, _BUFFER_BYTES // max(1, columns)))
    return ParquetFile(path, buffer_size=buffer, pre_buffer=False, coerce_int96_timestamp_unit="us")


def _batch_rows(file: ParquetFile, group: int) -> int:
    """Rows of a batch of about 4 MiB."""
    known = file.metadata.row_group(group)
    rows = _BATCH_BYTES * int(known.num_rows) // max(1, int(known.total_byte_size))
    return max(1, min(_MOST_ROWS, rows))


def _is_rebased(file: ParquetFile) -> bool:
    """Whether Spark moves dates and instants of this file from the old calendar, which Arrow does not."""
    marks = file.metadata.metadata or {}
    version = marks.get(b"org.apache.spark.version", b"3").split(b".")[0]
    legacy = {b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"}
    return bool(legacy & set(marks)) or (version.isdigit() and int(version) < 3)


def _reads_as(found: pa.DataType, wanted: pa.DataType, rebased: bool) -> bool:
    """Whether Arrow turns a file's type into the DataFrame's as Spark does: the same values, or wider numbers."""
    kinds = pa.types
    if kinds.is_dictionary(found):
        return _reads_as(found.value_type, wanted, rebased)
    if _is_list(found) and _is_list(wanted):
        return _reads_as(found.value_type, wanted.value_type, rebased)
    if kinds.is_timestamp(found) and kinds.is_timestamp(wanted):
        # Spark takes no instants for wall-clock times; Arrow shows INT96, which Spark writes, without a zone.
        return not rebased and found.unit in ("ms", "us") and not (found.tz and not wanted.tz)
    if kinds.is_date32(found) and kinds.is_date32(wanted):
        return not rebased
    if kinds.is_integer(found) and kinds.is_integer(wanted):
        spare = 0 if kinds.is_signed_integer(found) else 1
        return bool(found.bit_width + spare <= wanted.bit_width)
    if kinds.is_floating(found) and kinds.is_floating(wanted):
        return bool(found.bit_width <= wanted.bit_width)
    large = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return bool(large.get(found, found) == wanted)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
