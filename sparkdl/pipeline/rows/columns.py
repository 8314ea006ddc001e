"""The columns of a source and their types, as far as files and a table's log tell them without Spark.

Enters: the section ``source``, and the files that were there when it was looked at. Leaves: ``Columns``. Footers of
Parquet files, a Delta table's log, the first lines of a CSV or JSON file are read, and no more of the rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.rows.source import Look
from sparkdl.pipeline.rows.text_files import header_names
from sparkdl.pipeline.spec import CsvSource, DeltaSource, JsonSource, ParquetSource, Source
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.table import Table

__all__ = [
    "Columns",
    "columns_of",
    "columns_of_ddl",
    "first_lines",
    "header_names",
    "partition_types",
    "partition_values",
    "readable_by_spark",
    "separator",
    "unpacked",
]

_HEAD = 256 << 10
"""Bytes of a text file that are looked at."""
_FILES = 64
"""Parquet files whose footers are read: the first and the last."""
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

_TYPES: Mapping[str, pa.DataType] = {
    "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(), "short": pa.int16(), "int": pa.int32(),
    "integer": pa.int32(), "bigint": pa.int64(), "long": pa.int64(), "float": pa.float32(), "real": pa.float32(),
    "double": pa.float64(), "string": pa.string(), "varchar": pa.string(), "char": pa.string(), "boolean": pa.bool_(),
    "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"), "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"), "binary": pa.binary(), "decimal": pa.decimal128(10, 0),
    "dec": pa.decimal128(10, 0), "numeric": pa.decimal128(10, 0),
}  # fmt: skip
"""Types of Spark's SQL; of others the name of a column alone is known."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of a source's columns.

    Attributes:
        types: by name, in order; None where the type cannot be told.
        whole: whether there are no others; False where a row that was not looked at may have more.
        why_not: why nothing is known, as the end of a sentence; empty where something is.
    """

    types: Mapping[str, pa.DataType | None]
    whole: bool = True
    why_not: str = ""


def columns_of(source: Source, look: Look) -> Columns:
    """Look at the columns.

    Args:
        source: the section of the file.
        look: that was taken of it.

    Raises:
        StorageError: it cannot be read.
        DataError: a file is not what the source says it is.
        SchemaError: a column is of a type that Spark does not read.
    """
    if isinstance(source, DeltaSource) and not looks_like_a_table(source.table):
        return Columns(types={field.name: field.type for field in Table(source.table).schema(look.version)})
    if isinstance(source, ParquetSource):
        return _of_parquet(list(look.files))
    if isinstance(source, CsvSource):
        return _of_csv(source, list(look.files))
    if isinstance(source, JsonSource):
        return _of_json(source, list(look.files))
    return Columns(types={}, whole=False, why_not="Spark alone knows its columns")


def partition_values(file: str) -> dict[str, str]:
    """The values of partition folders (``day=2026-03-01``) in the address of a file."""
    pairs = (part.partition("=") for part in file.split("/")[:-1])
    return {name: unquote(value) for name, equals, value in pairs if equals and name}


def partition_types(files: Sequence[str]) -> dict[str, pa.DataType]:
    """Types of partition columns as Spark infers them of all values."""
    seen: dict[str, set[str]] = {}
    for file in files:
        for name, value in partition_values(file).items():
            seen.setdefault(name, set()).add(value)
    return {name: _of_texts(values - {"__HIVE_DEFAULT_PARTITION__"}) for name, values in seen.items()}


def _of_texts(values: set[str]) -> pa.DataType:
    for form, kind in (
        (r"-?\d{1,18}", pa.int64()), (r"-?\d+(\.\d+)?", pa.float64()), (r"\d{4}-\d{2}-\d{2}", pa.date32()),
        (r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}(:\d{2}.*)?", pa.timestamp("us", "UTC")),
    ):  # fmt: skip
        if values and all(re.fullmatch(form, value) for value in values):
            return kind
    return pa.string()


def _of_parquet(files: Sequence[str]) -> Columns:
    chosen = files if len(files) <= _FILES else [*files[: _FILES // 2], *files[-_FILES // 2 :]]
    with ThreadPoolExecutor(16) as pool:
        schemas = list(pool.map(_parquet_schema, chosen))
    found: dict[str, pa.DataType | None] = {}
    for schema, file in zip(schemas, chosen, strict=True):
        readable_by_spark(schema, file)
        for field in schema:
            found.setdefault(field.name, field.type)
    return Columns(types={**found, **partition_types(files)})


def _parquet_schema(file: str) -> pa.Schema:
    try:
        with Storage.of(file).open_input() as stream:
            return pq.read_schema(stream)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no Parquet file ({error}): remove it, or correct source.kind") from error


def readable_by_spark(schema: pa.Schema, file: str) -> None:
    """Refuse a file with a column of a type that Spark does not read: it would not read the others either.

    Raises:
        SchemaError: names the column, its type and what to write instead.
    """
    for field in schema:
        nanoseconds = pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        if nanoseconds or pa.types.is_time(field.type) or pa.types.is_float16(field.type):
            instead = (
                "microseconds (pandas: to_parquet(..., coerce_timestamps='us'))" if nanoseconds else "another type"
            )
            raise SchemaError(
                f"the column {field.name!r} of {file} is {field.type}, which Spark does not read: write it in {instead}"
            )


def first_lines(file: str, most: int = _HEAD) -> tuple[bytes, bool]:
    """The first whole lines of a text file, within ``most`` bytes, and whether they are all."""
    with Storage.of(file).open_input() as stream:
        try:
            data = bytes(unpacked(stream, file).read(most + 1))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} cannot be unpacked ({error}): write it again") from error
    if len(data) <= most:
        return data, True
    cut = data[:most].rfind(b"\n")
    return data[: cut + 1], False


def unpacked(stream: Any, file: str) -> Any:
    """What a stream of ``file`` holds, unpacked if its name says that it is packed."""
    packed = next((kind for end, kind in _COMPRESSED.items() if file.endswith(end)), None)
    return stream if packed is None else pa.input_stream(stream, compression=packed)


def separator(options: Mapping[str, Any]) -> str:
    """What parts the cells of a line, as Spark's reader takes its options."""
    said = str(options.get("sep", options.get("delimiter", ",")))
    return {"\\t": "\t"}.get(said, said)


