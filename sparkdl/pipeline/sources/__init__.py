"""Where rows come from: what a source shows without Spark, and its rows with the window that each belongs to.

Enters: the section ``source`` of a pipeline file. Leaves: a ``SourceSnapshot``, by which a run with nothing to do is
told; and a DataFrame of the rows as they were then, with the column ``_window``, and ``_malformed`` where a file's rows
can be cut or garbled. Start at ``base.py``, what is asked of a source; each kind is one file, and one line here.

Windows are told by UTC, whatever the session's time zone is. A row without a time, or with one that cannot be read, is
in the window ``none``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.pipeline.sources.base import Source
from sparkdl.pipeline.sources.delta import delta_source
from sparkdl.pipeline.sources.files import CsvFiles, JsonFiles
from sparkdl.pipeline.sources.function import RowsFunction
from sparkdl.pipeline.sources.jdbc import Database
from sparkdl.pipeline.sources.parquet import ParquetFiles
from sparkdl.pipeline.sources.spark import SparkReader
from sparkdl.pipeline.sources.sql import Query
from sparkdl.pipeline.spec.source import (
    CsvSource,
    DeltaSource,
    FunctionSource,
    JdbcSource,
    JsonSource,
    ParquetSource,
    SourceSection,
    SparkSource,
    SqlSource,
)

__all__ = ["Source", "source_of"]

_SOURCES: Mapping[type, Callable[[Any], Source]] = {
    DeltaSource: delta_source,
    ParquetSource: ParquetFiles,
    CsvSource: CsvFiles,
    JsonSource: JsonFiles,
    SqlSource: Query,
    JdbcSource: Database,
    SparkSource: SparkReader,
    FunctionSource: RowsFunction,
}


def source_of(section: SourceSection) -> Source:
    """The source that a section of a pipeline file describes."""
    return _SOURCES[type(section)](section)
