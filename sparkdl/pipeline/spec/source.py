"""The section ``source`` of a pipeline file: where rows come from, what tells them apart, when they happened.

What it contradicts in other sections is for ``file/conflicts.py``. How each kind is read is for ``sources/``.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field

from sparkdl.pipeline.spec.base import Column, Columns, Function, Natural, Section, Text, Wrong, doc, hours_of, one_of

Scalar = str | int | float | bool
TableOrPath = Annotated[
    str,
    doc(
        "A path or URI (a relative one is relative to this file), or catalog.schema.table.",
        min_length=1,
        examples=["s3://lake/customers", "main.sales.customers"],
    ),
]
_Path = Annotated[Text, doc("A file, a folder or a pattern, as path or URI; relative ones to this file.")]
_Options = Annotated[
    dict[str, Scalar], doc("Options of Spark's reader, by its names; secrets as ${NAME} of the environment.")
]
_Schema = Annotated[
    Text | None, doc("The columns as SQL, 'id BIGINT, day DATE, ...'; without, Spark reads all to guess.")
]


def half_a_name(name: str, text: str) -> Iterator[Wrong]:
    """Yield that a text is neither plainly a path nor the whole name of a table: ``sales.customers``."""
    if re.fullmatch(r"[^\W\d]\w*\.[^\W\d]\w*", text):
        yield (
            name,
            f"={text!r} may be a table without its catalog, or a folder: write 'spark_catalog.{text}' or './{text}'",
        )


_OWN_KINDS = ("delta", "parquet", "csv", "json", "jdbc")


def tells_who(address: str) -> bool:
    """Whether an address holds a user or a password: ``//me:mine@host``, ``thin:me/mine@``, ``?user=me``."""
    named = re.search(r"[?&;,(]\s*[\w.-]*(user(name)?|password|passwd|pwd|secret|token)\s*=", address, re.IGNORECASE)
    location, *_ = re.split(r"[?;](?=[\w.-]+=)", address)  # others are a password's
    user_part, _, _ = location.rpartition("@")
    return named is not None or bool(re.sub(r"^([\w+.-]+:)+(///.*|/*)", "", user_part))


class _AnySource(Section, frozen=True, kw_only=True, tag_field="kind"):
    """What all kinds of sources have in common.

    Attributes:
        addresses: the options that are addresses, which may be relative to the pipeline file.
    """

    addresses: ClassVar[tuple[str, ...]] = ("path",)

    key: Annotated[
        Columns,
        doc(
            "The columns that tell rows apart: of the rows of one window with the same key one stays, the newest by "
            "time that no expectation refuses, and the others are counted and dropped. Left out, no row is a "
            "duplicate, also not of an equal one."
        ),
    ] = ()
    time: Annotated[Column | None, doc("The date or timestamp of a row: it decides the window a row belongs to.")] = (
        None
    )
    partition: Annotated[
        Column | None, doc("Instead of time: the partition column that holds the day or hour, e.g. 2026-03-01.")
    ] = None
    every: Annotated[
        Literal["hour", "day"],
        doc("How long one window is: rows are taken in, checked, counted and scored window by window."),
    ] = "day"
    deleted_windows: Annotated[
        Literal["keep", "remove"],
        doc(
            "What becomes of the rows of windows that the source no longer holds: keep leaves them in the "
            "clean rows, and every run says so; remove takes them out. --backfill over such a window removes it, too."
        ),
    ] = "keep"

    def _misfits(self) -> Iterator[Wrong]:
        if self.deleted_windows == "remove" and not self.when:
            yield (
                "deleted_windows",
                "='remove' needs windows, and there is neither time nor partition: leave it out, or name one of them",
            )
        if self.time and self.partition:
            yield (
                "partition",
                f"={self.partition!r} and time={self.time!r} both say when a row happened: keep one of the two",
            )
        duplicates = sorted({column for column in self.key if self.key.count(column) > 1})
        if duplicates:
            yield "key", f" names {duplicates[0]!r} twice: name each column once"

    @property
    def when(self) -> str | None:
        """The column that says when a row happened, if there is one."""
        return self.time or self.partition

    @property
    def window_hours(self) -> int:
        """How long one window is."""
        return hours_of(f"1 {self.every}")


