"""Which Parquet files a DataFrame is, where it is nothing but files.

Enters: a DataFrame of a classic session. Leaves: its files, cut into tasks, and which of their columns it shows under
which name; or None, as soon as anything in its plan is more than that. Nothing runs, the files' list is the plan's own.
Scoring reads such files in the Python workers: Spark would decode them to columns, turn these into rows, and the rows
into columns again.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.errors import SparkdlError
from sparkdl.observe import logger
from sparkdl.scoring.row_groups import Field, Piece, PieceReader
from sparkdl.tables.parquet import HIVE_NULL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["parquet_tasks", "packed_into_tasks"]

_SOURCES = "org.apache.spark.sql.execution.datasources."
_PLAN, _EXPRESSION = "org.apache.spark.sql.catalyst.plans.logical.", "org.apache.spark.sql.catalyst.expressions."
_PICKING = (_PLAN + "Project", _PLAN + "SubqueryAlias")
_READ_ALIKE = (
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.BooleanType,
    T.StringType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)
_PARTITIONS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.StringType, T.DateType)
_LISTING_OPTIONS = {
    "path", "paths", "basepath", "mergeschema", "pathglobfilter", "recursivefilelookup", "modifiedbefore",
    "modifiedafter", "serialization.format",
}  # fmt: skip
_SETTINGS = {
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.fieldId.read.enabled": "false",
}
_STATUS = re.compile(r"^\w*FileStatus\{path=(.*?); isDirectory=false; length=(\d+);", re.MULTILINE)


def parquet_tasks(frame: DataFrame, columns: Sequence[str]) -> list[PieceReader] | None:
    """Plan to read ``columns`` of a DataFrame from its files.

    Args:
        frame: any DataFrame.
        columns: of it.

    Returns:
        What each task reads, in the order of the files; None if the DataFrame is more than Parquet files on a mounted
        filesystem, is cached, or has a column that Spark might read otherwise than Arrow does.
    """
    try:
        found = _planned(frame, columns)
    except SparkdlError as refused:  # the first file is none that Arrow reads as Spark does
        logger.debug("Spark reads the files of this DataFrame: %s", refused)
        return None
    except Exception as error:  # a session whose plans are not for us to see
        logger.debug("the plan of this DataFrame cannot be read: %s", error)
        return None
    return found


def _planned(frame: DataFrame, columns: Sequence[str]) -> list[PieceReader] | None:
    java = getattr(frame, "_jdf", None)
    if java is None or frame.isStreaming:
        return None
    # A new query, for the frame's own was planned before it was cached.
    plan: Any = frame.select("*")._jdf.queryExecution().withCachedData()
    leaf = plan
    while leaf.getClass().getName() in _PICKING:
        leaf = leaf.children().head()
    if leaf.getClass().getName() != _SOURCES + "LogicalRelation" or not _is_plain(leaf.relation(), frame.sparkSession):
        return None
    relation, spark = leaf.relation(), frame.sparkSession
    shown = _shown(json.loads(plan.toJSON()))
    if shown is None or len(shown) != len(frame.columns) or any("." in shown[column] for column in columns):
        return None
    fields = _fields(frame, columns, shown, json.loads(relation.partitionSchema().json()))
    files = _files(relation)
    if fields is None or not files or not all(path.startswith("file:") for path, _ in files):
        return None
    tasks = []
    for pieces in packed_into_tasks(files, **_sizes(spark)):
        read = [_with_values(piece, fields) for piece in pieces]
        tasks.append(PieceReader(tuple(read), fields, spark.conf.get("spark.sql.caseSensitive") == "true"))
    tasks[0].check(0)
    return tasks


def _shown(nodes: list[Mapping[str, Any]]) -> dict[str, str] | None:
    """Column of the frame -> column of the files, if the plan only picks and renames columns of one set of files."""
    names: dict[int, str] = {tree[0]["exprId"]["id"]: tree[0]["name"] for tree in nodes[-1]["output"]}
    shown = {name: name for name in names.values()}
    for node in reversed(nodes[:-1]):
        if "projectList" not in node:
            continue
        picked, shown = names, {}
        names = {}
        for tree in node["projectList"]:
            target = tree[-1]
            is_alias = len(tree) == 2 and tree[0]["class"] == _EXPRESSION + "Alias"
            if target["class"] != _EXPRESSION + "AttributeReference" or not (len(tree) == 1 or is_alias):
                return None
            names[tree[0]["exprId"]["id"]] = picked[target["exprId"]["id"]]
            shown[tree[0]["name"]] = picked[target["exprId"]["id"]]
    return shown


def _is_plain(relation: Any, spark: SparkSession) -> bool:
    """Whether the relation is a list of Parquet files that is read with no setting out of the ordinary."""
    if relation.getClass().getName() != _SOURCES + "HadoopFsRelation":
        return False
    kinds = relation.fileFormat().getClass().getName(), relation.location().getClass().getName()
    if kinds != (_SOURCES + "parquet.ParquetFileFormat", _SOURCES + "InMemoryFileIndex"):
        return False
    options = relation.options().keys().mkString("\n").lower().split("\n")
    if set(filter(None, options)) - _LISTING_OPTIONS:
        return False
    legacy = [spark.conf.get(f"spark.sql.parquet.{kind}RebaseModeInRead") for kind in ("datetime", "int96")]
    return "LEGACY" not in legacy and all(spark.conf.get(key) == value for key, value in _SETTINGS.items())


def _fields(
    frame: DataFrame, columns: Sequence[str], shown: Mapping[str, str], partitions: Mapping[str, Any]
) -> tuple[Field, ...] | None:
    """The columns as they are read; None if Arrow might read one otherwise than Spark."""
    folders = {field["name"] for field in partitions["fields"]}
    fields = []
    for name in columns:
        declared, source = frame.schema[name], shown[name]
        allowed = isinstance(declared.dataType, _PARTITIONS) if source in folders else _is_alike(declared.dataType)
        if not allowed or "EXISTS_DEFAULT" in (declared.metadata or {}):
            return None
        kind = to_arrow_type(declared.dataType, timezone="UTC")
        fields.append(Field(name=name, source=source, kind=kind, from_path=source in folders))
    return tuple(fields)


def _is_alike(kind: T.DataType) -> bool:
    if isinstance(kind, T.ArrayType):
        return _is_alike(kind.elementType)
    plain_text = not isinstance(kind, T.StringType) or type(kind) is T.StringType
    return isinstance(kind, _READ_ALIKE) and plain_text


def _files(relation: Any) -> list[tuple[str, int]]:
    """Path and bytes of every file, in the paths' order."""
    listed = relation.location().allFiles()
    found = _STATUS.findall(listed.mkString("\n"))
    if len(found) != listed.size():
        return []
    return sorted((path, int(size)) for path, size in found if int(size))


