"""A Spark DataFrame -> shards and their manifest, by one Spark stage.

Enters: a DataFrame, classic or of Spark Connect. Leaves: a committed shard set. No row passes through the driver: each
task writes the rows of its partition and returns one report.

Partitions are written as they are: one of any size becomes as many shards as it fills, an empty one none, and readers
deal blocks, not shards, to ranks. So skew costs time in this stage and nothing later, and no shuffle is paid for by
default; ``ShardConfig.repartition`` asks for one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.columns.layout import Layout, Preparation, plan_tensors, with_dictionaries
from sparkdl.columns.names import check_names, quoted, tells_cases_apart
from sparkdl.columns.numpy_arrow import one_value
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import tensor_kind
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.spark_errors import task_errors
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.config import ShardConfig
from sparkdl.errors import DataError, SchemaError
from sparkdl.observe import span
from sparkdl.shards.files import PartWriter
from sparkdl.shards.key import content_key
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage, check_places

__all__ = ["spark_arrow_schema", "write_shards"]


def write_shards(
    df: DataFrame,
    uri: str | Storage,
    *,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    layout: Layout | None = None,
    source: Source | None = None,
    config: ShardConfig | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a DataFrame as a shard set.

    Args:
        df: the rows. It is computed once, and once more for its string columns alone if it has any whose dictionary
            ``layout`` does not give.
        uri: of the set's directory.
        columns: those to write, all by default; labels are written in any case.
        labels: the columns that become labels.
        layout: how columns become tensors.
        source: the pinned table behind ``df``; with it, writing the same thing again finds the set that is there.
        config: sizes, format and seed.
        overwrite: replace another set that stands at ``uri``.

    Returns:
        the manifest that was committed, or found.

    Raises:
        SchemaError: a column is missing or cannot become a tensor; the message names it.
        DataError: there are no rows, or values that cannot be written, such as nulls.
        ConflictError: another set stands at ``uri``, or was committed there meanwhile.
        StorageError: the target cannot be written.
    """
    layout, config = (layout or Layout()).of_prepared(columns), config or ShardConfig()
    use_drivers_python(df.sparkSession)
    schema, tensors = _planned(df, columns, labels, layout)
    plan = str(df.semanticHash()) if source is not None and not source.transformation else ""
    key = content_key(source, schema, tensors, layout, config, plan)
    transaction = Transaction(uri, layout=layout, source=source, config=config, key=key, overwrite=overwrite)
    found = transaction.existing()
    if found is not None:
        return found
    check_places({"shards": transaction.root}, df.sparkSession)
    strings = [spec.name for spec in tensors if spec.logical == "string" and spec.name not in layout.dictionaries]
    with transaction, span("write_shards"):
        if strings:
            values = _distinct(df, strings, config.max_dictionary_values)
            tensors = with_dictionaries(tensors, values, layout, config.max_dictionary_values)
        else:
            tensors = with_dictionaries(tensors, {}, layout, config.max_dictionary_values)
        if layout.prepare is None:
            rows, packed = _packed_rows(df, schema, tensors)
        else:
            rows, packed = df.select(*map(quoted, dict.fromkeys([*layout.prepare.columns, *labels]))), ()
        if config.repartition is not None:
            rows = rows.repartition(config.repartition)
        task = _WriteTask(transaction.root, tensors, config, transaction.tag, packed, layout.prepare)
        reports = [PartReport.from_json(fields) for fields in _run(rows, task)]
        return transaction.commit(reports, tensors, strings)


def _planned(
    df: DataFrame, columns: Sequence[str] | None, labels: Sequence[str], layout: Layout
) -> tuple[pa.Schema, tuple[TensorSpec, ...]]:
    """The schema of the rows, and the tensors that they or what ``layout.prepare`` makes of them become."""
    named = columns if layout.prepare is None else list(layout.prepare.columns)
    used = df.columns if named is None else [*named, *labels]
    check_names(df.columns, used, cases=tells_cases_apart(df))
    schema = spark_arrow_schema(df, columns if layout.prepare is None else (), labels)
    planned = layout.schema_of_prepared(schema, labels)
    return schema, plan_tensors(planned, columns=columns, labels=labels, layout=layout)


