"""Record batches of other sizes than they came in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pyarrow as pa


def merge_small(
    batches: Iterable[pa.RecordBatch], rows: int, most_bytes: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Merge small batches to at most ``rows`` rows, and ``most_bytes`` in memory.

    Larger ones pass as they are, empty ones are left out.
    """
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        of_batch = 0 if most_bytes is None else batch.nbytes
        is_full = count + batch.num_rows > rows or (most_bytes is not None and size + of_batch > most_bytes)
        if waiting and is_full:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, count, size = [], 0, 0
        if batch.num_rows:
            waiting.append(batch)
            count, size = count + batch.num_rows, size + of_batch
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)


def split_evenly(batch: pa.RecordBatch, rows: int) -> list[pa.RecordBatch]:
    """Split a batch into chunks of at most ``rows`` rows and of nearly equal size, without a copy."""
    chunks = math.ceil(batch.num_rows / rows)
    size = math.ceil(batch.num_rows / chunks)
    return [batch.slice(start, size) for start in range(0, batch.num_rows, size)]
