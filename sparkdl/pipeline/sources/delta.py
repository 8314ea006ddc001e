"""Delta tables: by their folder, whose log is read here, or by their name in Spark's catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SchemaError
from sparkdl.pipeline.sources.base import Columns, Size, Source, SourceSnapshot, snapshot_of
from sparkdl.pipeline.spec.source import DeltaSource
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.spark_delta import SparkDelta
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def delta_source(section: DeltaSource) -> Source:
    """A Delta table, by what the section calls it."""
    return CatalogTable(section) if looks_like_a_table(section.table) else FolderTable(section)


class _DeltaTable(Source):
    section: DeltaSource

    def identity(self) -> list[Any]:
        """Without the folders that files may lie in, which decide of no row."""
        name, settings, code = super().identity()
        settings.pop("allow_folders")
        return [name, settings, code]


@dataclass(frozen=True)
class FolderTable(_DeltaTable):
    """A table in a folder: its log tells the version, the columns, and the rows of each partition."""

    section: DeltaSource

    @property
    def arrow_address(self) -> str:
        """The folder."""
        return self.section.table

    @property
    def _table(self) -> Table:
        return Table(self.section.table, allow_folders=self.section.allow_folders)

    def snapshot(self) -> SourceSnapshot:
        """The newest version, or the one that the section names."""
        section, table = self.section, self._table
        version = table.version() if section.version is None else section.version
        files = table.files(version)
        if section.partition is not None and section.partition not in table.partition_columns():
            raise SchemaError(
                f"source.partition names {section.partition!r}, and {table.uri} is partitioned by "
                f"{table.partition_columns()}: name one of these, or say source.time"
            )
        shown = [
            (
                str(file.partition[section.partition]) if section.partition else "",
                [file.path, file.bytes, file.deleted],  # deletions leave path and size as they are
                Size(bytes=file.bytes, rows=file.rows),
            )
            for file in files
        ]
        return snapshot_of(section, sorted(shown, key=lambda file: file[1]), version)

    def columns(self, snapshot: SourceSnapshot) -> Columns:
        """Those of the version."""
        return Columns(types={field.name: field.type for field in self._table.schema(snapshot.version)})

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """The rows of the version."""
        return self._table.read(spark, snapshot.version)


@dataclass(frozen=True)
class CatalogTable(_DeltaTable):
    """A table of Spark's catalog."""

    section: DeltaSource

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """The rows of the version that the section names, or of the newest."""
        version, table = self.section.version, self.section.table
        frame = (spark.read if version is None else spark.read.option("versionAsOf", version)).table(table)
        folders = [Storage.of(folder).uri for folder in self.section.allow_folders]
        SparkDelta(spark, table, allow_folders=folders).check_files(frame)
        return frame
