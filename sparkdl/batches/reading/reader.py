"""The reading of one epoch on one rank: index batches number rows, chunks gather them ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.batches.memory.blocks import Blocks
from sparkdl.batches.memory.buffer_pool import BufferRing
from sparkdl.batches.order.patterns import Pattern, Patterns
from sparkdl.batches.order.plan import ROW_BITS, ROW_MASK, Order
from sparkdl.batches.reading.gather import Column, Places, Tensors
from sparkdl.batches.reading.geometry import Pipeline
from sparkdl.batches.reading.windows import Part, Windows

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Cut:
    """A chunk that is not submitted yet: its steps, and its rows in an index batch."""

    places: Future[list[Places]]
    rows: slice
    sizes: list[int]
    position: int


@dataclass(slots=True)
class _Chunk:
    """Steps that are being gathered."""

    result: Future[list[Tensors]]
    position: int


def single_threaded(count: int, name: str) -> ThreadPoolExecutor:
    """Make ``count`` threads inside which torch uses no further threads of its own.

    torch keeps that number by thread, but takes the default of a thread, on its first use of torch, from whoever set it
    last in any thread. So the threads are started here and now, each uses torch once before it sets its number, and the
    caller's number is set again behind them.
    """
    thread_count = torch.get_num_threads()
    started = Barrier(count + 1)
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    def start() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()

    for _ in range(count):
        executor.submit(start)
    started.wait()
    torch.set_num_threads(thread_count)
    return executor


class Reader:
    """Iterates the tensors of the steps ``first_step, ...`` of one epoch on one rank.

    A *window* is a part of one lane, shuffled (``windows.py``). An *index batch* is many steps whose rows are found
    together in the windows of the lanes that the rank reads. A *chunk* is as many steps of an index batch as fill a
    buffer. All three are made by tasks of a few threads, submitted by the consumer's own calls: windows before the
    index batches that need them, and these before their chunks, so that a task may wait for what it needs without ever
    blocking it. What is submitted is bounded, what fails reaches the consumer, and closing leaves no thread behind.

    Every call into numpy or torch that hands the interpreter's lock over costs as much as gathering hundreds of rows,
    for the other threads want it, too. So index batches and chunks are large; only the first ones are small, for the
    first batch to be there soon.

    Args:
        blocks: of the set.
        columns: the tensors to gather.
        order: of the epoch.
        patterns: of the rank, for its cut of the epoch into steps.
        first_step: where to begin.
        pipeline: how much memory and how many threads it takes.
        ring: buffers to gather into.
        numbers: buffers for row numbers.
    """

    def __init__(
        self,
        blocks: Blocks,
        columns: Sequence[Column],
        order: Order,
        patterns: Patterns,
        *,
        first_step: int,
        pipeline: Pipeline,
        ring: BufferRing,
        numbers: BufferRing,
    ) -> None:
        self._columns, self._patterns, self._steps = columns, patterns, patterns.steps
        share = -(-self._steps.global_batch // self._steps.world_size)
        self._chunk_steps = max(1, pipeline.chunk_rows // share)
        self._index_batch_steps = max(1, pipeline.index_batch_rows // share)
        self._depth = pipeline.depth
        self._ring, self._numbers = ring, numbers
        self._next_step = first_step
        self._next_size = 1
        self._cuts: deque[_Cut] = deque()
        self._pending: deque[_Chunk] = deque()
        self._ready: deque[Tensors] = deque()
        self._workers = single_threaded(pipeline.threads, "sparkdl-gather")
        self._windows = Windows(blocks, order, pipeline.group, self._workers.submit, self._numbers.numbers)
        self._closed = False

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        """The tensors of the next step."""
        if not self._ready:
            self._refill()
        return self._ready.popleft()

    def _refill(self) -> None:
        while len(self._pending) < self._depth and not self._closed and self._submit():
            pass
        if not self._pending:
            self.close()
            raise StopIteration
        chunk = self._pending.popleft()
        try:
            self._ready.extend(chunk.result.result())
        except BaseException:
            self.close()
            raise
        if self._pending:
            self._windows.retire(self._pending[0].position)

    def close(self) -> None:
        """End the threads and give the blocks back; what is not yet taken is lost."""
        if self._closed:
            return
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._windows.close()
        self._cuts.clear()
        self._pending.clear()
        self._ready.clear()

    def _submit(self) -> bool:
        """Start gathering the next chunk, if any; the next index batch is begun before the last chunk of one."""
        if not self._cuts and self._next_step < self._steps.count:
            self._begin_index_batch()
        if not self._cuts:
            return False
        cut = self._cuts.popleft()
        if not self._cuts and self._next_step < self._steps.count:
            self._begin_index_batch()
        result = self._workers.submit(self._gather, cut)
        self._pending.append(_Chunk(result, cut.position))
        return True

    def _begin_index_batch(self) -> None:
        """Start to find the rows of the next steps, and the windows they lie in, and cut them into chunks."""
        first, full_steps = self._next_step, self._steps.rows // self._steps.global_batch
        last = min(first + self._next_size, full_steps if first < full_steps else self._steps.count)
        self._next_step = last
        self._next_size = min(4 * self._next_size, self._index_batch_steps)
        pattern = self._patterns.of(range(first, last))
        places = self._workers.submit(self._locate, pattern, self._windows.parts(pattern))
        row = 0
        for start in range(0, last - first, self._chunk_steps):
            sizes = pattern.sizes[start : start + self._chunk_steps]
            rows = slice(row, row + sum(sizes))
            self._cuts.append(_Cut(places, rows, sizes, self._steps.ranges(first + start)[0][0]))
            row = rows.stop
        if last < self._steps.count:
            self._windows.look_ahead(pattern)

    def _locate(self, pattern: Pattern, parts: Sequence[Part]) -> list[Places]:
        """Task: find where the rows of an index batch lie, for every column."""
        empty, count = self._numbers.numbers, pattern.places.size
        row_arrays = [part.take() for part in parts]
        laid = np.concatenate(row_arrays, out=empty(sum(rows.size for rows in row_arrays))) if row_arrays else empty(0)
        block = np.take(laid, pattern.places, out=empty(count), mode="clip") if count else laid
        row = np.bitwise_and(block, ROW_MASK, out=empty(count))
        block >>= ROW_BITS
        return [column.locate(block, row, empty) for column in self._columns]

    def _gather(self, cut: _Cut) -> list[Tensors]:
        """Task: gather the rows of some steps."""
        batches: list[Tensors] = [{} for _ in cut.sizes]
        for column, places in zip(self._columns, cut.places.result(), strict=True):
            step_places = tuple(rows[cut.rows] for rows in places)
            for batch, tensors in zip(batches, column.gather(step_places, cut.sizes, self._ring.take), strict=True):
                batch.update(tensors)
        return batches