class DeltaSource(_AnySource, frozen=True, kw_only=True, tag="delta"):
    """A Delta table."""

    addresses: ClassVar[tuple[str, ...]] = ("table", "allow_folders")

    table: TableOrPath
    version: Annotated[
        Natural | None, doc("Read this version always; left out, the newest one, pinned once a run.")
    ] = None
    allow_folders: Annotated[
        tuple[Text, ...],
        doc(
            "Folders besides the table's own that its log may name files in: those of the original where "
            "the table is a shallow clone. Files anywhere else are refused."
        ),
    ] = ()

    def _misfits(self) -> Iterator[Wrong]:
        yield from super()._misfits()
        yield from half_a_name("table", self.table)


class ParquetSource(_AnySource, frozen=True, kw_only=True, tag="parquet"):
    """Parquet files."""

    path: _Path
    options: _Options = field(default_factory=dict)


class CsvSource(_AnySource, frozen=True, kw_only=True, tag="csv"):
    """CSV files; a first line with names, by which columns are taken, unless ``options: {header: false}``."""

    path: _Path
    schema: _Schema = None
    options: _Options = field(default_factory=dict)


class JsonSource(_AnySource, frozen=True, kw_only=True, tag="json"):
    """Files with one JSON object a line."""

    path: _Path
    schema: _Schema = None
    options: _Options = field(default_factory=dict)


class SqlSource(_AnySource, frozen=True, kw_only=True, tag="sql"):
    """A query over the tables of Spark's catalog."""

    query: Annotated[Text, doc("One SELECT of Spark SQL.")]


class JdbcSource(_AnySource, frozen=True, kw_only=True, tag="jdbc"):
    """A table or a query of a database, through its JDBC driver; tasks share the rows by the key."""

    url: Annotated[Text, doc("jdbc:postgresql://host:5432/database; user and password stand in options.")]
    table: Annotated[Text | None, doc("A table or view, as the database spells it: sales.orders.")] = None
    query: Annotated[Text | None, doc("Instead of table: one SELECT in the database's own SQL.")] = None
    options: Annotated[
        dict[str, Scalar],
        doc(
            "Of Spark's reader, by its names: user, password (as ${NAME} of the environment), driver, "
            "numPartitions, fetchsize, ..."
        ),
    ] = field(default_factory=dict)

    def _misfits(self) -> Iterator[Wrong]:
        yield from super()._misfits()
        if not re.match(r"jdbc:\w", self.url):  # what it is instead may hold a password
            yield "url", " is no JDBC address: write it like 'jdbc:postgresql://host:5432/database'"
        elif tells_who(self.url):
            yield "url", " holds a user or a password: take them out, and give user and password: ${NAME} in options"
        yield from one_of("table", self.table, "query", self.query)
        for name in self.options:
            if name.lower() in ("url", "dbtable", "query"):
                yield f"options.{name}", " is said by url, table and query: leave it out"


class SparkSource(_AnySource, frozen=True, kw_only=True, tag="spark"):
    """Whatever else Spark reads: a format by its name, or a table of its catalog (Hive, Iceberg, a view)."""

    format: Annotated[
        Text | None, doc("As spark.read.format takes it: orc, avro, xml, or the name of a package's own.")
    ] = None
    table: Annotated[Text | None, doc("Instead of format: a table or view that the session's catalog knows.")] = None
    path: Annotated[
        Text | None, doc("What a format reads that reads files, as path or URI; relative to this file.")
    ] = None
    schema: _Schema = None
    options: _Options = field(default_factory=dict)

    def _misfits(self) -> Iterator[Wrong]:
        yield from super()._misfits()
        yield from one_of("format", self.format, "table", self.table)
        if self.format in _OWN_KINDS:
            yield "format", f"={self.format!r} has a kind of its own: write kind: {self.format}"
        for name in ("path", "schema"):
            if self.table is not None and getattr(self, name) is not None:
                yield name, f"={getattr(self, name)!r} belongs to format, and table is given: leave it out"


class FunctionSource(_AnySource, frozen=True, kw_only=True, tag="function"):
    """A function of yours, ``(spark, window, **arguments) -> DataFrame``, for all rows, whose window is None.

    With time or partition it is called once more, for the rows of windows that are due: window.start and
    window.end (datetimes in UTC, the end exclusive) are the time that these cover. It may read less then; what lies
    beyond is left out anyway.
    """

    function: Annotated[Function, doc("The function, as module:function.")]
    arguments: Annotated[dict[str, Any], doc("Its further arguments, by name.")] = field(default_factory=dict)


SourceSection = (
    DeltaSource | ParquetSource | CsvSource | JsonSource | SqlSource | JdbcSource | SparkSource | FunctionSource
)
