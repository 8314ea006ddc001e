"""Many columns of a Spark DataFrame, named and sent at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.compat.column_names import Task
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.worker_errors import encodable_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def selected(frame: DataFrame, names: Iterable[str]) -> DataFrame:
    """The columns of these names, in this order.

    Each column that Python names by itself costs some ten calls to Java, half a millisecond: of 500 columns a run of a
    pipeline made 114,000 calls. Here a text names all of them.
    """
    from pyspark.sql import functions as F

    names = list(names)
    if all(map(stands_in_sql, names)):
        return frame.selectExpr(*map(quoted, names))
    return frame.select(*[F.col(quoted(name)) for name in names])


def row_of(names: Iterable[str], arrays: Mapping[str, Sequence[str]] | None = None) -> Column:
    """One column, a struct: the columns of these names, and arrays of several columns each, by the arrays' names."""
    from pyspark.sql import functions as F

    names, arrays = list(names), arrays or {}
    if all(map(stands_in_sql, [*names, *itertools.chain(*arrays.values())])):
        texts = [f"array({', '.join(map(quoted, parts))}) AS {quoted(name)}" for name, parts in arrays.items()]
        return F.expr(f"struct({', '.join([*map(quoted, names), *texts])})")
    columns = [F.array(*[F.col(quoted(part)) for part in parts]).alias(name) for name, parts in arrays.items()]
    return F.struct(*[F.col(quoted(name)) for name in names], *columns)


def map_columns(frame: DataFrame, task: Task, schema: str) -> DataFrame:
    """What ``task`` makes of the columns of a frame, as ``mapInArrow`` does it."""
    return map_row(frame, row_of(frame.columns), task, schema)


def map_row(frame: DataFrame, row: Column, task: Task, schema: Any) -> DataFrame:
    """What ``task`` makes of the fields of a struct.

    Names of columns are then names of fields, which may hold dots and backticks; those of columns ``mapInArrow`` takes
    for paths.

    Args:
        frame: the rows.
        row: a struct of what the task gets; see ``row_of``.
        task: takes record batches of these fields, and makes others.
        schema: of what it makes, as ``mapInArrow`` takes it.
    """
    return frame.select(row.alias("row")).mapInArrow(_OfFields(task), schema)


@dataclass(frozen=True)
class _OfFields:
    """Gives a task the fields of the one column that Spark sends."""

    task: Task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with encodable_errors():
            yield from self.task(pa.RecordBatch.from_struct_array(batch.column(0)) for batch in promptly(batches))
