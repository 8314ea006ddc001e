"""The source of a pipeline: what can be told of it without Spark, and its rows with the window that each belongs to.

Enters: the section ``source`` of a pipeline file. Leaves: a ``Look`` (files, versions, fingerprints by window), which a
run with nothing to do is satisfied with; and a DataFrame of the rows as they were at that look, with the column
``_window``, and ``_malformed`` where a file's rows can be cut or garbled.

Windows are told by UTC, whatever the session's time zone is. A row without a time, or with one that cannot be read, is
in the window ``none``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from msgspec import structs

from sparkdl.columns.names import quoted
from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError, DataError, SchemaError, SparkdlError
from sparkdl.pipeline.code import code_hash, imported
from sparkdl.pipeline.file.resolved import plain
from sparkdl.pipeline.rows.database import NOT_DECIDING, rows_of_database
from sparkdl.pipeline.rows.failures import source_errors
from sparkdl.pipeline.rows.text_files import MALFORMED, rows_of_texts
from sparkdl.pipeline.rows.window_column import window_column, window_of
from sparkdl.pipeline.rows.windows import NO_TIME, WHOLE, Span, spans
from sparkdl.pipeline.spec import (
    CsvSource,
    DeltaSource,
    FunctionSource,
    JdbcSource,
    JsonSource,
    ParquetSource,
    Source,
    SparkSource,
    SqlSource,
)
from sparkdl.storage import Entry, Storage, sha256_hex
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "MALFORMED",
    "WINDOW",
    "Look",
    "Size",
    "check_unchanged",
    "frame_of",
    "look_at",
    "of_windows",
    "read_rows",
    "source_identity",
]

WINDOW = "_window"
"""The column with the name of a row's window."""

