"""Error mapping: what Spark says of a source that it cannot read, as one sentence.

It names the file, the database's own reason, or what the session lacks; everything else passes as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkdl.compat.spark_errors import jar_error, told_by_java, unlogged_queries
from sparkdl.errors import ConfigError, DataError, SchemaError, SparkdlError
from sparkdl.storage import outage_error, store_error

_KIND = re.compile(r"\[(FAILED_READ_FILE|PATH_NOT_FOUND|CANNOT_READ_FILE)[.\w]*\]")
_FILE = re.compile(r"(?:reading file|file|[Pp]ath does not exist:) ((?:file:|\w[\w+.-]*:/)\S+?)\.?(?=[\s,]|$)")
_CAUSE = re.compile(r"Caused by: ([\w.$]+): (.+?)(?=\n\s+at |\nCaused by: |\Z)", re.DOTALL)
_FIRST = re.compile(r"(?:An error occurred while calling \S+\s+: [\w.$]+: )?(.+)")
_HEADER = re.compile(r"Header: (.*)\n Schema: (.*)\n")
_LENGTHS = re.compile(r"Header length: (\d+), schema size: (\d+)")
_TWO_TYPES = re.compile(r'Failed to merge incompatible data types "?(.+?)"? and "?(.+?)"?\.')
_GONE = re.compile(r"FILE_NOT_EXIST|FileNotFound|PATH_NOT_FOUND|does not exist")
_FORMAT = re.compile(r"Failed to find (?:the )?data source: ([\w.$-]+?)\.? ")
_DATABASE = "org.apache.spark.sql.execution.datasources.jdbc."
_DRIVER = re.compile(
    r"No suitable driver|ClassNotFoundException: (\S+)(?=(?:\s+at .+)+?\s+at \S+\.jdbc\.DriverRegistry)"
)
_ROW = re.compile(r"\[[A-Z_.]+\] ((?:(?!SQLSTATE: ).)+?)\s*SQLSTATE: (?:2[123]\w{3}|P0001)\b", re.DOTALL)
"""A value that SQL refuses: SQLSTATE's classes of data exceptions, and what ``raise_error`` says."""
_ADVICE = re.compile(r"\.\s+(?=Correct the value|Use |If |An index shall|The array has)")
_TOLERANT = re.compile(r"Use (?:the SQL function )?[`'](\w+)")
_LONGEST = 300


@contextmanager
def source_errors(listed: bool = True) -> Iterator[None]:
    """Raise what went wrong with a source that Spark reads in one sentence.

    Args:
        listed: whether its files were seen before Spark reads them.

    Raises:
        DataError: a file is gone or is not what the source says it is, a value of a database fits no type of Spark, or
            SQL refuses the value of a row.
        SchemaError: a column is of one type in a file and of another in the next.
        StorageError: a database does not answer as it is asked.
        StoreUnavailableError: where the source lies nobody answers.
        ConfigError: the session does not know the format, lacks a database's driver, or has a JAR of another Spark.
    """
    try:
        with unlogged_queries():
            yield
    except Exception as error:
        translated = outage_error(error) or _ours(error, listed) or jar_error(error)
        if translated is None:
            raise
        raise translated from error


def _ours(error: Exception, listed: bool) -> SparkdlError | None:
    """An error of Spark as one of ours; None for what is not the source's."""
    text = told_by_java(error)
    if _KIND.search(text):
        return _of_file(text, listed)
    if "CANNOT_MERGE_SCHEMAS" in text:
        types = _TWO_TYPES.search(text)
        shown = f", {types[1]} and {types[2]}" if types else ""
        return SchemaError(
            f"a column of the source's files is of two types{shown}, which Spark does not read together: write the one "
            "as the other"
        )
    unknown = _FORMAT.search(text)
    if unknown:
        return ConfigError(
            f"this session has no data source {unknown[1]!r}: correct source.format, or give its package of this Spark "
            "in spark: {conf: {spark.jars.packages: ...}}"
        )
    if _DATABASE in text:
        return _of_database(error, text)
    return _of_row(error, text)


def _of_file(text: str, listed: bool) -> DataError:
    named = _FILE.search(text)
    file = named[1] if named else "a file of the source"
    if _GONE.search(text) and not listed:
        return DataError(f"{file} is not there: correct source.path, or wait for data")
    if _GONE.search(text):
        return DataError(f"{file} was there when the run began and is gone: deliver what is read once, and run again")
    if header := _HEADER.search(text) or _LENGTHS.search(text):
        actual, expected = map(_short, header.groups())
        columns = f"the columns {actual}" if header.re is _HEADER else f"{actual} columns"
        return DataError(
            f"{file} has {columns} in its first line, and {expected} are expected: deliver it like the others, correct "
            "source.schema, or take columns by their place with source.options.enforceSchema=true"
        )
    causes = _CAUSE.findall(text)
    reason = _short(causes[-1][1] if causes else text)
    return DataError(f"{file} cannot be read: {reason}; correct source, deliver the file again, or remove it")


def _of_database(error: Exception, text: str) -> SparkdlError:
    lacking = _DRIVER.search(text)
    if lacking:
        named = f"class {lacking[1]}" if lacking[1] else "driver for source.url"
        return ConfigError(
            f"this session has no JDBC {named}: add the driver's JAR, spark: {{conf: {{spark.jars: ...}}}}, and name "
            "its class in source.options.driver if it is another"
        )
    causes = _CAUSE.findall(text)
    messages = [message for kind, message in causes if "SQL" in kind.rpartition(".")[2] and "Spark" not in kind]
    if not messages:
        reason = _short(_FIRST.match(text)[1])  # type: ignore[index]
        return DataError(
            f"Spark cannot take the rows of the database as they are: {reason}; correct source, or cast the column in "
            "source.query"
        )
    kind, root = causes[-1]
    detail = "" if root == messages[-1] else f" ({kind.rpartition('.')[2]}: {_short(root)})"
    reason = re.sub(r" Position: \d+$", "", _short(messages[-1]))
    return store_error(error, f"the database cannot be read: {reason}{detail}; correct source, or see to the database")


def _of_row(error: Exception, text: str) -> DataError | None:
    """What SQL has against the value of a row; None if nothing."""
    refused = _ROW.search(text)
    if refused is None:
        return None
    contexts: list[Any] = getattr(error, "getQueryContext", list)()
    in_sql = bool(contexts) and contexts[0].contextType().name == "SQL"
    expression = _short(contexts[0].fragment() if in_sql else contexts[0].callSite()) if contexts else "SQL"
    tolerant = _TOLERANT.search(refused[1])
    way = f", or take {tolerant[1]}, whose NULL an expectation can quarantine" if tolerant else " or what is made of it"
    reason = _short(_ADVICE.split(refused[1])[0])
    return DataError(f"{expression} fails for a row: {reason}; correct the source{way}")


def _short(text: str) -> str:
    """What Java says on one line, within bounds."""
    return " ".join(text.split())[:_LONGEST].rstrip(" .:;")
