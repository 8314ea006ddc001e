"""One version of a table as a DataFrame of Spark's own Parquet reader, without Delta's extension."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from sparkdl.columns.frames import selected
from sparkdl.columns.names import quoted
from sparkdl.errors import StorageError
from sparkdl.tables.commit import active_files
from sparkdl.tables.features import holds_deletion_vectors
from sparkdl.tables.parquet import HIVE_NULL, directory
from sparkdl.tables.record import TableFile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Words = np.ndarray[Any, np.dtype[np.int64]]

_FILE, _ROW, _DELETED, _VALUES = (f"_sparkdl_{name}" for name in ("file", "row", "deleted", "values"))
_ASCII = "/!$&'()*+,;=:@-._~"  # what java.net.URI leaves as it is in a path; so it does with all but ASCII


def frame_of_files(spark: SparkSession, table: DeltaTable, root: str) -> DataFrame:
    """The rows of an open table, which ``check_readable`` has let pass.

    Most files are read as they are. Those with rows that a deletion vector hides, and those whose folder does not say
    their partition's values, are joined with one broadcast row a file: its values, and its vector with a bit a row.
    Columns that the table maps are read by their physical names. Everything happens in Spark's tasks; the driver holds
    the list of files and the vectors.

    Args:
        spark: the session.
        table: at the version to read.
        root: the table's address as Spark takes it.

    Raises:
        StorageError: a deletion vector belongs to no file of the version.
    """
    from pyspark.sql.types import StructType

    logical = json.loads(table.schema().to_json())
    physical = physical_names(logical)
    target, stored = StructType.fromJson(logical), StructType.fromJson(physical)
    names = dict(zip(target.names, stored.names, strict=True))
    layout = table.metadata().partition_columns
    vectors = {_address(root, path): words for path, words in deletion_vectors(table).items()}
    files = {_address(root, file.path): file for file in active_files(table)}
    lost = vectors.keys() - files.keys()
    if lost:
        raise StorageError(f"the Delta table {root} has a deletion vector of {min(lost)}, which is none of its files")
    plain = [
        address
        for address, file in files.items()
        if address not in vectors
        and address == f"{root}/{_folder(file, names)}{address.rpartition('/')[2]}"
        and HIVE_NULL not in file.partition.values()  # which Spark takes for null
    ]
    column_names = set(plain)
    odd = {address: file for address, file in files.items() if address not in column_names}
    frames = []
    if plain:
        frame = spark.read.schema(stored).option("basePath", root).parquet(*plain)
        frames.append(_logical(frame, target, names))
    if odd:
        data = StructType([field for field in stored if field.name not in {names[name] for name in layout}])
        frame = spark.read.schema(data).option("recursiveFileLookup", "true").parquet(*odd)
        joined = _joined(frame, _facts(spark, odd, vectors, layout))
        frames.append(joined.select(*_columns(target, names, layout)))
    if not frames:
        return spark.createDataFrame([], target)
    return frames[0] if len(frames) == 1 else frames[0].unionAll(frames[1])


def _joined(frame: DataFrame, facts: DataFrame) -> DataFrame:
    """The rows that no vector hides, each with the facts of its file."""
    from pyspark.sql import functions as F

    metadata = frame.metadataColumn("_metadata")
    placed = frame.select("*", metadata["file_path"].alias(_FILE), metadata["row_index"].alias(_ROW))
    word = f"get({_DELETED}, cast(shiftright({_ROW}, 6) as int))"  # null beyond the vector's end: not deleted
    bit = F.expr(f"shiftright({word}, cast({_ROW} & 63 as int)) & 1")
    unknown = F.raise_error(F.concat(F.lit("sparkdl: not a file of the table: "), F.col(_FILE))).cast("boolean")
    is_visible = F.when(F.col(_VALUES).isNull(), unknown).otherwise(F.coalesce(bit == 0, F.lit(True)))
    return placed.join(F.broadcast(facts), _FILE, "left").where(is_visible)


def _logical(frame: DataFrame, target: Any, names: Mapping[str, str]) -> DataFrame:
    """The table's columns, by their own names, where nothing but their order is to be changed, else by ``_columns``."""
    types = {field.name: field.dataType for field in frame.schema}
    if all(types.get(field.name) == field.dataType and not field.metadata for field in target):
        return selected(frame, target.names)
    return frame.select(*_columns(target, names))


