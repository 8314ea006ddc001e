"""The pipeline of one epoch on one rank: windows of rows are made ready, chunks of steps gathered ahead.

Enters: the order, the cut into steps, the blocks, the columns. Leaves: for every step, in order, its tensors.

A *window* is a stretch of one lane, shuffled; making it ready fetches and checks its blocks. A *chunk* is as many steps
as fill a buffer; gathering it takes rows from the windows of the lanes that the rank reads. Both run as tasks of a few
threads, submitted by the consumer's own calls: windows before the chunks that need them, so that a chunk may wait for
its windows without ever blocking them. What is submitted is bounded, what fails reaches the consumer, and closing
leaves no thread behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.batches.blocks import Blocks
from sparkdl.batches.buffers import BufferRing
from sparkdl.batches.convert import Column
from sparkdl.batches.plan import Order, Segments, Steps, segments

__all__ = ["Reader", "ReaderSettings", "Tensors", "single_threaded"]

Ints = npt.NDArray[np.int64]
Rows = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class _Window:
    """A stretch of one lane on its way into memory."""

    blocks: list[int]
    rows: Future[Rows] | None = None


@dataclass(slots=True)
class _Chunk:
    """Steps that are being gathered."""

    result: Future[list[Tensors]]
    position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderSettings:
    """How a reader spends memory and threads.

    Attributes:
        chunk_rows: rows gathered by one task, unless one step has more.
        depth: chunks that are submitted and not yet taken.
        threads: that gather.
        ring: buffers to gather into.
    """

    chunk_rows: int
    depth: int
    threads: int
    ring: BufferRing


def single_threaded(count: int, name: str) -> ThreadPoolExecutor:
    """Make ``count`` threads inside which torch uses no further threads of its own.

    torch keeps that number by thread but takes the default for new threads from whoever set it last; so the threads are
    started here and now, and the caller's number is set again behind them.
    """
    mine = torch.get_num_threads()
    started = Barrier(count + 1)
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    def start() -> None:
        torch.set_num_threads(1)
        started.wait()

    for _ in range(count):
        executor.submit(start)
    started.wait()
    torch.set_num_threads(mine)
    return executor


class Reader:
    """Iterates the tensors of the steps ``first_step, ...`` of one epoch on one rank.

    Args:
        blocks: of the set.
        columns: the tensors to gather.
        order: of the epoch.
        steps: its cut.
        rank: the one that reads.
        first_step: where to begin.
        settings: memory and threads.
    """

    def __init__(
        self,
        blocks: Blocks,
        columns: Sequence[Column],
        order: Order,
        steps: Steps,
        *,
        rank: int,
        first_step: int,
        settings: ReaderSettings,
    ) -> None:
        self._blocks, self._columns, self._order, self._steps, self._rank = blocks, columns, order, steps, rank
        share = -(-steps.global_batch // steps.world_size)
        self._steps_per_chunk = max(1, settings.chunk_rows // share)
        self._depth = settings.depth
        self._ring = settings.ring
        self._next_step = first_step
        self._windows: dict[tuple[int, int], _Window] = {}
        self._pending: deque[_Chunk] = deque()
        self._ready: deque[Tensors] = deque()
        self._workers = single_threaded(settings.threads, "sparkdl-gather")
        self._closed = False

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        """The tensors of the next step."""
        if not self._ready:
            self._refill()
        return self._ready.popleft()

    def _refill(self) -> None:
        while len(self._pending) < self._depth and self._next_step < self._steps.count and not self._closed:
            self._submit()
        if not self._pending:
            self.close()
            raise StopIteration
        chunk = self._pending.popleft()
        try:
            self._ready.extend(chunk.result.result())
        except BaseException:
            self.close()
            raise
        self._retire()

    def close(self) -> None:
        """End the threads and give the blocks back; what is not yet taken is lost."""
        if self._closed:
            return
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        for window in self._windows.values():
            self._blocks.release(window.blocks)
        self._windows.clear()
        self._pending.clear()
        self._ready.clear()

    def _submit(self) -> None:
        """Start gathering the next chunk, and the windows it needs."""
        first = self._next_step
        last = min(first + self._steps_per_chunk, self._steps.count)
        part = segments(self._steps, self._order.lanes, self._rank, first, last)
        lanes = sorted(set(part.lane.tolist()))
        extents = {}
        for lane in lanes:
            here = part.lane == lane
            start = part.start[here]
            extents[lane] = (int(start.min()), int((start + part.count[here]).max()))
        size = self._order.window
        windows = {
            lane: [
                (number * size, self._prepare(self._window(lane, number), lane, number))
                for number in range(low // size, (high - 1) // size + 1)
            ]
            for lane, (low, high) in extents.items()
        }
        result = self._workers.submit(self._gather, part, extents, windows, first, last)
        self._pending.append(_Chunk(result, self._steps.ranges(first)[0][0]))
        self._next_step = last
        self._look_ahead(extents)

    def _look_ahead(self, extents: dict[int, tuple[int, int]]) -> None:
        """Fetch the window after the current one of each lane, and shuffle it before it is needed, lane by lane."""
        size = self._order.window
        for turn, (lane, (_, high)) in enumerate(extents.items()):
            number = (high - 1) // size + 1
            if number < self._order.windows(lane) and self._next_step < self._steps.count:
                window = self._window(lane, number)
                if (high - 1) % size >= (turn + 1) * size // (len(extents) + 2):
                    self._prepare(window, lane, number)

    def _window(self, lane: int, number: int) -> _Window:
        window = self._windows.get((lane, number))
        if window is None:
            window = _Window(np.unique(self._order.pieces(lane, number)[0]).tolist())
            self._blocks.request(window.blocks)
            self._windows[lane, number] = window
        return window

    def _prepare(self, window: _Window, lane: int, number: int) -> Future[Rows]:
        if window.rows is None:
            window.rows = self._workers.submit(self._shuffle, window.blocks, lane, number)
        return window.rows

    def _retire(self) -> None:
        """Give back the windows behind every chunk that is still to be gathered."""
        if not self._pending:
            return
        oldest, lanes = self._pending[0].position, self._order.lanes
        done = [
            (lane, number)
            for lane, number in self._windows
            if (number + 1) * self._order.window <= (oldest + lanes - 1 - lane) // lanes
        ]
        for key in done:
            self._blocks.release(self._windows.pop(key).blocks)

    def _shuffle(self, blocks: list[int], lane: int, number: int) -> Rows:
        """Task: make a window's blocks readable, and its rows known in training order."""
        replaced = {block: stand_in for block in blocks if (stand_in := self._blocks.ready(block)) != block}
        block, row = self._order.window_rows(lane, number)
        for damaged, stand_in in replaced.items():
            here = block == damaged
            row[here] %= self._blocks.rows[stand_in]
            block[here] = stand_in
        return block, row

    def _gather(
        self,
        part: Segments,
        extents: dict[int, tuple[int, int]],
        windows: dict[int, list[tuple[int, Future[Rows]]]],
        first: int,
        last: int,
    ) -> list[Tensors]:
        """Task: gather the rows of the steps ``[first, last)``."""
        block, row = self._rows(part, extents, windows)
        sizes = np.bincount(part.step - first, weights=part.count, minlength=last - first).astype(np.int64).tolist()
        batches: list[Tensors] = [{} for _ in sizes]
        for column in self._columns:
            if column.by_step:
                start = 0
                for batch, size in zip(batches, sizes, strict=True):
                    rows = slice(start, start + size)
                    batch.update(column.gather(block[rows], row[rows], self._ring.take))
                    start += size
            else:
                for name, tensor in column.gather(block, row, self._ring.take).items():
                    for batch, view in zip(batches, torch.split(tensor, sizes), strict=True):
                        batch[name] = view
        return batches

    def _rows(
        self,
        part: Segments,
        extents: dict[int, tuple[int, int]],
        windows: dict[int, list[tuple[int, Future[Rows]]]],
    ) -> tuple[Ints, Ints]:
        """The (block, row) of every row of the chunk, in training order."""
        blocks, rows, base, before = [], [], {}, 0
        for lane, (low, high) in extents.items():
            base[lane] = before - low
            before += high - low
            for start, future in windows[lane]:
                block, row = future.result()
                cut = slice(max(low - start, 0), high - start)
                blocks.append(block[cut])
                rows.append(row[cut])
        if not blocks:
            empty = np.empty(0, np.int64)
            return empty, empty
        starts = part.start + np.array([base[lane] for lane in part.lane.tolist()])
        index = np.repeat(starts - np.cumsum(part.count) + part.count, part.count)
        index += np.arange(index.size)
        return np.concatenate(blocks).take(index).astype(np.int64), np.concatenate(rows).take(index).astype(np.int64)
