"""Whatever else Spark reads: a format by its name, or a table of its catalog."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.pipeline.sources.base import Source, SourceSnapshot
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.table_formats import check_plain_files
from sparkdl.pipeline.spec.source import SparkSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KNOWS_TABLES = re.compile("delta|iceberg|hudi|hoodie", re.IGNORECASE)


@dataclass(frozen=True)
class SparkReader(Source):
    """What ``spark.read`` makes of a format or a table."""

    section: SparkSource

    @source_errors(listed=False)
    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """The rows that there are now."""
        section, reader = self.section, spark.read.options(**self.section.options)
        if section.table is not None:
            return reader.table(section.table)
        reader = reader.format(str(section.format))
        if section.path is not None and not _KNOWS_TABLES.search(str(section.format)):
            check_plain_files(section.path)
        return (reader if section.schema is None else reader.schema(section.schema)).load(section.path)
