"""Files that a path or a pattern names, and what they show without Spark; those of CSV and JSON.

Columns of CSV files with a header are taken by name: Spark compares each file's header with the columns, and a file
with others, or with the same in another order, is refused.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa

from sparkdl.errors import DataError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.sources.base import Columns, FileStamp, Size, Source, SourceSnapshot, snapshot_of
from sparkdl.pipeline.sources.table_formats import check_names_in, check_no_table_at, fixed_part
from sparkdl.pipeline.spec.source import CsvSource, JsonSource, ParquetSource
from sparkdl.pipeline.windows import MALFORMED
from sparkdl.storage import Entry, Storage
from sparkdl.tables.parquet import HIVE_NULL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))  # else a cell above 131,072 characters is an error
_HEAD, _LONGEST_LINE = 256 << 10, 16 << 20
"""Bytes of a text file that are looked at."""
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

SQL_TYPES: Mapping[str, pa.DataType] = {
    "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(), "short": pa.int16(), "int": pa.int32(),
    "integer": pa.int32(), "bigint": pa.int64(), "long": pa.int64(), "float": pa.float32(), "real": pa.float32(),
    "double": pa.float64(), "string": pa.string(), "varchar": pa.string(), "char": pa.string(), "boolean": pa.bool_(),
    "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"), "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"), "binary": pa.binary(), "decimal": pa.decimal128(10, 0),
    "dec": pa.decimal128(10, 0), "numeric": pa.decimal128(10, 0),
}  # fmt: skip
"""Types of Spark's SQL; of others the name of a column alone is known."""


class Files(Source):
    """Files that a path or a pattern names; a kind of them says how they are read, and what their columns are."""

    section: ParquetSource | CsvSource | JsonSource
    partition_is_text = True

    @property
    def arrow_address(self) -> str:
        """The path of its files."""
        return self.section.path

    def snapshot(self) -> SourceSnapshot:
        """The files that there are now."""
        path, by = self.section.path, self.section.partition
        files, root = list(_listed(path)), partition_root(path)
        if not files:
            raise DataError(f"source.path={path} holds no files: check the path, or wait for data")
        folders = [partition_values(file.spark_uri, root) for file, _ in files]
        lost = [file.uri for (file, _), values in zip(files, folders, strict=True) if by not in (None, *values)]
        if lost:
            raise SchemaError(
                f"source.partition names {by!r}, and {lost[0]} lies in no folder {by}=...: "
                "name the partition column, or say source.time"
            )
        shown = [
            (values.get(by or "", ""), [file.uri, *stamp], Size(bytes=stamp[0], files={file.spark_uri: stamp}))
            for (file, stamp), values in zip(files, folders, strict=True)
        ]
        return snapshot_of(self.section, shown)

    def columns(self, snapshot: SourceSnapshot) -> Columns:
        """Those in the files, and those that are partitions."""
        columns = self._columns(snapshot)
        partitions = partition_types(list(snapshot.files), partition_root(self.section.path))
        return columns if columns.why_not else replace(columns, types={**columns.types, **partitions})

    def _columns(self, snapshot: SourceSnapshot) -> Columns:
        raise NotImplementedError

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """The rows of the files that there were."""
        root = partition_root(self.section.path)
        alone = list(snapshot.files) == [root]  # a file is no base of partitions
        return self._read(spark, spark.read if alone else spark.read.option("basePath", root), snapshot)

    def _read(self, spark: SparkSession, reader: DataFrameReader, snapshot: SourceSnapshot) -> DataFrame:
        raise NotImplementedError


class _TextFiles(Files):
    section: CsvSource | JsonSource
    reader_options: ClassVar[Mapping[str, Any]] = {}

    def _read(self, spark: SparkSession, reader: DataFrameReader, snapshot: SourceSnapshot) -> DataFrame:
        from pyspark.sql.types import StringType, StructField, StructType

        files = list(snapshot.files)
        options = {"columnNameOfCorruptRecord": MALFORMED, "mode": "PERMISSIVE", **self.reader_options}
        reader = reader.format(self.kind).options(**{**options, **self.section.options})
        if self.section.schema is not None:
            schema = StructType.fromDDL(self.section.schema)
            if not isinstance(schema, StructType):
                raise SchemaError(
                    f"source.schema={self.section.schema} is one type: write columns, as in 'id BIGINT, at TIMESTAMP'"
                )
        else:
            reader, schema = self._inferred(reader, files)
        if MALFORMED not in schema.names:
            schema = schema.add(StructField(MALFORMED, StringType(), True))
        return reader.schema(schema).load(files)

    def _inferred(self, reader: DataFrameReader, files: Sequence[str]) -> tuple[DataFrameReader, StructType]:
        return reader, reader.load(list(files)).schema

    def _columns(self, snapshot: SourceSnapshot) -> Columns:
        declared = self.section.schema
        return self._looked_at(list(snapshot.files)) if declared is None else Columns(types=columns_of_ddl(declared))

    def _looked_at(self, files: Sequence[str]) -> Columns:
        """What the first lines of the first file tell."""
        raise NotImplementedError


