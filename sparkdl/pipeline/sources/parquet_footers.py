"""What the footers of Parquet files tell: columns, if Arrow reads them as Spark does, and rows by window."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.pipeline.sources.window_column import window_of
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.pipeline.windows import WHOLE, WINDOW
from sparkdl.storage import Storage
from sparkdl.tables.record import TableFile

_MOST_FILES = 256
"""Files whose footers the driver reads; each takes a millisecond or two."""
_SPARKS_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_SPARKS_VERSION = b"org.apache.spark.version"
_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_SPARKS_NAMES = {
    "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "string": pa.string(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip
"""Types that Arrow and Spark read alike, by the name that Spark notes of them in a footer."""


@dataclass(frozen=True, kw_only=True)
class ParquetFooters:
    """Files that Arrow reads as Spark does.

    Attributes:
        schema: of the columns that Spark would read; the partition column is the last.
        root: the folder that the files lie below.
        files: of each its path below the root, and the window beside the partition's value.
        row_bytes: of the widest file's rows, before compression, on average.
    """

    schema: pa.Schema
    root: Storage
    files: tuple[TableFile, ...]
    row_bytes: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows by window; a window without rows is not there."""
        counts: dict[str, int] = {}
        for file in self.files:
            if file.rows:
                window = str(file.partition[WINDOW])
                counts[window] = counts.get(window, 0) + file.rows
        return counts


def rows_by_window(section: ParquetSource, windows: Mapping[str, Sequence[str]]) -> dict[str, int] | None:
    """The rows of each window of a source with a partition, of which these are the files; None where Spark counts."""
    files = [(name, file) for name, addresses in windows.items() for file in addresses]
    if section.options or section.partition is None or len(files) > _MOST_FILES:
        return None
    footers = read_footers([file for _, file in files])
    counts: dict[str, int] = {}
    for name, file in files:
        if footers is None:
            return None
        if rows := footers[file].num_rows:
            counts[name] = counts.get(name, 0) + rows
    return counts


def footers_of(section: ParquetSource, sizes: Mapping[str, int]) -> ParquetFooters | None:
    """The footers of the files; None where Spark alone reads them right, or there are many of them.

    Files are of this machine, with the same columns of ``_SPARKS_NAMES`` or decimals, and no options for Spark's
    reader. The partition column, if there is one, holds dates, and no other folder is named as one.

    Args:
        section: of the source.
        sizes: bytes of each file, by its address.
    """
    by, files = section.partition, list(sizes)
    if section.options or section.time is not None or (by is not None and section.every != "day"):
        return None
    if not files or len(files) > _MOST_FILES:
        return None
    root = Storage.of(files[0]).parent()
    if root.local_path() is None:
        return None
    footers = read_footers(files)
    if footers is None:
        return None
    schema = _common_schema(list(footers.values()))
    if schema is None or by in schema.names:
        return None
    if by is not None:
        root = root.parent()
        schema = schema.append(pa.field(by, pa.date32()))
    if len({name.lower() for name in schema.names}) < len(schema) or WINDOW in schema.names or "=" in root.uri:
        return None
    table_files = []
    for address in files:
        file = Storage.of(address)
        folder, _, name = file.uri.removeprefix(f"{root.uri.rstrip('/')}/").rpartition("/")
        partition = _partition(folder, section)
        if partition is None or file.uri == name:
            return None
        path = f"{folder}/{name}" if folder else name
        table_files.append(TableFile(path, sizes[address], partition, footers[address].num_rows))
    widths = [_row_bytes(footer) for footer in footers.values()]
    return ParquetFooters(schema=schema, root=root, files=tuple(table_files), row_bytes=max(widths))


def _partition(folder: str, section: ParquetSource) -> dict[str, str | None] | None:
    """The partition's value and the window of the files in a folder below the root; None where Spark decides."""
    if section.partition is None:
        return None if folder else {WINDOW: WHOLE}
    name, _, text = folder.partition("=")
    try:
        date.fromisoformat(text)
    except ValueError:
        return None
    if name != section.partition or len(text) != len("2026-03-01") or text[4] != "-":
        return None
    return {name: text, WINDOW: window_of(text, section)}


def read_footers(files: Sequence[str]) -> dict[str, Any] | None:
    """The footers of files, by address; None where one cannot be read: whoever reads the file says what is wrong."""

    def footer(address: str) -> Any:
        with Storage.of(address).open_input() as stream:
            return pq.read_metadata(stream)

    try:
        with ThreadPoolExecutor(min(16, len(files) or 1)) as pool:
            return dict(zip(files, pool.map(footer, files), strict=True))
    except (pa.ArrowException, OSError, ValueError):
        return None


def _common_schema(footers: list[Any]) -> pa.Schema | None:
    """The columns, if they are the same in all files, and of types that Arrow and Spark read alike."""
    first: pa.Schema | None = None
    for footer in footers:
        schema = pa.schema([pa.field(field.name, field.type) for field in footer.schema.to_arrow_schema()])
        readable = all(kind in _SPARKS_NAMES.values() or pa.types.is_decimal128(kind) for kind in schema.types)
        if not readable or not len(schema) or not _as_spark_noted(schema, footer.metadata or {}):
            return None
        if first is not None and schema != first:
            return None
        first = schema
    return first


def _as_spark_noted(schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> bool:
    """Whether the columns are those that Spark noted where it wrote the file, with times in today's calendar."""
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


def _row_bytes(footer: Any) -> int:
    size = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    return int(size // max(1, footer.num_rows))
