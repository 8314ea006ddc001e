"""A query over the tables of Spark's catalog."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.pipeline.sources.base import Source, SourceSnapshot
from sparkdl.pipeline.sources.table_formats import check_plain_files
from sparkdl.pipeline.spec.source import SqlSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES_IN_SQL = re.compile(r"\b(?:parquet|orc|avro|csv|json|text)\s*\.\s*`([^`]+)`", re.IGNORECASE)


@dataclass(frozen=True)
class Query(Source):
    """One SELECT of Spark SQL."""

    section: SqlSource

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """What it returns now."""
        for path in _FILES_IN_SQL.findall(self.section.query):
            check_plain_files(path)
        return spark.sql(self.section.query)