def _columns(target: Any, names: Mapping[str, str], layout: Sequence[str] = ()) -> list[Column]:
    """The table's columns, by their own names, from the physical ones and, for ``layout``, from the log's values."""
    from pyspark.sql import functions as F

    return [
        (
            F.col(_VALUES)[layout.index(field.name)].cast(field.dataType)
            if field.name in layout
            else F.col(quoted(names[field.name])).cast(field.dataType)
        ).alias(field.name, metadata=_own(field.metadata))
        for field in target
    ]


def _own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said of a column; what Delta keeps there would be taken for its own by the next writer."""
    return {key: value for key, value in metadata.items() if not key.startswith("delta.")}


def _facts(
    spark: SparkSession, files: Mapping[str, TableFile], vectors: Mapping[str, Words], layout: Sequence[str]
) -> DataFrame:
    rows = pa.table(
        {
            _FILE: pa.array([_as_spark_says(address) for address in files], pa.string()),
            _DELETED: pa.array([vectors.get(address) for address in files], pa.list_(pa.int64())),
            _VALUES: pa.array(
                [[file.partition[name] for name in layout] for file in files.values()], pa.list_(pa.string())
            ),
        }
    )
    return spark.createDataFrame(rows)


def deletion_vectors(table: DeltaTable) -> dict[str, Words]:
    """The deletion vectors of files by path: a bit a row, 64 to a number, set where the row is deleted."""
    home = unquote(str(table.table_uri)).removeprefix("file://").rstrip("/") + "/"
    if not holds_deletion_vectors(table):
        return {}
    vectors = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for uri, selection in zip(batch["filepath"], batch["selection_vector"], strict=True):
            bits = np.packbits(~selection.values.to_numpy(zero_copy_only=False), bitorder="little")
            words = np.zeros(-(-len(bits) // 8), dtype="<i8")
            words.view(np.uint8)[: len(bits)] = bits
            address = unquote(uri.as_py())
            inside = address.removeprefix("file://").startswith(home)
            vectors[address.removeprefix("file://").removeprefix(home) if inside else address] = words
    return vectors


def physical_names(kind: Any) -> Any:
    """A type with the names that files have: where the table maps none, its own."""
    if not isinstance(kind, dict):
        return kind
    names = {name: physical_names(value) for name, value in kind.items()}
    if kind["type"] == "struct":
        names["fields"] = [
            {
                "name": field.get("metadata", {}).get("delta.columnMapping.physicalName", field["name"]),
                "type": physical_names(field["type"]),
                "nullable": field["nullable"],
                "metadata": {},
            }
            for field in kind["fields"]
        ]
    return names


def _folder(file: TableFile, names: Mapping[str, str]) -> str:
    folder = directory({names[name]: value for name, value in file.partition.items()})
    return f"{folder}/" if folder else ""


def _address(root: str, path: str) -> str:
    return spark_address(path) if "://" in path else f"{root}/{path}"


def spark_address(uri: str) -> str:
    """The address as Hadoop knows it: delta-rs says ``s3://``."""
    return f"s3a://{uri.removeprefix('s3://')}" if uri.startswith("s3://") else uri


def _as_spark_says(address: str) -> str:
    """The address as ``_metadata.file_path`` spells it."""
    scheme, _, path = address.partition("://")
    wide = "".join({letter for letter in path if not letter.isascii()})
    text = "".join(letter if letter in wide else quote(letter, safe=_ASCII) for letter in path)
    return f"file:{text}" if scheme == "file" else f"{scheme}://{text}"
