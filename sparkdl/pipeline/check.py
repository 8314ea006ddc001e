"""A pipeline file against its source's columns, before Spark starts.

Enters: the context of a run that may never begin. Leaves: nothing, or the ``PipelineFileError`` that a run would end
with once Spark has read the source; and where the columns cannot be told without Spark, or the source cannot be
reached from here, why.
"""

from __future__ import annotations

from sparkdl.errors import SchemaError, SparkdlError
from sparkdl.pipeline.rows.columns import Columns, columns_of
from sparkdl.pipeline.state.context import Context

__all__ = ["check_source"]


def check_source(context: Context) -> str:
    """Hold the file against the columns of its source.

    A source that cannot be reached says nothing about the file: a file is often checked where the rows are not.

    Returns:
        what could not be checked, in words; empty where all of it was.

    Raises:
        PipelineFileError: columns are missing, or have types that their use does not fit.
        SchemaError: Spark cannot read them, or the source has no such partitions.
    """
    try:
        found: Columns = columns_of(context.spec.source, context.look)
    except SchemaError:
        raise
    except SparkdlError as error:
        return f"the columns of the source were not looked at: {error}"
    if found.why_not:
        return f"the columns of the source were not looked at: {found.why_not}"
    if found.whole:
        context.file.check_columns(found.types)
        return ""
    absent = context.file.columns_not_in(found.types)
    if not absent:
        return ""
    return f"the first rows of the source do not have {', '.join(map(repr, absent))}: check the spelling"