@dataclass(frozen=True)
class CsvFiles(_TextFiles):
    """CSV files."""

    section: CsvSource
    reader_options: ClassVar[Mapping[str, Any]] = {"header": True, "enforceSchema": False}

    def _inferred(self, reader: DataFrameReader, files: Sequence[str]) -> tuple[DataFrameReader, StructType]:
        schema = reader.options(inferSchema=True).load(list(files)).schema
        if not self._by_name(reader, schema.names, files[0]):
            reader = reader.options(header=True, enforceSchema=True)
            if len(files) > 1:
                message = "columns of %s have no name, or one name, and are taken by their place in each file"
                logger.warning(message, self.section.path)
        return reader, schema

    def _by_name(self, reader: DataFrameReader, names: Sequence[str], first: str) -> bool:
        """Whether the names that Spark found are those of the header, and not some that it made of it."""
        options = {name.lower(): str(value).lower() for name, value in self.section.options.items()}
        if options.get("header") == "false" or options.get("enforceschema") == "true":
            return True
        if not any(name.endswith(str(position)) for position, name in enumerate(names)):
            return True
        row = reader.options(header=False, inferSchema=False).load(first).first()
        reader.options(header=True)
        cells = [str(cell or "") for cell in row or ()]
        made_names = header_names(cells)
        return made_names == cells or made_names != list(names)[: len(made_names)]

    def _looked_at(self, files: Sequence[str]) -> Columns:
        options = {name.lower(): value for name, value in self.section.options.items()}
        sep, quote = str(options.get("sep", options.get("delimiter", ","))), str(options.get("quote", '"'))
        sep = "\t" if sep == "\\t" else sep  # as Spark's reader takes it
        if len(sep) != 1 or len(quote) != 1:
            return Columns(types={}, why_not=f"only Spark reads its options {sorted(self.section.options)}")
        data, _ = first_lines(files[0])
        encoding = str(options.get("encoding", options.get("charset", "utf-8")))
        try:
            text = data.decode(encoding, errors="replace").removeprefix("\ufeff")
        except LookupError:
            return Columns(types={}, why_not=f"its encoding {encoding!r} is not known here")
        try:
            lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=sep, quotechar=quote) if line]
        except csv.Error as error:
            raise DataError(f"{files[0]} is no CSV file ({error}): correct source.kind, or its options") from error
        if not lines:
            raise DataError(f"{files[0]} has no line: remove it, or write it again")
        headed = str(options.get("header", True)).lower() == "true"
        names = header_names(lines[0]) if headed else [f"_c{position}" for position in range(len(lines[0]))]
        simple = not {"multiline", "comment", "escape", "encoding", "charset"} & options.keys()
        rows = lines[1 if headed else 0 :] if simple else []
        nothing = {"", str(options.get("nullvalue", ""))}
        return Columns(types=_plain_texts(names, rows, nothing))


@dataclass(frozen=True)
class JsonFiles(_TextFiles):
    """Files with one JSON object a line."""

    section: JsonSource

    def _looked_at(self, files: Sequence[str]) -> Columns:
        options = sorted(self.section.options)
        if options:
            return Columns(types={}, why_not=f"only Spark reads its options {options}")
        data, complete = first_lines(files[0])
        names: dict[str, None] = {}
        for line in data.splitlines():
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise DataError(
                    f"{files[0]} has a line that is no JSON object ({error}): write one a line, or correct source.kind"
                ) from error
            names |= dict.fromkeys(row if isinstance(row, dict) else ())
        return Columns(types=dict.fromkeys(names), complete=complete and len(files) == 1)


def _listed(path: str) -> Iterator[tuple[Storage, FileStamp]]:
    """Every data file below ``path``, in order, with its stamp."""
    fixed, pattern = fixed_part(path)
    root = Storage.of(fixed)
    check_no_table_at(root)
    entry = None if pattern else _as_file(root)
    if entry is not None:
        yield root, (entry.bytes, entry.modified)
    else:
        yield from _below(root, pattern)


def _as_file(address: Storage) -> Entry | None:
    """What the folder above says of a place that is a file; None for a folder, or where there is nothing."""
    local, name = address.local_path(), address.uri.rpartition("/")[2]
    if local is not None and not local.is_file():
        return None
    if local is None and [entry.name for entry in address.list()] not in ([], [name]):  # stores list a file as itself
        return None
    return next((entry for entry in address.parent().list() if entry.name == name and not entry.is_dir), None)


def _below(folder: Storage, pattern: Sequence[str]) -> Iterator[tuple[Storage, FileStamp]]:
    entries = sorted(folder.list(), key=lambda entry: entry.name)
    check_names_in(folder, [entry.name for entry in entries])
    for entry in entries:
        hidden = entry.name.startswith((".", "_")) and "=" not in entry.name  # as Spark passes over them
        if hidden or (pattern and not fnmatch.fnmatchcase(entry.name, pattern[0])):
            continue
        if entry.is_dir:
            yield from _below(folder.child(entry.name), pattern[1:])
        elif len(pattern) <= 1:
            yield folder.child(entry.name), (entry.bytes, entry.modified)


