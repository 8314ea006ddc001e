"""What the pipeline asks of a source: one Protocol, behind which each kind is one file of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
import pyarrow as pa
from msgspec import structs

from sparkdl.documents.typed import encode
from sparkdl.pipeline.file.resolved import plain
from sparkdl.pipeline.sources.window_column import window_of
from sparkdl.pipeline.spec import SourceSection
from sparkdl.pipeline.windows import WHOLE, Span
from sparkdl.storage import Storage, sha256_hex
from sparkdl.tables.record import TableFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FileStamp = tuple[int, float | None]
"""Of a file: its bytes, and when it was last written."""
_BYTES_PER_ROW = 100


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much there is of a window.

    Attributes:
        bytes: of its files.
        rows: that were written to them, as a table's log says; None where none does.
        files: the stamp of each, by its address, of a source that is files.
    """

    bytes: int
    rows: int | None = None
    files: Mapping[str, FileStamp] = field(default_factory=dict)

    @property
    def rows_about(self) -> int:
        """How many rows there are, guessed from the bytes where no log says it."""
        return self.bytes // _BYTES_PER_ROW if self.rows is None else self.rows

    @classmethod
    def of_all(cls, parts: Sequence[Size]) -> Size:
        """The size of all the parts together."""
        rows = [part.rows for part in parts if part.rows is not None]
        return cls(
            bytes=sum(part.bytes for part in parts),
            rows=sum(rows) if len(rows) == len(parts) else None,
            files={file: stamp for part in parts for file, stamp in part.files.items()},
        )


@dataclass(frozen=True, kw_only=True)
class SourceSnapshot:
    """What a source shows without Spark.

    Attributes:
        state: a hash that changes whenever the rows may have changed; None where only Spark can tell.
        windows: a hash of what there is for each window, where the layout of files or partitions tells; else None.
        version: of the Delta table; None elsewhere.
        files: the stamp of each file that was there, by its address as Spark takes it whatever plain paths mean to it.
        sizes: of each window, or of ``all`` where only the rows tell their windows; empty where only Spark can tell.
    """

    state: str | None
    windows: Mapping[str, str] | None = None
    version: int | None = None
    files: Mapping[str, FileStamp] = field(default_factory=dict)
    sizes: Mapping[str, Size] = field(default_factory=dict)

    @property
    def bytes(self) -> int | None:
        """Of all files, as they are stored; None where only Spark can tell."""
        return sum(size.bytes for size in self.sizes.values()) if self.sizes else None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of a source's columns.

    Attributes:
        types: by name, in order; None where the type cannot be told.
        complete: whether there are no others; False where a row that was not looked at may have more.
        why_not: why nothing is known, as the end of a sentence; empty where something is.
    """

    types: Mapping[str, pa.DataType | None]
    complete: bool = True
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class ParquetFooters:
    """Files that Arrow reads as Spark does.

    Attributes:
        schema: of the columns that Spark would read; the partition column is the last.
        stored: the same with the types that the files have, which may be finer than Spark's microseconds.
        root: the folder that the files lie below.
        files: of each its path below the root, and the window beside the partition's value; of rows that tell their
            windows themselves neither.
    """

    schema: pa.Schema
    stored: pa.Schema
    root: Storage
    files: tuple[TableFile, ...]


class Source(Protocol):
    """A source of rows. What stands here is the answer of a kind that Spark alone can read; others override it.

    Attributes:
        section: what the pipeline file says of it.
        rows_may_change: whether its rows may be other ones when they are read again, as in a database; else that is
            refused.
        partition_is_text: whether a partition's value is the name of its folder, which Spark reads as a moment of the
            session's time zone.
    """

    section: SourceSection
    rows_may_change: ClassVar[bool] = True
    partition_is_text: ClassVar[bool] = False

    @property
    def arrow_address(self) -> str | None:
        """Where its rows lie in files that Arrow reads, too; None where only Spark can read them."""
        return None

    @property
    def kind(self) -> str:
        """Its ``kind`` in the pipeline file."""
        return str(self.section.__struct_config__.tag)

    def snapshot(self) -> SourceSnapshot:
        """What it shows now, without Spark.

        Raises:
            StorageError: there is no such table, or the place cannot be read.
            DataError: there are no files.
            SchemaError: there is no such partition.
            ConfigError: the files are those of a Delta, Iceberg or Hudi table, which has a kind of its own.
        """
        return SourceSnapshot(state=None)

    def columns(self, snapshot: SourceSnapshot) -> Columns:
        """Its columns, without Spark.

        Raises:
            StorageError: it cannot be read.
            DataError: a file is not what the source says it is.
            SchemaError: a column is of a type that Spark does not read.
        """
        return Columns(types={}, why_not="Spark alone knows its columns")

    def count(self, size: Size) -> int | None:
        """Rows of a window as far as they can be counted in a moment; None where they cannot."""
        return size.rows

    def rows_by_window(self, snapshot: SourceSnapshot) -> dict[str, int] | None:
        """Rows of each window of a partition, as its files tell them exactly; None where Spark has to count."""
        return None

    def footers(self, snapshot: SourceSnapshot) -> ParquetFooters | None:
        """Its files, if Arrow reads them as Spark does; None where only Spark is known to."""
        return None

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """Its rows as they were at the snapshot.

        Raises:
            ConfigError: options or a function are wrong.
            DataError: a file that was there is gone.
        """
        ...

    def frame_within(self, spark: SparkSession, span: Span) -> DataFrame | None:
        """Its rows of a span of time, and maybe others, asked anew; None where ``frame`` is all that there is."""
        return None

    def check_within(self, everything: Mapping[str, str], within: Mapping[str, str]) -> None:
        """Refuse other rows from ``frame_within`` than from ``frame``.

        Args:
            everything: hash of the rows of each window that ``frame`` gave.
            within: the same of ``frame_within``.

        Raises:
            DataError: names the first window.
        """
        return

    def identity(self) -> list[Any]:
        """What decides which rows there can be: settings without secrets, and the code of a function."""
        section = structs.replace(self.section, deleted_windows="keep")  # which decides of no window that there is
        settings = plain(section)
        free = {name: settings[name] for name in ("options", "arguments") if name in settings}
        return [type(section).__name__, msgspec.to_builtins(structs.replace(section, **free)), ""]


def snapshot_of(
    section: SourceSection, files: Sequence[tuple[str, list[Any], Size]], version: int | None = None
) -> SourceSnapshot:
    """What files show of a source.

    Args:
        section: of the source; without a partition there is no hash of a window, and one size.
        files: of each the value of its partition, what changes with the file, and its size.
        version: of the Delta table that they are of.
    """
    stamps: dict[str, list[Any]] = {}
    sizes: dict[str, list[Size]] = {}
    for value, stamp, size in files:
        name = WHOLE if section.partition is None else window_of(value, section)
        stamps.setdefault(name, []).append(stamp)
        sizes.setdefault(name, []).append(size)
    windows = {name: _content_hash(sorted(stamps[name])) for name in sorted(stamps)}
    return SourceSnapshot(
        state=_content_hash([stamp for _, stamp, _ in files]),
        windows=None if section.partition is None else windows,
        version=version,
        files={file: stamp for *_, size in files for file, stamp in size.files.items()},
        sizes={name: Size.of_all(parts) for name, parts in sizes.items()},
    )


def _content_hash(value: Any) -> str:
    return sha256_hex(encode(value))[:32]
