"""A Spark DataFrame to shards and their manifest, by two Spark stages: runs, and shards of rows at random."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.columns.frames import map_columns, selected
from sparkdl.columns.layout import Layout, Preparation, plan_tensors, with_dictionaries
from sparkdl.columns.names import check_names, folded, quoted, tells_cases_apart
from sparkdl.columns.numpy_arrow import one_value
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import tensor_kind
from sparkdl.compat.column_names import Task
from sparkdl.compat.spark_errors import task_errors
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, DataError, NoRowsError, SchemaError
from sparkdl.observe import span
from sparkdl.shards.files import PartWriter
from sparkdl.shards.key import content_key
from sparkdl.shards.manifest import Manifest, ShardInfo, Source
from sparkdl.shards.spread import Stage, spread
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage, check_places

_HELD_OUT = "__sparkdl_held_out"


class TaskRows(Protocol):
    """Rows that tasks read from files themselves, so that they never enter the JVM."""

    @property
    def spark(self) -> Any:
        """The session whose tasks these are."""

    @property
    def schema(self) -> pa.Schema:
        """Of the rows: what ``Layout.prepare`` reads, the labels, and the mark of ``write_split`` at the end."""

    def reports(self, task: Task) -> list[bytes]:
        """What ``task`` gives of the rows that one Spark task reads, a batch of one binary value, from each of them."""


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
    before_commit: Callable[[], None] | None = None,
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
        before_commit: called last before the set is committed; what it raises ends the write, and nothing is left.

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
    transaction = Transaction(
        uri, layout=layout, source=source, config=config, key=key, overwrite=overwrite, before_commit=before_commit
    )
    existing = transaction.existing()
    if existing is not None:
        return existing
    reading = partial(_reading_of, df, schema, tensors, labels, layout, config)
    (written,) = _written(reading, df.sparkSession, [transaction], config)
    if isinstance(written, NoRowsError):
        raise written
    return written


def write_split(
    df: DataFrame | TaskRows,
    held_out: str,
    uris: tuple[str | Storage, str | Storage],
    *,
    columns: Sequence[str] | None = None,
    labels: Sequence[str],
    layout: Layout,
    config: ShardConfig,
    sources: tuple[Source | None, Source | None] = (None, None),
    overwrite: bool = False,
    before_commit: Callable[[], None] | None = None,
) -> list[Manifest | NoRowsError]:
    """Write the rows of a DataFrame as two shard sets, in one reading of it.

    Args:
        df: the rows; string columns share one dictionary. ``TaskRows`` take ``layout.prepare``,
            no ``ShardConfig.repartition``, and labels that are numbers.
        held_out: the column, true of rows of the second set, false of those of the first, null of those of neither.
        uris: of both sets' directories.
        columns: those to write, beside labels; None where ``layout.prepare`` names them.
        labels: the columns that become labels.
        layout: how columns become tensors.
        config: sizes, format and seed.
        sources: the pinned tables behind both sets, whose transformations say which rows these are; with them, writing
            the same thing again finds the sets that are there.
        overwrite: replace other sets that stand there.
        before_commit: called last before each set is committed; what it raises ends the write.

    Returns:
        the two manifests; for a set without rows, which is not written, the error that says so.

    Raises:
        SchemaError, DataError, ConflictError, StorageError: as ``write_shards``.
        ConfigError: ``TaskRows`` with what they do not take.
    """
    layout = layout.of_prepared(columns)
    reading: Callable[[], _Reading]
    if isinstance(df, DataFrame):
        spark = df.sparkSession
        use_drivers_python(spark)
        schema, tensors = _planned(df, columns, labels, layout)
        marked = df.withColumn(_HELD_OUT, functions.col(quoted(held_out)))  # which may be a column of the sets, too
        reading = partial(_reading_of, marked, schema, tensors, labels, layout, config, [_HELD_OUT])
    else:
        spark, schema = df.spark, df.schema
        tensors = plan_tensors(layout.schema_of_prepared(schema, labels), columns=columns, labels=labels, layout=layout)
        texts = [spec.name for spec in tensors if spec.logical == "string"]
        if schema.names[-1:] != [held_out]:
            raise ConfigError(
                f"held_out={held_out!r} is not the last column of the rows that tasks read, {schema.names}: name that"
            )
        if layout.prepare is None or texts or config.repartition is not None:
            raise ConfigError(
                f"rows that tasks read come {'without' if layout.prepare is None else 'with'} layout.prepare, "
                f"with repartition={config.repartition} and the text columns {texts}: write a DataFrame instead, or "
                "give them prepare and neither of the others"
            )
        reading = partial(_Reading, tensors, df.reports)
    transactions = [
        Transaction(
            uri,
            layout=layout,
            source=source,
            config=config,
            key=content_key(source, schema, tensors, layout, config),
            overwrite=overwrite,
            before_commit=before_commit,
        )
        for uri, source in zip(uris, sources, strict=True)
    ]
    existing = [manifest for transaction in transactions if (manifest := transaction.existing()) is not None]
    if len(existing) == len(transactions):
        return [*existing]
    return _written(reading, spark, transactions, config)


@dataclass(frozen=True)
class _Reading:
    """How rows come to the tasks that write them.

    Attributes:
        tensors: that they become, with the dictionaries of texts.
        reports: what a task gives of the rows that it reads, from each of them.
        strings: columns of texts whose dictionary the rows tell.
        packed: packed tensors that come as one array column of their name.
    """

    tensors: tuple[TensorSpec, ...]
    reports: Callable[[Task], list[bytes]]
    strings: Sequence[str] = ()
    packed: tuple[str, ...] = ()


def _reading_of(
    df: DataFrame,
    schema: pa.Schema,
    tensors: tuple[TensorSpec, ...],
    labels: Sequence[str],
    layout: Layout,
    config: ShardConfig,
    mark: Sequence[str] = (),
) -> _Reading:
    """How the rows of a DataFrame come to tasks; computes it for the texts whose dictionary ``layout`` does not give.

    Args:
        df: the rows.
        schema: of them, as planned.
        tensors: as planned.
        labels: the columns that become labels.
        layout: how columns become tensors.
        config: how shards are written.
        mark: the column at the end that says of which set a row is, if there are two.
    """
    strings = [spec.name for spec in tensors if spec.logical == "string" and spec.name not in layout.dictionaries]
    values = _distinct(df, strings, config.max_dictionary_values) if strings else {}
    tensors = with_dictionaries(tensors, values, layout, config.max_dictionary_values)
    packed: tuple[str, ...] = ()
    if layout.prepare is None:
        chosen, packed = _packed_columns(schema, tensors, cases=tells_cases_apart(df))
        rows = df.select(*chosen, *mark)
    else:
        rows = selected(df, dict.fromkeys([*layout.prepare.columns, *labels, *mark]))
    return _Reading(tensors, partial(_reports, rows, config.repartition), strings, packed)


def _written(
    reading: Callable[[], _Reading], spark: Any, transactions: Sequence[Transaction], config: ShardConfig
) -> list[Manifest | NoRowsError]:
    """Read the rows once, and write them as one set, or as two.

    No row passes through the driver: each task writes the rows of its partition and returns one report. Of two sets of
    one reading, a frame whose rows change from one reading to the next has no row in both, and none in neither but
    those that the mark leaves out.

    Rows are spread at random over the set (``spread.py``): tables are sorted as a rule, and a model that is trained on
    like rows one after the other follows those it saw last. With ``ShardConfig.spread_rows=False`` the order of the
    frame stays. Skewed partitions cost time in the first stage and nothing later; ``ShardConfig.repartition`` evens
    them out.
    """
    check_places({"shards": transactions[0].root}, spark)
    with ExitStack() as open_transactions, span("write_shards"):
        for transaction in transactions:
            open_transactions.enter_context(transaction)
        rows = reading()
        tensors, strings = rows.tensors, rows.strings
        targets = tuple((transaction.root, transaction.tag) for transaction in transactions)
        task = _WriteTask(targets, tensors, config, rows.packed, transactions[0].layout.prepare)
        with task_errors():
            tasks = _decoded(rows.reports(task))
        by_set = [
            [PartReport.from_json(task_report["sets"][number]) for task_report in tasks]
            for number in range(len(transactions))
        ]
        shards: dict[Transaction, Sequence[ShardInfo]] = {}
        if config.spread_rows:
            plans = {}
            for transaction, reports in zip(transactions, by_set, strict=True):
                with suppress(NoRowsError):
                    plans[transaction] = transaction.spreading(reports, tensors, strings)
            shards = dict(zip(plans, spread(list(plans.values()), _stage_of(spark)), strict=True))
        written: list[Manifest | NoRowsError] = []
        for transaction, reports in zip(transactions, by_set, strict=True):
            try:
                written.append(transaction.commit(reports, tensors, strings, shards.get(transaction)))
            except NoRowsError as error:
                written.append(error)
        return written


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
            arrow_type = to_arrow_type(column.dataType, timezone="UTC")
            tensor_kind(column.name, arrow_type, None)
            kind = arrow_type
        except (PySparkTypeError, SchemaError) as cause:
            if used:
                name = column.dataType.simpleString()
                raise SchemaError(
                    f"column {column.name!r} is {name}, which no tensor can hold: cast it or leave it out"
                ) from cause
        fields.append(pa.field(column.name, kind))
    return pa.schema(fields)


def _packed_columns(
    schema: pa.Schema, tensors: Sequence[TensorSpec], *, cases: bool
) -> tuple[list[Column], tuple[str, ...]]:
    """The columns that are written, those of a packed tensor as one array where they have one type.

    Spark passes an array of 40 numbers to Python faster than 40 columns, and it is the packed tensor as it comes.

    Raises:
        SchemaError: a packed tensor has the name of a column, to Spark, which tells ``a`` from ``A`` if ``cases``.
    """
    written = [spec for spec in tensors if spec.mask_of is None]
    types = {spec.name: {schema.field(column).type for column in spec.columns} for spec in written}
    packed = [spec for spec in written if len(spec.columns) > 1 and len(types[spec.name]) == 1]
    single = [column for spec in written if spec not in packed for column in spec.columns]
    arrays = []
    for spec in packed:
        others = [*single, *(other.name for other in packed if other is not spec)]
        alike = [name for name in others if folded(name, cases=cases) == folded(spec.name, cases=cases)]
        if alike:
            raise SchemaError(
                f"the packed tensor {spec.name!r} and {alike[0]!r} have one name to Spark, which tells no capitals: "
                "rename the column, or name the packed tensors otherwise"
            )
        arrays.append(functions.array(*[functions.col(quoted(name)) for name in spec.columns]).alias(spec.name))
    columns = [functions.col(quoted(name)) for name in single]
    return [*arrays, *columns], tuple(spec.name for spec in packed)


def _run(df: DataFrame, task: Any) -> list[dict[str, Any]]:
    """Run ``task`` on every partition; the dictionaries that it returns.

    Raises:
        SparkdlError: of the type that a task raised, once Spark had retried it in vain.
    """
    with task_errors():
        return _decoded(_reports(df, None, task))


def _reports(df: DataFrame, partitions: int | None, task: Any) -> list[bytes]:
    rows = df if partitions is None else df.repartition(partitions)
    return [bytes(row["report"]) for row in map_columns(rows, task, "report binary").collect()]


def _decoded(reports: Sequence[bytes]) -> list[dict[str, Any]]:
    return [json.loads(zlib.decompress(report)) for report in reports]


def _stage_of(session: Any) -> Stage:
    """Runs a task once a number, each in a Spark task of its own."""

    def run(task: Callable[[int], Any], count: int) -> list[Any]:
        reports = _run(session.range(0, count, 1, count), _Numbered(task))
        return [report["result"] for report in sorted(reports, key=lambda report: int(report["number"]))]

    return run


@dataclass(frozen=True)
class _Numbered:
    """Calls ``task`` with each number that arrives."""

    task: Callable[[int], Any]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield _report({"number": number, "result": self.task(number)})


def _report(fields: dict[str, Any]) -> pa.RecordBatch:
    data = zlib.compress(json.dumps(fields).encode(), level=1)
    return pa.RecordBatch.from_arrays([one_value(data)], ["report"])


@dataclass(frozen=True)
class _WriteTask:
    """Writes the rows of one partition.

    What is wrong with the rows goes to the driver as a report, since trying again would not help. What is wrong with
    the storage is raised, so that Spark tries again, elsewhere if it can.

    Attributes:
        targets: root and tag of each set's transaction; of two, the last column of the rows says whose each row is,
            null where it is in neither.
        tensors: as planned.
        config: how shards are written.
        packed: packed tensors that arrive as one array column of their name.
        prepare: makes the columns that become tensors of the raw ones.
    """

    targets: tuple[tuple[Storage, str], ...]
    tensors: tuple[TensorSpec, ...]
    config: ShardConfig
    packed: tuple[str, ...]
    prepare: Preparation | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partition = _partition()
        writers = [
            PartWriter(
                root,
                self.tensors,
                self.config,
                partition=partition,
                tag=tag,
                packed_already=self.packed,
                prepare=self.prepare,
            )
            for root, tag in self.targets
        ]
        try:
            for batch in batches:
                for writer, rows in zip(writers, self._divided(batch), strict=True):
                    writer.write(rows)
            reports = [writer.finish() for writer in writers]
        except BaseException as cause:
            for writer in writers:
                writer.abort()
            if not isinstance(cause, DataError | SchemaError):
                raise
            reports = [PartReport(partition=partition, error=(type(cause).__name__, str(cause)))] * len(writers)
        yield _report({"sets": [report.to_json() for report in reports]})

    def _divided(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, ...]:
        if len(self.targets) == 1:
            return (batch,)
        *columns, marks = batch.columns
        rows = pa.RecordBatch.from_arrays(columns, batch.schema.names[:-1])
        return rows.filter(pc.invert(marks)), rows.filter(marks)


@dataclass(frozen=True)
class _DistinctTask:
    """Collects the distinct strings of one partition, at most ``most`` and one more of each column."""

    columns: tuple[str, ...]
    most: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        values: dict[str, set[str]] = {column: set() for column in self.columns}
        for batch in batches:
            for column, distinct in values.items():
                distinct.update(batch.column(column).unique().drop_null().to_pylist())
                if len(distinct) > self.most:
                    yield _report({name: sorted(part) for name, part in values.items()})
                    return
        yield _report({name: sorted(part) for name, part in values.items()})


def _partition() -> int:
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _distinct(df: DataFrame, columns: list[str], most: int) -> dict[str, list[str]]:
    """The sorted values of string columns: their order, and so the codes, depends on no partitioning."""
    parts = _run(selected(df, columns), _DistinctTask(tuple(columns), most))
    return {column: sorted({value for part in parts for value in part[column]}) for column in columns}