_BYTES_PER_ROW = 100
_FILES = ParquetSource | CsvSource | JsonSource
_MOMENTS = ("date", "timestamp", "timestamp_ntz")
_AROUND = timedelta(days=2)
"""What a range of time has more at its ends: session and database may tell midnight by zones 26 hours apart."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much there is of a window.

    Attributes:
        bytes: of its files.
        rows: that were written to them, as a table's log says; None where none does.
        files: addresses, of a source that is files.
    """

    bytes: int
    rows: int | None = None
    files: tuple[str, ...] = ()

    @property
    def rows_about(self) -> int:
        """How many rows there are, guessed from the bytes where no log says it."""
        return self.bytes // _BYTES_PER_ROW if self.rows is None else self.rows


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a source shows without Spark.

    Attributes:
        state: a hash that changes whenever the rows may have changed; None where only Spark can tell.
        windows: a hash of what there is for each window, where the layout of files or partitions tells; else None.
        version: of the Delta table that was looked at; None elsewhere.
        files: addresses of the files that were there, as Spark takes them whatever plain paths mean to it; of each its
            bytes, and the time it was last written.
        bytes: of the files, as they are stored; None where only Spark can tell.
        sizes: of each window, or of ``all`` where only the rows tell their windows; empty where only Spark can tell.
    """

    state: str | None
    windows: Mapping[str, str] | None = None
    version: int | None = None
    files: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)
    bytes: int | None = None
    sizes: Mapping[str, Size] = field(default_factory=dict)


def look_at(source: Source) -> Look:
    """Look at files or at a table's log; a query or a function tells nothing before it runs.

    Raises:
        StorageError: there is no such table, or the place cannot be read.
        DataError: there are no files.
    """
    if isinstance(source, DeltaSource) and not looks_like_a_table(source.table):
        return _look_at_table(source)
    if isinstance(source, _FILES):
        return _look_at_files(source)
    return Look(state=None)


def check_unchanged(source: Source, look: Look) -> None:
    """Refuse what was read if a file is another one than at the look; files that came since are for the next run.

    Raises:
        DataError: names the first file.
    """
    if not look.files:  # a table's version never changes
        return
    now = look_at(source).files
    for place, stamp in look.files.items():
        if now.get(place) != stamp:
            what = "is gone" if place not in now else f"has {now[place][0]} bytes instead of {stamp[0]}, or is newer"
            raise DataError(f"the source changed while it was read: {place} {what}; run again")


def read_rows(spark: SparkSession, source: Source, look: Look) -> DataFrame:
    """The rows as they were at the look, each with its window.

    Args:
        spark: the session.
        source: the section of the file.
        look: that ``look_at`` took; the files that it saw are read, and no others.

    Raises:
        SchemaError: the column that says when a row happened is not there, or is no date.
        ConfigError: the function cannot be called, or returns no DataFrame.
        DataError: a file that was there is gone.
    """
    from pyspark.errors import PySparkException

    try:
        with source_errors(listed=not isinstance(source, SparkSource)):
            frame = _frame(spark, source, look)
    except PySparkException as error:
        reason = str(error).strip().partition("\n")[0]
        raise SchemaError(f"the source cannot be read: {reason}; correct source, or how it is written") from error
    return _with_windows(frame, source)


def _with_windows(frame: DataFrame, source: Source) -> DataFrame:
    taken = sorted({WINDOW} & set(frame.columns))
    if taken:
        raise SchemaError(f"the source has a column {taken[0]}, which the pipeline adds: rename it in the source")
    return frame.withColumn(WINDOW, window_column(frame, source))


def of_windows(rows: DataFrame, source: Source, windows: Collection[str]) -> DataFrame:
    """The rows of some windows, and for those who can pass over others unread, a range of time beside.

    Args:
        rows: as ``read_rows`` leaves them.
        source: the section of the file; its function is called again, with the time that the windows cover.
        windows: their names.

    Raises:
        ConfigError: the function fails, or returns no DataFrame.
        SchemaError: what it returns has no column that says when a row happened.
    """
    from pyspark.sql import functions as F

    timed = bool(windows) and not {NO_TIME, WHOLE} & {*windows}
    if timed and isinstance(source, FunctionSource):
        covered = spans(windows, timedelta(0))
        given = rows.sparkSession, Span(covered[0].start, covered[-1].end)
        rows = _with_windows(frame_of("source.function", source.function, *given, **source.arguments), source)
    chosen = rows.where(F.col(WINDOW).isin(*windows))
    if source.time is None or not timed:
        return chosen
    kind, column = rows.schema[source.time].dataType.typeName(), quoted(source.time)
    if kind not in _MOMENTS:
        return chosen
    ranges = [[f"{kind}'{end.date().isoformat()}'" for end in span] for span in spans(windows, _AROUND)]
    return chosen.where(" OR ".join(f"({column} >= {first} AND {column} < {end})" for first, end in ranges))


def _look_at_table(source: DeltaSource) -> Look:
    table = Table(source.table)
    version = table.version() if source.version is None else source.version
    files = table.files(version)
    stamps = [[file.path, file.bytes, file.deleted] for file in files]  # deletions leave path and size as they are
    windows = None
    if source.partition is not None:
        if source.partition not in table.partition_columns():
            raise SchemaError(
                f"source.partition names {source.partition!r}, and {table.uri} is partitioned by "
                f"{table.partition_columns()}: name one of these, or say source.time"
            )
        named = (str(file.partition[source.partition]) for file in files)
        windows = _by_window(source, zip(named, stamps, strict=True))
    sizes: dict[str, Size] = {}
    for file in files:
        name = WHOLE if source.partition is None else window_of(str(file.partition[source.partition]), source)
        before = sizes.get(name, Size(bytes=0, rows=0))
        rows = None if file.rows is None or before.rows is None else before.rows + file.rows
        sizes[name] = Size(bytes=before.bytes + file.bytes, rows=rows)
    total = sum(file.bytes for file in files)
    return Look(state=_hash(sorted(stamps)), windows=windows, version=version, sizes=sizes, bytes=total)


def _look_at_files(source: _FILES) -> Look:
    found = list(_listed(source.path))
    if not found:
        raise DataError(f"source.path={source.path} holds no files: check the path, or wait for data")
    stamps = [[file.uri, size, modified] for file, size, modified, _ in found]
    windows = None
    if source.partition is not None:
        lost = next((file.uri for file, _, _, values in found if source.partition not in values), None)
        if lost is not None:
            raise SchemaError(
                f"source.partition names {source.partition!r}, and {lost} lies in no folder {source.partition}=...: "
                "name the partition column, or say source.time"
            )
        named = (values[source.partition] for *_, values in found)
        windows = _by_window(source, zip(named, stamps, strict=True))
    grouped: dict[str, list[tuple[str, int]]] = {}
    for file, size, _, values in found:
        name = WHOLE if source.partition is None else window_of(values[source.partition], source)
        grouped.setdefault(name, []).append((file.uri, size))
    sizes = {
        name: Size(bytes=sum(size for _, size in each), files=tuple(uri for uri, _ in each))
        for name, each in grouped.items()
    }
    files = {file.spark_uri: (size, modified) for file, size, modified, _ in found}
    return Look(
        state=_hash(stamps), windows=windows, files=files, bytes=sum(size for size, _ in files.values()), sizes=sizes
    )


def _by_window(source: Source, stamps: Iterator[tuple[str, list[Any]]]) -> dict[str, str]:
    grouped: dict[str, list[list[Any]]] = {}
    for value, stamp in stamps:
        grouped.setdefault(window_of(value, source), []).append(stamp)
    return {name: _hash(sorted(found)) for name, found in sorted(grouped.items())}


def _listed(path: str) -> Iterator[tuple[Storage, int, float | None, dict[str, str]]]:
    """Every data file below ``path``, in order: the file, bytes, when it was modified, values of partition folders."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    root, pattern = Storage.of("/".join(parts[:first]) or "/"), parts[first:]
    entry = None if pattern else _as_file(root)
    if entry is not None:
        yield root, entry.bytes, entry.modified, {}
        return
    yield from _below(root, pattern, {})