def _of_csv(source: CsvSource, files: Sequence[str]) -> Columns:
    partitions = partition_types(files)
    if source.schema is not None:
        return Columns(types={**columns_of_ddl(source.schema), **partitions})
    options = {name.lower(): value for name, value in source.options.items()}
    sep, quote = separator(options), str(options.get("quote", '"'))
    if len(sep) != 1 or len(quote) != 1:
        return Columns(types={}, whole=False, why_not=f"only Spark reads its options {source.options}")
    data, _ = first_lines(files[0])
    encoding = str(options.get("encoding", options.get("charset", "utf-8")))
    try:
        text = data.decode(encoding, errors="replace").removeprefix("\ufeff")
    except LookupError:
        return Columns(types={}, whole=False, why_not=f"its encoding {encoding!r} is not known here")
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=sep, quotechar=quote) if line]
    except csv.Error as error:
        raise DataError(f"{files[0]} is no CSV file ({error}): correct source.kind, or its options") from error
    if not lines:
        raise DataError(f"{files[0]} has no line: remove it, or write it again")
    headed = str(options.get("header", True)).lower() == "true"
    names = header_names(lines[0]) if headed else [f"_c{place}" for place in range(len(lines[0]))]
    simple = not {"multiline", "comment", "escape", "encoding", "charset"} & options.keys()
    rows = lines[1 if headed else 0 :] if simple else []
    nothing = {"", str(options.get("nullvalue", ""))}
    return Columns(types={**_plain_texts(names, rows, nothing), **partitions})


def _plain_texts(names: Sequence[str], rows: list[list[str]], nothing: set[str]) -> dict[str, pa.DataType | None]:
    """Columns with a value that is plainly a text are texts, whatever follows; else rows not looked at decide."""
    number = r"[\d.,:/TZ+ -]*\d[\d.,:/TZ+ -]*([eE][-+]?\d+)?"  # or a date
    value = re.compile(rf"\s*({number}|[-+]?(nan|inf|infinity)|true|false)\s*", re.IGNORECASE)
    found: dict[str, pa.DataType | None] = {}
    for place, name in enumerate(names):
        cells = (row[place] for row in rows if place < len(row))
        found[name] = pa.string() if any(c not in nothing and not value.fullmatch(c) for c in cells) else None
    return found


def _of_json(source: JsonSource, files: Sequence[str]) -> Columns:
    partitions = partition_types(files)
    if source.schema is not None:
        return Columns(types={**columns_of_ddl(source.schema), **partitions})
    if source.options:
        return Columns(types={}, whole=False, why_not=f"only Spark reads its options {source.options}")
    data, whole = first_lines(files[0])
    names: dict[str, None] = {}
    for line in data.splitlines():
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError as error:
            raise DataError(
                f"{files[0]} has a line that is no JSON object ({error}): write one a line, or correct source.kind"
            ) from error
        names |= dict.fromkeys(row if isinstance(row, dict) else ())
    return Columns(types={**dict.fromkeys(names), **partitions}, whole=whole and len(files) == 1)


def columns_of_ddl(ddl: str) -> dict[str, pa.DataType | None]:
    """Columns of ``id BIGINT, day DATE``, as Spark reads it."""
    found: dict[str, pa.DataType | None] = {}
    for part in _parts(ddl):
        named = re.match(r"\s*(?:`((?:[^`]|``)*)`|([^\s:`]+))\s*:?\s*(\w*)", part)
        if named is not None:
            name = named[2] if named[1] is None else named[1].replace("``", "`")
            found[name] = _TYPES.get(named[3].lower())
    return found


def _parts(ddl: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for place, character in enumerate(ddl):
        if quote:
            quote = "" if character == quote else quote
        elif character in "`'\"":
            quote = character
        elif character in "<>()":
            depth += 1 if character in "<(" else -1
        elif character == "," and depth == 0:
            yield ddl[start:place]
            start = place + 1
    yield ddl[start:]