def spark_arrow_schema(df: DataFrame, columns: Sequence[str] | None = None, labels: Sequence[str] = ()) -> pa.Schema:
    """The Arrow schema of a DataFrame's rows as tasks see them.

    Args:
        df: the frame.
        columns: those that will be used, all by default; the others may have any type.
        labels: more of these.

    Raises:
        SchemaError: a column that will be used has a type without a tensor.
    """
    fields = []
    for column in df.schema:
        used = columns is None or column.name in columns or column.name in labels
        kind = pa.null()
        try:
            found = to_arrow_type(column.dataType, timezone="UTC")
            tensor_kind(column.name, found, None)
            kind = found
        except (PySparkTypeError, SchemaError) as cause:
            if used:
                name = column.dataType.simpleString()
                raise SchemaError(
                    f"column {column.name!r} is {name}, which no tensor can hold: cast it or leave it out"
                ) from cause
        fields.append(pa.field(column.name, kind))
    return pa.schema(fields)


def _packed_rows(df: DataFrame, schema: pa.Schema, tensors: Sequence[TensorSpec]) -> tuple[DataFrame, tuple[str, ...]]:
    """The columns that are written, those of a packed tensor as one array where they have one type.

    Spark passes an array of 40 numbers to Python faster than 40 columns, and it is the packed tensor as it comes.
    """
    selected, packed = [], []
    for spec in tensors:
        if spec.mask_of is not None:
            continue
        columns = [functions.col(quoted(column)) for column in spec.columns]
        kinds = {schema.field(column).type for column in spec.columns}
        if len(columns) > 1 and len(kinds) == 1:
            selected.append(functions.array(*columns).alias(spec.name))
            packed.append(spec.name)
        else:
            selected.extend(columns)
    return df.select(*selected), tuple(packed)


def _run(df: DataFrame, task: Any) -> list[dict[str, Any]]:
    """Run ``task`` on every partition; the dictionaries that it returns.

    Raises:
        SparkdlError: of the type that a task raised, once Spark had retried it in vain.
    """
    # Spark's mapInArrow takes a dot in a name for a path into a struct, and a backtick for a quote.
    plain = df.toDF(*(f"column_{number}" for number in range(len(df.columns))))
    with task_errors():
        rows = plain.mapInArrow(_Named(tuple(df.columns), task), "report binary").collect()
    return [json.loads(zlib.decompress(bytes(row["report"]))) for row in rows]


def _report(fields: dict[str, Any]) -> pa.RecordBatch:
    data = zlib.compress(json.dumps(fields).encode(), level=1)
    return pa.RecordBatch.from_arrays([one_value(data)], ["report"])


@dataclass(frozen=True)
class _Named:
    """Gives the columns of each batch their own names back."""

    names: tuple[str, ...]
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.task(batch.rename_columns(list(self.names)) for batch in promptly(batches))


@dataclass(frozen=True)
class _WriteTask:
    """Writes the rows of one partition.

    What is wrong with the rows goes to the driver as a report, since trying again would not help. What is wrong with
    the storage is raised, so that Spark tries again, elsewhere if it can.
    """

    root: Storage
    tensors: tuple[TensorSpec, ...]
    config: ShardConfig
    tag: str
    packed: tuple[str, ...]
    prepare: Preparation | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partition = _partition()
        writer = PartWriter(
            self.root,
            self.tensors,
            self.config,
            partition=partition,
            tag=self.tag,
            packed_already=self.packed,
            prepare=self.prepare,
        )
        try:
            for batch in batches:
                writer.write(batch)
            report = writer.finish()
        except (DataError, SchemaError) as cause:
            writer.abort()
            report = PartReport(partition=partition, error=(type(cause).__name__, str(cause)))
        except BaseException:
            writer.abort()
            raise
        yield _report(report.to_json())


@dataclass(frozen=True)
class _DistinctTask:
    """Collects the distinct strings of one partition, at most ``most`` and one more of each column."""

    columns: tuple[str, ...]
    most: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        values: dict[str, set[str]] = {column: set() for column in self.columns}
        for batch in batches:
            for column, known in values.items():
                known.update(batch.column(column).unique().drop_null().to_pylist())
                if len(known) > self.most:
                    yield _report({name: sorted(part) for name, part in values.items()})
                    return
        yield _report({name: sorted(part) for name, part in values.items()})


def _partition() -> int:
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _distinct(df: DataFrame, columns: list[str], most: int) -> dict[str, list[str]]:
    """The sorted values of string columns: their order, and so the codes, depends on no partitioning."""
    parts = _run(df.select(*(quoted(column) for column in columns)), _DistinctTask(tuple(columns), most))
    return {column: sorted({value for part in parts for value in part[column]}) for column in columns}