def partition_root(path: str) -> str:
    """How the addresses of all files of a path begin: the folders behind it are partitions, as they are for Spark."""
    return Storage.of(fixed_part(path)[0]).spark_uri


def partition_values(file: str, root: str) -> dict[str, str]:
    """The values of partition folders (``day=2026-03-01``) in the address of a file, below ``root``."""
    pairs = (part.partition("=") for part in file.removeprefix(root).split("/")[:-1])
    return {name: unquote(value) for name, equals, value in pairs if equals and name}


def partition_types(files: Sequence[str], root: str) -> dict[str, pa.DataType]:
    """Types of partition columns as Spark infers them of all values."""
    values_by_name: dict[str, set[str]] = {}
    for file in files:
        for name, value in partition_values(file, root).items():
            values_by_name.setdefault(name, set()).add(value)
    return {name: _of_texts(values - {HIVE_NULL}) for name, values in values_by_name.items()}


def _of_texts(values: set[str]) -> pa.DataType:
    for form, kind in (
        (r"-?\d{1,18}", pa.int64()), (r"-?\d+(\.\d+)?", pa.float64()), (r"\d{4}-\d{2}-\d{2}", pa.date32()),
        (r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}(:\d{2}.*)?", pa.timestamp("us", "UTC")),
    ):  # fmt: skip
        if values and all(re.fullmatch(form, value) for value in values):
            try:
                for value in values:
                    partition_scalar(value, kind)
            except pa.ArrowInvalid:  # such as 2026-02-30, which Spark takes for a text, too
                return pa.string()
            return kind
    return pa.string()


def partition_scalar(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """The value that the name of a partition folder stands for, null for Hive's word for none; times are of UTC.

    Raises:
        pa.ArrowInvalid: it is none of that type.
    """
    scalar = pa.scalar(None if text == HIVE_NULL else text, pa.string())
    try:
        return scalar.cast(kind)
    except pa.ArrowInvalid:
        if not pa.types.is_timestamp(kind):
            raise
        return scalar.cast(pa.timestamp(kind.unit)).cast(kind)


def first_lines(file: str, most: int = _HEAD) -> tuple[bytes, bool]:
    """The first whole lines of a text file, within ``most`` bytes or one longer line, and whether they are all."""
    with Storage.of(file).open_input() as stream:
        try:
            lines = unpacked(stream, file)
            data = bytes(lines.read(most + 1))
            while len(data) > most and b"\n" not in data[:most] and most < _LONGEST_LINE:  # thousands of columns
                most *= 2
                data += bytes(lines.read(most + 1 - len(data)))
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


def header_names(cells: Sequence[str]) -> list[str]:
    """The names that Spark makes of a first line: what is empty or stands there twice gets its number.

    Raises:
        SchemaError: two names are equal even so.
    """
    duplicates = {name for name, count in Counter(cell.lower() for cell in cells).items() if count > 1}
    names = [
        f"_c{position}" if not cell else f"{cell}{position}" if cell.lower() in duplicates else cell
        for position, cell in enumerate(cells)
    ]
    made_twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if made_twice is not None:
        raise SchemaError(
            f"the first line has the columns {', '.join(cells)}, of which Spark calls two {made_twice!r}, as it adds "
            "their places to equal names: rename one"
        )
    return names


def _plain_texts(names: Sequence[str], rows: list[list[str]], nothing: set[str]) -> dict[str, pa.DataType | None]:
    """Columns with a value that is plainly a text are texts, whatever follows; else rows not looked at decide."""
    number = r"[\d.,:/TZ+ -]*\d[\d.,:/TZ+ -]*([eE][-+]?\d+)?"  # or a date
    value = re.compile(rf"\s*({number}|[-+]?(nan|inf|infinity)|true|false)\s*", re.IGNORECASE)
    types: dict[str, pa.DataType | None] = {}
    for position, name in enumerate(names):
        cells = (row[position] for row in rows if position < len(row))
        types[name] = pa.string() if any(c not in nothing and not value.fullmatch(c) for c in cells) else None
    return types


def columns_of_ddl(ddl: str) -> dict[str, pa.DataType | None]:
    """Columns of ``id BIGINT, day DATE``, as Spark reads it."""
    types: dict[str, pa.DataType | None] = {}
    for part in _parts(ddl):
        named = re.match(r"\s*(?:`((?:[^`]|``)*)`|([^\s:`]+))\s*:?\s*(\w*)", part)
        if named is not None:
            name = named[2] if named[1] is None else named[1].replace("``", "`")
            types[name] = SQL_TYPES.get(named[3].lower())
    return types


def _parts(ddl: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for position, character in enumerate(ddl):
        if quote:
            quote = "" if character == quote else quote
        elif character in "`'\"":
            quote = character
        elif character in "<>()":
            depth += 1 if character in "<(" else -1
        elif character == "," and depth == 0:
            yield ddl[start:position]
            start = position + 1
    yield ddl[start:]
