"""Parquet files, whose footers tell columns and rows, and whether Arrow reads the files as Spark does."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.errors import DataError, StorageError
from sparkdl.pipeline.sources.base import Columns, FileStamp, ParquetFooters, Size, SourceSnapshot
from sparkdl.pipeline.sources.files import SQL_TYPES, Files
from sparkdl.pipeline.sources.parquet_times import (
    check_alike,
    check_types,
    in_microseconds,
    microseconds,
    nanosecond_columns,
    nanoseconds_as_numbers,
    schema_of,
)
from sparkdl.pipeline.sources.window_column import window_of
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.pipeline.windows import NO_TIME, WHOLE, WINDOW
from sparkdl.storage import Storage
from sparkdl.tables.record import TableFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

_MOST_FILES = 256
"""Files whose footers are read for their rows; each takes a millisecond or two, and a plan takes a moment."""
_SAMPLED = 64
"""Files whose footers are read for their columns: the first and the last."""
_SPARKS_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_SPARKS_VERSION = b"org.apache.spark.version"
_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_SPARKS_NAMES = {
    name: SQL_TYPES[name]
    for name in (
        *("boolean", "byte", "short", "integer", "long", "float", "double"),
        *("string", "date", "timestamp", "timestamp_ntz"),
    )
}
"""Types that Arrow and Spark read alike, by the name that Spark notes of them in a footer."""


@dataclass(frozen=True)
class ParquetFiles(Files):
    """Parquet files, whose footers tell columns and rows."""

    section: ParquetSource

    def _read(self, spark: SparkSession, reader: DataFrameReader, snapshot: SourceSnapshot) -> DataFrame:
        files = list(snapshot.files)
        reader = reader.options(**{"mergeSchema": True, **self.section.options})
        try:
            nanoseconds = nanosecond_columns(self._schemas(snapshot))
        except (DataError, StorageError):  # Spark says which file cannot be read
            nanoseconds = {}
        if not nanoseconds:
            return reader.parquet(*files)
        with nanoseconds_as_numbers(spark):
            schema = reader.parquet(*files).schema
        return in_microseconds(spark, reader.schema(schema).parquet(*files), nanoseconds)

    def _columns(self, snapshot: SourceSnapshot) -> Columns:
        types: dict[str, pa.DataType | None] = {}
        for file, schema in self._schemas(snapshot).items():
            check_types(schema, file)
            for field in schema:
                types.setdefault(field.name, microseconds(field.type))
        return Columns(types=types)

    def _schemas(self, snapshot: SourceSnapshot) -> dict[str, pa.Schema]:
        """The columns of the first and the last files; of all, where one of these has times in nanoseconds."""
        files = list(snapshot.files)
        sampled = files if len(files) <= _SAMPLED else [*files[: _SAMPLED // 2], *files[-_SAMPLED // 2 :]]
        footers = _footers({file: snapshot.files[file] for file in sampled})
        if nanosecond_columns({file: footer.schema for file, footer in footers.items()}):
            footers = _footers(snapshot.files)
        schemas = {file: footer.schema for file, footer in footers.items()}
        if str(self.section.options.get("mergeSchema", True)).lower() == "true":
            check_alike(schemas)
        return schemas

    def rows_by_window(self, snapshot: SourceSnapshot) -> dict[str, int] | None:
        """The rows of each window, as the footers tell them."""
        exact = not self.section.options and self.section.partition is not None
        footers = _few_footers(snapshot.files) if exact else None
        if footers is None:
            return None
        return {name: sum(footers[file].rows for file in size.files) for name, size in snapshot.sizes.items()}

    def count(self, size: Size) -> int | None:
        """The rows that the footers say."""
        footers = _few_footers(size.files)
        return None if footers is None else sum(footer.rows for footer in footers.values())

    def footers(self, snapshot: SourceSnapshot) -> ParquetFooters | None:
        """The files, where Arrow reads them as Spark does, and their footers are not too many.

        They are of this machine, with the same columns of ``_SPARKS_NAMES``, nanoseconds or decimals, and no options
        for Spark's reader. The partition column, if there is one, holds dates, and no other folder is named as one. The
        column that says when a row happened is no text.
        """
        section, by = self.section, self.section.partition
        if section.options or (by is not None and section.every != "day"):
            return None
        first = next(iter(snapshot.files))
        root = Storage.of(first).parent()
        footers = None if root.local_path() is None else _few_footers(snapshot.files)
        if footers is None or not all(footer.alike for footer in footers.values()):
            return None
        schema = footers[first].schema
        if by in schema.names or any(footer.schema != schema for footer in footers.values()):
            return None
        if section.time is not None and (
            section.time not in schema.names or not pa.types.is_temporal(schema.field(section.time).type)
        ):
            return None
        if by is not None:
            root = root.parent()
            schema = schema.append(pa.field(by, pa.date32()))
        if len({name.lower() for name in schema.names}) < len(schema) or WINDOW in schema.names or "=" in root.uri:
            return None
        table_files = []
        for address, footer in footers.items():
            path = Storage.of(address).uri.removeprefix(f"{root.uri.rstrip('/')}/")
            partition = self._partition(path.rpartition("/")[0])
            if partition is None:
                return None
            table_files.append(TableFile(path, snapshot.files[address][0], partition, footer.rows))
        of_spark = pa.schema([field.with_type(microseconds(field.type)) for field in schema])
        return ParquetFooters(schema=of_spark, stored=schema, root=root, files=tuple(table_files))

    def _partition(self, folder: str) -> dict[str, str | None] | None:
        """The partition's value and the window of the files in a folder below the root; None where Spark decides."""
        if self.section.partition is None:
            if folder:
                return None
            return {WINDOW: WHOLE} if self.section.time is None else {}
        name, _, day = folder.partition("=")
        if name != self.section.partition or day == NO_TIME or day != window_of(day, self.section):
            return None
        return {name: day, WINDOW: day}


