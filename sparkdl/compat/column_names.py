"""Column names with dots and backticks, past ``mapInArrow`` and ``mapInPandas``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What ``mapInArrow`` takes."""


def named_columns(frame: Any, task: Task) -> tuple[Any, Task]:
    """A frame with plain names, and a task for ``mapInArrow`` that gives the columns their own names back.

    pyspark up to 4.2 takes a dot in a name for a path into a struct there, and a backtick for a quote
    (``pyspark/sql/pandas/map_ops.py`` asks for ``self[name]``), so a frame with such a column fails. This costs a
    projection, and can go once pyspark quotes the names itself.

    Args:
        frame: a Spark DataFrame.
        task: takes and gives record batches.
    """
    if not any({".", "`"} & set(name) for name in frame.columns):
        return frame, task
    plain = frame.toDF(*(f"column_{number}" for number in range(len(frame.columns))))
    return plain, _Named(tuple(frame.columns), task)


@dataclass(frozen=True)
class _Named:
    names: tuple[str, ...]
    task: Task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.task(batch.rename_columns(list(self.names)) for batch in batches)
