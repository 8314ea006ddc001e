"""The history's account of a write, and the words in which delta-rs is told it; no Spark, no disk."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple
from urllib.parse import unquote

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.tables.parquet import FileRow

Partition = Mapping[str, str | None]
Filter = list[tuple[str, str, Any]]

_DAY = re.compile(r"(\d{4})-(\d\d?)-(\d\d?)(?:[T ]00:00(?::00(?:\.0+)?)?)?")
_WHOLE = re.compile(r"([+-]?\d+)(?:\.0*)?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_TRUTH = {"true": "true", "1": "true", "false": "false", "0": "false"}


class TableFile(NamedTuple):
    """One file of a table's version: path as on disk, size, values of its partition as the log spells them, and rows.

    The rows are those that were written, None where the log does not tell; a deletion vector may hide some. Which ones
    ``Table.files`` tells by a hash, empty where it hides none.
    """

    path: str
    bytes: int
    partition: dict[str, str | None]
    rows: int | None = None
    deleted: str = ""


def path_in_log(text: str) -> str:
    """The path of a file as it is on disk, or its address where a clone names it: Spark writes ``file:/``."""
    path = unquote(text)
    if path.startswith("/"):
        return f"file://{path}"
    return path.replace("file:/", "file:///", 1) if path.startswith("file:/") and path[6:7] != "/" else path


def check_inside(uri: str, paths: Iterable[str], allowed: Sequence[str] = ()) -> None:
    """Refuse a table whose log names a file that lies neither in its own folder nor in one that its reader allows.

    Args:
        uri: the table's folder.
        paths: of its files, as the log spells them.
        allowed: addresses of further folders, those of the original where the table is a shallow clone.

    Raises:
        IntegrityError: names the first such file.
    """
    folders = tuple(f"{_normalized(folder).rstrip('/')}/" for folder in (uri, *allowed))
    for text in paths:
        path = path_in_log(text)
        if _SCHEME.match(text) or _SCHEME.match(path):
            inside = _normalized(path).startswith(folders)
        else:
            inside = ".." not in path.split("/")
        if not inside:
            raise IntegrityError(
                f"the Delta table {uri} names the file {text}, which does not lie in the table's folder: if it is a "
                "shallow clone, allow the folder of the original, Table(..., allow_folders=[...]) or "
                "source.allow_folders of a pipeline; else do not trust this table"
            )


def _normalized(address: str) -> str:
    """An address with its scheme and without dots, S3 under one of its names."""
    scheme, separator, path = address.partition("://") if "://" in address else ("file", "://", address)
    return f"{re.sub('^s3[an]$', 's3', scheme)}{separator}{posixpath.normpath(path)}"


def spelled(column: str, text: str | None, kind: str | None) -> str | None:
    """A partition's value as the log spells it: the caller's midnight of a day, or 3.0, must find its partition.

    Args:
        column: for the message.
        text: of the caller's value.
        kind: the column's type; None, and those with one spelling, leave the text as it is.

    Raises:
        ConfigError: it is no value of that type.
    """
    spelling: str | None = text
    if text is None:
        return None
    if kind == "date":
        day = _DAY.fullmatch(text)
        try:
            spelling = day and date(*(int(part) for part in day.groups())).isoformat()
        except ValueError:  # the 31st of June
            spelling = None
    elif kind in ("long", "integer", "short", "byte"):
        number = _WHOLE.fullmatch(text)
        spelling = number and str(int(number[1]))
    elif kind == "boolean":
        spelling = _TRUTH.get(text.lower())
    if spelling is None:
        raise ConfigError(f"partitions name {column}={text!r}, and that column is a {kind}: give a value of this type")
    return spelling


def partition_predicate(partitions: Collection[Partition]) -> str:
    """The rows of these partitions as Spark's SQL; those of one column become one list."""
    names = {name for partition in partitions for name in partition}
    if len(names) == 1 and all(partitions):
        (name,) = names
        values = dict.fromkeys(partition[name] for partition in partitions)
        filled = ", ".join(_sql_text(value) for value in values if value is not None)
        terms = [f"{quoted(name)} IN ({filled})"] if filled else []
        terms += [f"{quoted(name)} IS NULL"] if None in values else []
    else:
        terms = list(dict.fromkeys(f"({_conjunction(partition)})" for partition in partitions))
    return " OR ".join(terms) or "false"


def _conjunction(partition: Partition) -> str:
    terms = [
        f"{quoted(name)} IS NULL" if value is None else f"{quoted(name)} = {_sql_text(value)}"
        for name, value in partition.items()
    ]
    return " AND ".join(terms) or "true"


def _sql_text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def removal_filter(active: Sequence[TableFile], removed: Sequence[TableFile], layout: Sequence[str]) -> Filter | None:
    """The filter of partitions that, among the active files, finds exactly those to remove.

    With it delta-rs records a replacement as the mode Overwrite.

    delta-rs records a commit as an overwrite only where it finds the files to remove itself, by a conjunction of
    columns; None where no conjunction tells the two kinds apart.
    """
    terms: Filter = []
    for name in layout:
        values = {file.partition[name] for file in removed}
        if values == {None}:
            terms.append((name, "=", ""))
        elif None in values:  # a list of delta-rs never finds null
            return None
        else:
            terms.append((name, "in", sorted(str(value) for value in values)))
    removed_paths = {file.path for file in removed}
    removed_values = [{file.partition[name] for file in removed} for name in layout]
    for file in active:
        inside = all(file.partition[name] in values for name, values in zip(layout, removed_values, strict=True))
        if inside and file.path not in removed_paths:
            return None
    return terms


def commit_facts(
    *,
    read_version: int | None,
    blind: bool,
    predicate: str | None,
    added: Sequence[FileRow],
    removed: Sequence[TableFile],
) -> dict[str, Any]:
    """What a commit says of itself beside its mode, as Spark's Delta spells it.

    Args:
        read_version: the version that was looked at; None for a table's first commit.
        blind: whether the rows were added without a look at those that were there.
        predicate: of the rows replaced; None without one.
        added: the files that the write has made.
        removed: the files that are no longer part of the table.
    """
    numbers = {
        "numOutputRows": sum(file.rows for file in added),
        "numFiles": len(added),
        "numOutputBytes": sum(file.bytes for file in added),
        "numRemovedFiles": len(removed),
        "numRemovedBytes": sum(file.bytes for file in removed),
    }
    facts: dict[str, Any] = {
        "isBlindAppend": blind,
        "isolationLevel": "Serializable",
        "operationMetrics": {name: str(number) for name, number in numbers.items()},
    }
    if read_version is not None:
        facts["readVersion"] = read_version
    if predicate is not None:
        facts["operationParameters"] = {"predicate": predicate}
    return facts
