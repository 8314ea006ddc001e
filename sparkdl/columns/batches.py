"""Record batches of other sizes than they came in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pyarrow as pa


def merge_small(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Merge small batches to at most ``rows`` rows; larger ones pass as they are, empty ones are left out."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if waiting and count + batch.num_rows > rows:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, count = [], 0
        if batch.num_rows:
            waiting.append(batch)
            count += batch.num_rows
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)


def split_evenly(batch: pa.RecordBatch, rows: int) -> list[pa.RecordBatch]:
    """Split a batch into chunks of at most ``rows`` rows and of nearly equal size, without a copy."""
    chunks = math.ceil(batch.num_rows / rows)
    size = math.ceil(batch.num_rows / chunks)
    return [batch.slice(start, size) for start in range(0, batch.num_rows, size)]