def _with_values(piece: Piece, fields: Sequence[Field]) -> Piece:
    """The piece with the values of partition columns, which stand in its path."""
    path = piece.path.removeprefix("file://").removeprefix("file:")
    folders = dict(part.split("=", 1) for part in os.path.dirname(path).split("/") if "=" in part)
    folders = {unquote(name): value for name, value in folders.items()}
    values = {}
    for field in fields:
        if field.from_path:
            value = folders[field.source]
            values[field.name] = None if value == HIVE_NULL else unquote(value)
    return Piece(path=path, part=piece.part, parts=piece.parts, values=tuple(values.items()))


def _sizes(spark: SparkSession) -> dict[str, int]:
    """What Spark goes by when it cuts files into tasks."""

    def size(key: str) -> int:
        jvm: Any = spark._jvm
        return int(jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(str(spark.conf.get(key))))

    return {
        "largest": size("spark.sql.files.maxPartitionBytes"),
        "opening": size("spark.sql.files.openCostInBytes"),
        "slots": int(spark._jsparkSession.sparkContext().defaultParallelism()),
    }


def packed_into_tasks(
    files: Sequence[tuple[str, int]], *, largest: int, opening: int, slots: int
) -> Iterator[list[Piece]]:
    """Cut files into pieces and put neighbouring pieces into tasks, by Spark's rule for the size of a task.

    Args:
        files: path and bytes.
        largest: bytes of a task at most, if its pieces allow.
        opening: bytes that opening a file counts for.
        slots: tasks that can run at once; smaller tasks are made rather than leave one idle.
    """
    total = sum(size + opening for _, size in files)
    target = max(1, min(largest, max(opening, math.ceil(total / slots))))
    task: list[Piece] = []
    filled = 0
    for path, size in files:
        parts = math.ceil(size / target)
        for part in range(parts):
            if task and filled + size // parts > target:
                yield task
                task, filled = [], 0
            task.append(Piece(path=path, part=part, parts=parts))
            filled += size // parts + opening
    if task:
        yield task
