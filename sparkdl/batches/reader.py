"""The pipeline of one epoch on one rank: windows of rows are made ready, chunks of steps gathered ahead.

Enters: the order, the cut into steps, the blocks, the columns. Leaves: for every step, in order, its tensors.

A *window* is a stretch of one lane, shuffled; making it ready fetches and checks its blocks. A *chunk* is as many steps
as fill a buffer; gathering it takes rows from the windows of the lanes that the rank reads. Both run as tasks of a few
threads, submitted by the consumer's own calls: windows before the chunks that need them, so that a chunk may wait for
its windows without ever blocking them. What is submitted is bounded, what fails reaches the consumer, and closing
leaves no thread behind.

Every call into numpy or torch that hands the interpreter's lock over costs as much as gathering hundreds of rows. So
chunks are large; the first ones are small, for the first batch to be there soon; and what is the same for most chunks,
which rows of each lane make up which step, is worked out once and moved along (``_Pattern``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.batches.blocks import Blocks
from sparkdl.batches.buffers import BufferRing
from sparkdl.batches.convert import Column, Tensors
from sparkdl.batches.plan import ROW_BITS, ROW_MASK, Order, Segments, Steps, segments

__all__ = ["Reader", "ReaderSettings", "Tensors", "single_threaded"]

Ints = npt.NDArray[np.int64]
_Parts = list[tuple[int, "Future[Ints]"]]
"""The windows of a lane that a chunk takes rows from: (first row, counted in the lane; the rows)."""

_KEPT_PATTERNS = 4


@dataclass(slots=True)
class _Window:
    """A stretch of one lane on its way into memory."""

    blocks: list[int]
    rows: Future[Ints] | None = None


@dataclass(slots=True)
class _Chunk:
    """Steps that are being gathered."""

    result: Future[list[Tensors]]
    position: int


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Which rows of its lanes a chunk takes, and where they go; the same for chunks of whole steps but for ``turn``.

    Attributes:
        lanes: that are touched.
        low: first row of each, ``(lanes touched,)``.
        high: row behind the last of each.
        places: where each row of the chunk, in training order, lies among the rows of its lanes laid end to end.
        sizes: rows of each step.
        turn: rows of every lane that lie before the chunk.
    """

    lanes: list[int]
    low: Ints
    high: Ints
    places: Ints
    sizes: list[int]
    turn: int

    @classmethod
    def of(cls, part: Segments, steps: range, turn: int) -> _Pattern:
        sizes = part.high - part.low
        shift = np.cumsum(sizes) - sizes - part.low
        runs = part.start + shift[np.searchsorted(part.lanes, part.lane)] - np.cumsum(part.count) + part.count
        places: Ints = np.repeat(runs, part.count)
        places += np.arange(places.size)
        rows = np.bincount(part.step - steps.start, weights=part.count, minlength=len(steps)).astype(np.int64)
        return cls(part.lanes.tolist(), part.low, part.high, places, rows.tolist(), turn)

    def moved(self, turn: int) -> _Pattern:
        """The same rows, further along their lanes."""
        by = turn - self.turn
        return replace(self, low=self.low + by, high=self.high + by, turn=turn)


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

    torch keeps that number by thread, but takes the default of a thread, on its first use of torch, from whoever set it
    last in any thread. So the threads are started here and now, each uses torch once before it sets its number, and the
    caller's number is set again behind them.
    """
    mine = torch.get_num_threads()
    started = Barrier(count + 1)
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    def start() -> None:
        torch.get_num_threads()
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
        self._next_size = 1
        self._windows: dict[tuple[int, int], _Window] = {}
        self._pending: deque[_Chunk] = deque()
        self._ready: deque[Tensors] = deque()
        self._workers = single_threaded(settings.threads, "sparkdl-gather")
        self._patterns: dict[tuple[int, int], _Pattern] = {}
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
        last = min(first + self._next_size, self._steps.count)
        self._next_size = min(4 * self._next_size, self._steps_per_chunk)
        pattern = self._pattern(range(first, last))
        size = self._order.window
        windows = [
            [(number * size, self._prepare(lane, number)) for number in range(low // size, (high - 1) // size + 1)]
            for lane, low, high in zip(pattern.lanes, pattern.low.tolist(), pattern.high.tolist(), strict=True)
        ]
        result = self._workers.submit(self._gather, pattern, windows)
        self._pending.append(_Chunk(result, self._steps.ranges(first)[0][0]))
        self._next_step = last
        if last < self._steps.count:
            self._look_ahead(pattern)

    def _pattern(self, steps: range) -> _Pattern:
        """What the chunk of these steps takes, from an earlier chunk that begins at the same lane if there was one."""
        lanes, batch = self._order.lanes, self._steps.global_batch
        turn, lane = divmod(steps.start * batch, lanes)
        key = (len(steps), lane)
        whole = steps.stop * batch <= self._steps.rows
        if whole and key in self._patterns:
            return self._patterns[key].moved(turn)
        part = segments(self._steps, lanes, self._rank, steps.start, steps.stop)
        pattern = _Pattern.of(part, steps, turn)
        if whole and len(steps) == self._steps_per_chunk and len(self._patterns) < _KEPT_PATTERNS:
            self._patterns[key] = pattern
        return pattern

    def _look_ahead(self, pattern: _Pattern) -> None:
        """Fetch the window after the current one of each lane, and shuffle it before it is needed, lane by lane."""
        size = self._order.window
        for turn, (lane, high) in enumerate(zip(pattern.lanes, pattern.high.tolist(), strict=True)):
            number = (high - 1) // size + 1
            if number < self._order.windows(lane):
                self._window(lane, number)
                if (high - 1) % size >= (turn + 1) * size // (len(pattern.lanes) + 2):
                    self._prepare(lane, number)

    def _window(self, lane: int, number: int) -> _Window:
        window = self._windows.get((lane, number))
        if window is None:
            window = _Window(self._order.pieces(lane, number)[0].tolist())
            self._blocks.request(window.blocks)
            self._windows[lane, number] = window
        return window

    def _prepare(self, lane: int, number: int) -> Future[Ints]:
        window = self._window(lane, number)
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

    def _shuffle(self, blocks: list[int], lane: int, number: int) -> Ints:
        """Task: make a window's blocks readable, and its rows known in training order."""
        replaced = {block: stand_in for block in blocks if (stand_in := self._blocks.ready(block)) != block}
        rows = self._order.window_rows(lane, number)
        for damaged, stand_in in replaced.items():
            here = rows >> ROW_BITS == damaged
            rows[here] = stand_in << ROW_BITS | (rows[here] & ROW_MASK) % self._blocks.rows[stand_in]
        return rows

    def _gather(self, pattern: _Pattern, windows: Sequence[_Parts]) -> list[Tensors]:
        """Task: gather the rows of some steps."""
        rows = self._rows(pattern, windows)
        block, row = rows >> ROW_BITS, rows & ROW_MASK
        batches: list[Tensors] = [{} for _ in pattern.sizes]
        for column in self._columns:
            for batch, tensors in zip(batches, column.gather(block, row, pattern.sizes, self._ring.take), strict=True):
                batch.update(tensors)
        return batches

    @staticmethod
    def _rows(pattern: _Pattern, windows: Sequence[_Parts]) -> Ints:
        """The rows of a chunk in training order, out of the windows of each lane."""
        pieces = []
        for low, high, parts in zip(pattern.low.tolist(), pattern.high.tolist(), windows, strict=True):
            pieces += [future.result()[max(low - start, 0) : high - start] for start, future in parts]
        if not pieces:
            return np.empty(0, np.int64)
        return np.concatenate(pieces).take(pattern.places)
