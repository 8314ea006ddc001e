"""The files of a version that have to be read, and their parts by worker, planned from the log alone."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from sparkdl.compat.arrow_streams import read_stream
from sparkdl.compat.spark_master import is_connect
from sparkdl.errors import StorageError
from sparkdl.storage import Storage
from sparkdl.tables.commit import PARTITION_TYPES, files_of
from sparkdl.tables.features import check_readable, maps_columns
from sparkdl.tables.reading import deletion_vectors, physical_names
from sparkdl.tables.record import TableFile
from sparkdl.tables.scan.conditions import Condition, conditions_of
from sparkdl.tables.scan.read import FilePart, ScanTask

Where = Sequence[tuple[str, str, Any]]
"""``(column, operator, value)`` each, see ``conditions.py``; all of them must hold."""

_LARGEST_SHARE, _SMALLEST_SHARE = 128 << 20, 4 << 20  # bytes of files that one task reads
_SMALLEST_PIECE = 32 << 20  # bytes of a file: writers make row groups of this size, and these are not divided
_OPENING = 1 << 20  # what opening a file costs, in bytes that could be read meanwhile
_SLOTS_OF_A_SERVER = 16  # Spark Connect does not tell how many tasks run at once
_SHARES_A_SLOT = 3  # so that slots which are done early find something more to do


@dataclass(frozen=True, kw_only=True)
class TableScan:
    """A version of a table, and those of its files that can hold rows of interest.

    Attributes:
        root: the table's folder.
        version: that is read.
        schema_json: of the table, as Spark's ``StructType.fromJson`` takes it.
        schema: the same in Arrow's types.
        names: of the columns in the files, by those of the table.
        layout: the partition columns.
        maps: whether the table maps columns, and fields inside of them, to other names.
        where: what rows have to meet, beyond what is true for whole files.
        files: that have to be read.
        skipped: how many others the version has.
        deleted: by path, which rows of a file are deleted, see ``FilePart``.
    """

    root: Storage
    version: int
    schema_json: str
    schema: pa.Schema
    names: Mapping[str, str]
    layout: tuple[str, ...]
    maps: bool
    where: tuple[Condition, ...]
    files: tuple[TableFile, ...]
    skipped: int
    deleted: Mapping[str, bytes] = field(repr=False)

    @property
    def deleted_rows(self) -> int:
        """How many rows of the files are deleted."""
        bits = (np.frombuffer(zlib.decompress(packed), np.uint8) for packed in self.deleted.values())
        return sum(int(np.unpackbits(of_file).sum()) for of_file in bits)

    def part_of(self, file: TableFile) -> FilePart:
        """One of the files as a single part."""
        return FilePart(file.path, file.bytes, 0, file.bytes, file.partition, self.deleted.get(file.path))

    def task(self, columns: Sequence[str], *, slots: int, batch_rows: int) -> ScanTask:
        """What workers do to read these columns.

        Args:
            columns: of the table.
            slots: how many tasks run at once.
            batch_rows: most rows of a batch.

        Raises:
            StorageError: the table maps fields inside of a column, which this reader does not follow.
        """
        inside = [name for name in columns if self.maps and pa.types.is_nested(self.schema.field(name).type)]
        if inside:
            raise StorageError(f"the Delta table {self.root.uri} maps what is inside of the columns {inside}")
        return ScanTask(
            root=self.root,
            schema=pa.schema([self.schema.field(name) for name in columns]),
            names=self.names,
            layout=self.layout,
            where=self.where,
            batch_rows=batch_rows,
            shares=shares_of(self.files, self.deleted, slots),
        )


def scan_of(table: DeltaTable, root: Storage, where: Where, allowed: Sequence[str] = ()) -> TableScan:
    """Find the files of an open table that can hold rows for which ``where`` is true.

    Raises:
        ConfigError: ``where`` is no list of conditions, or compares values of different types.
        SchemaError: it names a column that the table has not.
        StorageError: the table has features that this reader does not know, or files outside of its folder.
        IntegrityError: such files, and their folder is not ``allowed``.
    """
    check_readable(table, root, allowed)
    logical = json.loads(table.schema().to_json())
    arrow = pa.schema(table.schema().to_arrow())
    schema = pa.schema([(arrow_field.name, arrow_field.type) for arrow_field in arrow])
    physical = [arrow_field["name"] for arrow_field in physical_names(logical)["fields"]]
    names = dict(zip(schema.names, physical, strict=True))
    layout = tuple(table.metadata().partition_columns)
    conditions = conditions_of(where, schema)
    actions = read_stream(table.get_add_actions())
    files = files_of(actions, layout)
    _check_known(root.uri, logical, layout, conditions, files)
    needed = pa.array([True] * len(files))
    for arrow_field in conditions:
        if arrow_field.column in layout:
            texts = pa.array([file.partition[arrow_field.column] for file in files], pa.string())
            met = arrow_field.mask(texts.cast(schema.field(arrow_field.column).type))
        else:
            met = arrow_field.possible(
                *(_statistics(actions, statistic, names[arrow_field.column]) for statistic in ("min", "max"))
            )
        needed = pc.and_(needed, met)
    scan_files = tuple(file for file, is_needed in zip(files, needed.to_pylist(), strict=True) if is_needed)
    read = {file.path for file in scan_files}
    return TableScan(
        root=root,
        version=table.version(),
        schema_json=json.dumps(logical),
        schema=schema,
        names=names,
        layout=layout,
        maps=maps_columns(table) is not None,
        where=tuple(arrow_field for arrow_field in conditions if arrow_field.column not in layout),
        files=tuple(sorted(scan_files, key=lambda file: (str(file.partition), file.path))),
        skipped=len(files) - len(scan_files),
        deleted={
            path: zlib.compress(words.tobytes()) for path, words in deletion_vectors(table).items() if path in read
        },
    )


def shares_of(files: Sequence[TableFile], deleted: Mapping[str, bytes], slots: int) -> tuple[tuple[FilePart, ...], ...]:
    """Share out files among tasks, large ones in parts, so that each task has about as much to read.

    Args:
        files: neighbours stay together where they can.
        deleted: see ``FilePart``, by path.
        slots: how many tasks run at once.
    """
    total_bytes = sum(file.bytes + _OPENING for file in files)
    limit = min(_LARGEST_SHARE, max(_SMALLEST_SHARE, total_bytes // (slots * _SHARES_A_SLOT)))
    shares: list[list[FilePart]] = []
    room = 0
    for file in files:
        size = max(1, file.bytes)  # a log that knows no size still names a file to read
        step = math.ceil(size / max(1, size // max(limit, _SMALLEST_PIECE)))
        for start in range(0, size, step):
            end = min(start + step, size)
            cost = end - start + _OPENING
            if not shares or cost > room:
                shares.append([])
                room = limit + _OPENING
            shares[-1].append(FilePart(file.path, file.bytes, start, end, file.partition, deleted.get(file.path)))
            room -= cost
    return tuple(map(tuple, shares))


def tasks_at_once(spark: Any) -> int:
    """How many tasks a session runs at once, by which files are shared out."""
    if is_connect(spark):
        return _SLOTS_OF_A_SERVER
    return int(spark.sparkContext.defaultParallelism)


def _statistics(actions: pa.Table, what: str, column: str) -> pa.Array:
    """The least or the greatest value of a column in each file; null where the log does not tell."""
    values_of_files = actions.column(what).combine_chunks() if what in actions.schema.names else None
    if values_of_files is None or values_of_files.type.get_field_index(column) < 0:
        return pa.nulls(actions.num_rows)
    return values_of_files.field(column) if not values_of_files.null_count else pc.struct_field(values_of_files, column)


def _check_known(
    uri: str,
    schema: Mapping[str, Any],
    layout: Sequence[str],
    conditions: Sequence[Condition],
    files: Sequence[TableFile],
) -> None:
    """Refuse what only Spark reads or compares right."""
    fields = {entry["name"]: entry for entry in schema["fields"]}
    odd = [name for name in layout if fields[name]["type"] not in PARTITION_TYPES]
    if odd:
        kinds = [fields[name]["type"] for name in odd]
        raise StorageError(f"the Delta table {uri} is partitioned by {odd} of {kinds}, whose texts differ by writer")
    collated = [entry.column for entry in conditions if "__COLLATIONS" in fields[entry.column].get("metadata", {})]
    if collated:
        raise StorageError(f"the Delta table {uri} has the columns {collated} with an order of their own (collation)")
    outside = next((file.path for file in files if "://" in file.path or file.path.startswith("/")), None)
    if outside is not None:
        raise StorageError(f"the Delta table {uri} names the file {outside}, which does not lie in its folder")