@dataclass(frozen=True)
class _Footer:
    """What the footer of one file tells.

    Attributes:
        schema: its columns, INT96 in microseconds.
        rows: in the file.
        alike: whether Arrow reads the file as Spark does.
    """

    schema: pa.Schema
    rows: int
    alike: bool


@functools.lru_cache(maxsize=8192)
def _footer(file: str, stamp: FileStamp) -> _Footer:
    """The footer of a file, which is read once as long as its stamp stays what it is."""
    try:
        with Storage.of(file).open_input() as stream:
            metadata = pq.read_metadata(stream)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no Parquet file ({error}): remove it, or correct source.kind") from error
    return _Footer(
        schema=pa.schema([pa.field(field.name, field.type) for field in schema_of(metadata)]),
        rows=metadata.num_rows,
        alike=_read_alike(metadata.schema.to_arrow_schema(), metadata.metadata or {}),
    )


def _footers(files: Mapping[str, FileStamp]) -> dict[str, _Footer]:
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(files, pool.map(_footer, files, files.values()), strict=True))


def _few_footers(files: Mapping[str, FileStamp]) -> dict[str, _Footer] | None:
    """The footers of not too many files; None where one cannot be read: whoever reads the file says what is wrong."""
    if len(files) > _MOST_FILES:
        return None
    try:
        return _footers(files)
    except (pa.ArrowException, OSError, ValueError):
        return None


def _read_alike(schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> bool:
    """Whether the columns are of types that Arrow and Spark read alike, and those that Spark noted where it wrote."""
    if not len(schema) or not all(
        kind in _SPARKS_NAMES.values()
        or pa.types.is_decimal128(kind)
        or (pa.types.is_timestamp(kind) and kind.unit in ("us", "ns"))
        for kind in schema.types
    ):
        return False
    noted, version = metadata.get(_SPARKS_SCHEMA), metadata.get(_SPARKS_VERSION, b"4")
    if version[:2] in (b"1.", b"2.") or any(name in metadata for name in _OLD_CALENDAR):
        return False
    if noted is None:
        return True
    try:
        fields = [(field["name"], field["type"], field["metadata"]) for field in json.loads(noted)["fields"]]
    except (ValueError, KeyError, TypeError):
        return False
    if [name for name, _, _ in fields] != schema.names:
        return False
    for (_, kind, field_metadata), arrow_type in zip(fields, schema.types, strict=True):
        decimal = pa.types.is_decimal128(arrow_type) and kind == f"decimal({arrow_type.precision},{arrow_type.scale})"
        if field_metadata or not (decimal or (isinstance(kind, str) and _SPARKS_NAMES.get(kind) == arrow_type)):
            return False
    return True
