"""The rows of each step on each rank: pure arithmetic over plain counts, without torch, pyarrow or a disk."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sparkdl.batches.order.permutations import Empty, fresh, permutation, permutations
from sparkdl.errors import ConfigError, DataError

Ints = npt.NDArray[np.int64]
TAILS = ("exact", "drop", "pad")
"""What happens to the rows that do not fill the last step; see ``Steps``."""

ROW_BITS = 32
"""A row is one number, ``block << ROW_BITS | row of the block``."""

ROW_MASK = (1 << ROW_BITS) - 1
MAX_LANES = 64
_BLOCKS_PER_WINDOW = 8
_BLOCK_STREAM, _ROW_STREAM = 0, 1


def choose_lanes(num_blocks: int, pool_blocks: int) -> int:
    """Choose how many lanes a set is read in: a power of two up to 64 that leaves every lane eight blocks to mix.

    Args:
        num_blocks: blocks of the set.
        pool_blocks: blocks that fit into the shuffle pool.
    """
    most = min(num_blocks, pool_blocks) // _BLOCKS_PER_WINDOW
    return min(MAX_LANES, 1 << (max(1, most).bit_length() - 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of one epoch: a bijection between positions and (block, row of the block).

    How an epoch is ordered, cut into steps (``Steps``), and dealt to ranks (``segments``)::

        blocks          permuted over the whole set by (seed, epoch), laid end to end, cut into ``lanes`` equal lanes
        lane            cut into windows of ``window`` rows, each permuted by (seed, epoch, number of the window, lane)
        position p      is row ``p // lanes`` of lane ``p % lanes``: a step takes from every lane in turn
        step k          is the positions ``[k * global_batch, (k + 1) * global_batch)``
        rank r          takes a contiguous slice of the step, its rows sorted by lane

    The rows of a step therefore depend on nothing but the block counts, the seed, the epoch and the global batch: not
    on the world size. And a rank reads only the lanes of its slice, about ``1 / world size`` of the bytes, as long as
    there are at least as many lanes as ranks; with more ranks than lanes the batches stay the same, and neighbouring
    ranks share a lane.

    Attributes:
        block_rows: rows of every block, in file order, ``(blocks,)``.
        seed: chooses the shuffle.
        epoch: counts from 0; every epoch has a shuffle of its own.
        lanes: independent streams that every step draws from.
        window: rows of one lane that are permuted among each other; ``lanes * window`` rows are the pool.
        shuffle: False keeps file order; it then needs ``lanes=1``.
    """

    block_rows: Ints
    seed: int = 0
    epoch: int = 0
    lanes: int = 1
    window: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, value, least in (("seed", self.seed, 0), ("epoch", self.epoch, 0), ("lanes", self.lanes, 1)):
            if value < least:
                raise ConfigError(f"{name}={value} is below {least}: choose {least} or more")
        if self.window < 1:
            raise ConfigError(f"window={self.window} rows cannot be shuffled: choose 1 or more")
        if not self.shuffle and self.lanes != 1:
            raise ConfigError(f"lanes={self.lanes} would break file order: use lanes=1 with shuffle=False")

    @cached_property
    def rows(self) -> int:
        """Rows of the epoch."""
        return int(self.block_rows.sum())

    @cached_property
    def sequence(self) -> Ints:
        """Block numbers in the order in which the lanes lay them end to end, ``(blocks,)``."""
        if not self.shuffle:
            return np.arange(self.block_rows.size, dtype=np.int64)
        return permutation(self.block_rows.size, self.seed, self.epoch, _BLOCK_STREAM)

    @cached_property
    def _starts(self) -> Ints:
        """The start of each block of ``sequence`` in the laid-out rows, and the total at the end, ``(blocks + 1,)``."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.block_rows[self.sequence], dtype=np.int64)])

    def lane_rows(self, lane: int) -> int:
        """Rows of one lane; lanes differ by at most one row."""
        return (self.rows + self.lanes - 1 - lane) // self.lanes

    def lane_start(self, lane: int) -> int:
        """The start of a lane in the laid-out rows."""
        lane_rows, extra = divmod(self.rows, self.lanes)
        return lane * lane_rows + min(lane, extra)

    def lane_blocks(self, lane: int) -> Ints:
        """The blocks of which a lane has rows, in the order of the lane."""
        start = self.lane_start(lane)
        low = bisect_right(self._begins, start) - 1
        return self.sequence[low : bisect_left(self._begins, start + self.lane_rows(lane))]

    def windows(self, lane: int) -> int:
        """Number of windows of one lane."""
        return -(-self.lane_rows(lane) // self.window)

    def _extents(self, lanes: range, window: int) -> tuple[Ints, Ints]:
        """The start of one window of each lane in the laid-out rows, and its rows, ``(lanes,)`` each."""
        lane = np.arange(lanes.start, lanes.stop, dtype=np.int64)
        lane_rows, extra = divmod(self.rows, self.lanes)
        rows = lane_rows + (lane < extra)
        first = np.minimum(window * self.window, rows)
        return lane * lane_rows + np.minimum(lane, extra) + first, np.minimum(self.window, rows - first)

    def row_ranges(self, lanes: range, window: int) -> tuple[Ints, Ints, Ints]:
        """The runs of rows that one window of each lane takes from blocks: ``(block, first row, rows)``."""
        extents = zip(*(values.tolist() for values in self._extents(lanes, window)), strict=True)
        ranges = []
        for start, size in extents:
            position = bisect_right(self._begins, start) - 1
            while size:
                block_start, block_stop = self._begins[position : position + 2]
                count = min(block_stop - start, size)
                if count:
                    ranges.append((self._blocks[position], start - block_start, count))
                start, size, position = start + count, size - count, position + 1
        block, first, count = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
        return block, first, count

    @cached_property
    def _begins(self) -> list[int]:
        """``_starts`` as a list: for a few numbers Python is faster than NumPy, which hands the lock over each time."""
        begins: list[int] = self._starts.tolist()
        return begins

    @cached_property
    def _blocks(self) -> list[int]:
        blocks: list[int] = self.sequence.tolist()
        return blocks

    def _mixed(self, lanes: range, window: int, sizes: Ints, empty: Empty = fresh) -> Ints:
        """Which of the rows of these windows, laid end to end, comes where in training order, ``(rows,)``."""
        places = empty(int(sizes.sum()))
        cuts = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(lanes)]
        mixed_rows = 0
        for low, high in itertools.pairwise(cuts):  # one run, or two in a last window: lanes differ by one row
            size = int(sizes[low])
            if not size:
                break  # lanes that have no such window come last
            key = (self.seed, self.epoch, _ROW_STREAM, window, size)
            mixed = permutations(high - low, size, *key, skip=lanes.start + low, empty=empty)
            start = np.arange(mixed_rows, mixed_rows + mixed.size, size, dtype=np.int64)[:, None]
            mixed_rows += mixed.size
            np.add(
                mixed, start, out=places[mixed_rows - mixed.size : mixed_rows].reshape(mixed.shape), casting="unsafe"
            )
        return places

    def window_rows(self, lanes: range, window: int, empty: Empty = fresh) -> tuple[Ints, Ints]:
        """The rows of one window of each lane in training order, behind each other.

        Several lanes are worked out at once, since every call that hands the interpreter's lock over has its price.

        Args:
            lanes: neighbouring ones.
            window: number of the window.
            empty: where memory comes from.

        Returns:
            Each row as ``block << ROW_BITS | row of the block``, ``(rows,)``; where each lane's rows start, and the
            total, ``(lanes + 1,)``.
        """
        block, first, count = self.row_ranges(lanes, window)
        sizes = self._extents(lanes, window)[1]
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        rows = empty(int(edges[-1]))
        if not rows.size:
            return rows, edges
        rows.fill(1)
        begin = (block << ROW_BITS) + first
        begin[1:] -= begin[:-1] + count[:-1] - 1
        rows[np.cumsum(count) - count] = begin
        np.cumsum(rows, out=rows)
        if self.shuffle:
            rows = np.take(rows, self._mixed(lanes, window, sizes, empty), out=empty(rows.size), mode="clip")
        return rows, edges

    def locate(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """The ``(block, row of the block)`` at each position of the epoch."""
        position = np.asarray(positions, dtype=np.int64)
        lane, index = position % self.lanes, position // self.lanes
        block, row = np.empty_like(position), np.empty_like(position)
        keys = lane * (self.rows + 1) + index // self.window
        for key in np.unique(keys):
            in_window = keys == key
            which_lane, which_window = divmod(int(key), self.rows + 1)
            rows = self.window_rows(range(which_lane, which_lane + 1), which_window)[0][index[in_window] % self.window]
            block[in_window], row[in_window] = rows >> ROW_BITS, rows & ROW_MASK
        return block, row

    def positions(self, block: int, row: npt.ArrayLike) -> Ints:
        """The position of each given row of one block: the inverse of ``locate``."""
        position = int(np.flatnonzero(self.sequence == block)[0])
        laid = self._starts[position] + np.asarray(row, dtype=np.int64)
        lane_rows, extra = divmod(self.rows, self.lanes)
        wide = extra * (lane_rows + 1)  # the first `extra` lanes hold one row more
        lane = np.where(laid < wide, laid // (lane_rows + 1), extra + (laid - wide) // max(1, lane_rows))
        inside = laid - (lane * lane_rows + np.minimum(lane, extra))
        result: Ints = np.empty_like(laid)
        keys = lane * (self.rows + 1) + inside // self.window
        for key in np.unique(keys):
            in_window = keys == key
            which_lane, which_window = divmod(int(key), self.rows + 1)
            lanes = range(which_lane, which_lane + 1)
            slot = inside[in_window] % self.window
            if self.shuffle:
                mixed = self._mixed(lanes, which_window, self._extents(lanes, which_window)[1])
                back = np.empty_like(mixed)
                back[mixed] = np.arange(mixed.size)
                slot = back[slot]
            result[in_window] = (which_window * self.window + slot) * self.lanes + which_lane
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How the positions of an epoch are cut into steps, and a step into ranks.

    Attributes:
        rows: rows of the epoch.
        global_batch: rows of one step over all ranks.
        world_size: number of ranks.
        tail: what becomes of the last ``rows % global_batch`` positions. ``"exact"``: a last step of that many rows,
            dealt evenly, so that some ranks may get fewer rows or none; weights make the mean exact. ``"drop"``: they
            are left out (other rows each epoch, since the shuffle is another). ``"pad"``: the last step is the last
            ``global_batch`` positions, so that rows of the step before come again; a set smaller than one global
            batch is repeated.
        count: steps of the epoch, the same on every rank.
    """

    rows: int
    global_batch: int
    world_size: int = 1
    tail: str = "exact"
    count: int = field(init=False)

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise ConfigError(f"tail={self.tail!r} is not one of {', '.join(map(repr, TAILS))}: choose one of these")
        if self.global_batch < 1 or self.world_size < 1:
            raise ConfigError(
                f"a global batch of {self.global_batch} rows on {self.world_size} ranks is no batch: "
                "both must be 1 or more"
            )
        if self.rows < 1:
            raise DataError("the shard set has 0 rows, so there is no step to train: write at least one row")
        if self.tail == "drop" and self.rows < self.global_batch:
            raise DataError(
                f"a global batch of {self.global_batch} rows exceeds the {self.rows} rows of the set, so tail='drop' "
                "leaves 0 steps: lower the batch size, or use tail='exact' or 'pad'"
            )
        full_steps = self.rows // self.global_batch
        object.__setattr__(self, "count", full_steps if self.tail == "drop" else -(-self.rows // self.global_batch))

    def ranges(self, step: int) -> list[tuple[int, int]]:
        """The positions of one step as ``[start, stop)`` ranges: one, unless padding repeats a small set."""
        if not 0 <= step < self.count:
            raise ConfigError(f"step={step} does not lie in 0..{self.count - 1}: an epoch has {self.count} steps")
        start, stop = step * self.global_batch, (step + 1) * self.global_batch
        if stop <= self.rows:
            return [(start, stop)]
        if self.tail == "exact":
            return [(start, self.rows)]
        if step > 0:
            return [(self.rows - self.global_batch, self.rows)]
        times, remainder = divmod(self.global_batch, self.rows)
        return [(0, self.rows)] * times + ([(0, remainder)] if remainder else [])

    def global_rows(self, step: int) -> int:
        """Rows of one step over all ranks."""
        return sum(stop - start for start, stop in self.ranges(step))

    def share(self, step: int, rank: int) -> tuple[int, int]:
        """The slice ``[low, high)`` of a step's rows that one rank takes; shares differ by at most one row."""
        rows = self.global_rows(step)
        return rank * rows // self.world_size, (rank + 1) * rows // self.world_size


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of lane rows in the order in which a rank trains on them.

    Attributes:
        step: of each run, ``(runs,)``.
        lane: of each run.
        start: first row of each run, counted in its lane.
        count: rows of each run.
        lanes: the lanes that are touched, ascending, ``(lanes touched,)``.
        low: first row touched of each of these lanes.
        high: row behind the last one touched.
    """

    step: Ints
    lane: Ints
    start: Ints
    count: Ints
    lanes: Ints
    low: Ints
    high: Ints


def _cuts(steps: Steps, rank: int, first: int, last: int) -> Ints:
    """What a rank takes of the position ranges of some steps: step, start, size, low, high, ``(5, ranges)``."""
    batch, size = steps.global_batch, steps.world_size
    full_steps = np.arange(first, max(first, min(last, steps.rows // batch)), dtype=np.int64)
    same = np.ones_like(full_steps)
    full = (
        full_steps,
        full_steps * batch,
        same * batch,
        same * (rank * batch // size),
        same * ((rank + 1) * batch // size),
    )
    tail_ranges: list[tuple[int, int, int, int, int]] = []
    for step in range(first + full_steps.size, last):
        low, high = steps.share(step, rank)
        rows_before = 0
        for start, stop in steps.ranges(step):
            length = stop - start
            tail_ranges.append(
                (step, start, length, min(max(low - rows_before, 0), length), min(max(high - rows_before, 0), length))
            )
            rows_before += length
    return np.concatenate([np.stack(full), np.array(tail_ranges, dtype=np.int64).reshape(-1, 5).T], axis=1)


def segments(steps: Steps, lanes: int, rank: int, first: int, last: int) -> Segments:
    """What one rank reads for the steps ``[first, last)``: runs of consecutive rows of lanes, in training order."""
    step_of, start_of, size_of, low_of, high_of = _cuts(steps, rank, first, last)[:, :, None]
    lane = np.arange(lanes, dtype=np.int64)[None, :]
    rows = size_of // lanes + ((lane - start_of) % lanes < size_of % lanes)  # rows of the range that lie in each lane
    stop_in_range = np.cumsum(rows, axis=1)
    start_in_range = stop_in_range - rows
    low = np.maximum(low_of, start_in_range)
    count = np.minimum(high_of, stop_in_range) - low
    start = (start_of + lanes - 1 - lane) // lanes + (low - start_in_range)
    has_rows = count > 0
    touched = np.flatnonzero(has_rows.any(axis=0))
    return Segments(
        np.broadcast_to(step_of, has_rows.shape)[has_rows],
        np.broadcast_to(lane, has_rows.shape)[has_rows],
        start[has_rows],
        count[has_rows],
        touched,
        np.where(has_rows, start, steps.rows).min(axis=0, initial=steps.rows)[touched],
        np.where(has_rows, start + count, 0).max(axis=0, initial=0)[touched],
    )