def _as_file(place: Storage) -> Entry | None:
    """What the folder above says of a place that is a file; None for a folder, or where there is nothing."""
    local, name = place.local_path(), place.uri.rpartition("/")[2]
    if local is not None and not local.is_file():
        return None
    if local is None and [entry.name for entry in place.list()] not in ([], [name]):  # stores list a file as itself
        return None
    return next((one for one in place.parent().list() if one.name == name and not one.is_dir), None)


def _below(
    folder: Storage, pattern: Sequence[str], values: Mapping[str, str]
) -> Iterator[tuple[Storage, int, float | None, dict[str, str]]]:
    for entry in sorted(folder.list(), key=lambda entry: entry.name):
        hidden = entry.name.startswith((".", "_")) and "=" not in entry.name  # as Spark passes over them
        if hidden or (pattern and not fnmatch.fnmatchcase(entry.name, pattern[0])):
            continue
        name, equals, value = entry.name.partition("=")
        inner = {**values, name: unquote(value)} if equals and entry.is_dir else dict(values)
        if entry.is_dir:
            yield from _below(folder.child(entry.name), pattern[1:], inner)
        elif len(pattern) <= 1:
            yield folder.child(entry.name), entry.bytes, entry.modified, inner


def _frame(spark: SparkSession, source: Source, look: Look) -> DataFrame:
    if isinstance(source, DeltaSource):
        if not looks_like_a_table(source.table):
            return Table(source.table).read(spark, look.version)
        reader = spark.read if source.version is None else spark.read.option("versionAsOf", source.version)
        return reader.table(source.table)
    if isinstance(source, SqlSource):
        return spark.sql(source.query)
    if isinstance(source, FunctionSource):
        return frame_of("source.function", source.function, spark, None, **source.arguments)
    if isinstance(source, JdbcSource):
        return rows_of_database(spark, source)
    if isinstance(source, SparkSource):
        reader = spark.read.options(**source.options)
        if source.table is not None:
            return reader.table(source.table)
        reader = reader.format(str(source.format))
        return (reader if source.schema is None else reader.schema(source.schema)).load(source.path)
    return _of_files(spark, source, look)


def _of_files(spark: SparkSession, source: _FILES, look: Look) -> DataFrame:
    places = list(look.files)
    root = source.path.split("*")[0].split("?")[0].split("[")[0]
    folder = root if root == source.path else root.rpartition("/")[0]
    alone = places == [Storage.of(source.path).spark_uri]  # a file is no base of partitions
    reader = spark.read if alone else spark.read.option("basePath", Storage.of(folder).spark_uri)
    if isinstance(source, ParquetSource):
        return reader.options(**{"mergeSchema": True, **source.options}).parquet(*places)
    return rows_of_texts(reader, source, places)


def frame_of(what: str, target: str, *given: Any, **arguments: Any) -> DataFrame:
    """The DataFrame that a function of the user's returns.

    Args:
        what: the function's key in the file.
        target: the function, ``package.module:function``.
        given: its positional arguments.
        arguments: those by name.

    Raises:
        ConfigError: it cannot be imported, fails, or returns something else.
    """
    from pyspark.sql import DataFrame as Frame

    function = imported(target, what)
    try:
        frame = function(*given, **arguments)
    except SparkdlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}={target} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(frame, Frame):
        raise ConfigError(f"{what}={target} returned a {type(frame).__name__}: return a DataFrame of its session")
    return frame


def source_identity(source: Source) -> list[Any]:
    """What of a source decides which rows there can be: its settings without secrets, and the code of its function."""
    source = structs.replace(source, deleted_windows="keep")  # which decides of no window that there is
    code = code_hash(source.function) if isinstance(source, FunctionSource) else ""
    if getattr(source, "options", None):
        ignored = NOT_DECIDING if isinstance(source, JdbcSource) else ()
        options = {name: value for name, value in plain(source)["options"].items() if name.lower() not in ignored}
        source = structs.replace(source, options=options)
    return [type(source).__name__, source, code]


def _hash(value: Any) -> str:
    return sha256_hex(encode(value))[:32]
