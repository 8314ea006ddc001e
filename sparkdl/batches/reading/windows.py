"""Windows of lanes on their way into memory: their blocks are fetched and checked, their rows shuffled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.batches.memory.blocks import Blocks
from sparkdl.batches.order.patterns import Pattern
from sparkdl.batches.order.permutations import Empty
from sparkdl.batches.order.plan import ROW_BITS, ROW_MASK, Order

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Group:
    """One window of each of some neighbouring lanes; ``rows`` is None until its shuffling is submitted."""

    lanes: range
    number: int
    blocks: list[int]
    rows: Future[tuple[Ints, Ints]] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that somebody takes from one window of a lane: ``low`` to ``high``, counted in the window."""

    rows: Future[tuple[Ints, Ints]]
    place: int
    low: int
    high: int

    def take(self) -> Ints:
        """Wait for the rows, ``(high - low,)`` or as many as the window has."""
        rows, edges = self.rows.result()
        return rows[edges[self.place] + self.low : min(edges[self.place] + self.high, edges[self.place + 1])]


class Windows:
    """The windows that one reader has in use.

    The windows of neighbouring lanes are made ready by one task, a *group*: every call into numpy that hands the
    interpreter's lock over costs as much as shuffling a thousand rows, so a few large calls are made, not many small
    ones.

    Args:
        blocks: of the set.
        order: of the epoch.
        group: most lanes whose windows one task shuffles.
        submit: starts a task.
        empty: where memory for row numbers comes from.
    """

    def __init__(
        self,
        blocks: Blocks,
        order: Order,
        group: int,
        submit: Callable[[Callable[[_Group], tuple[Ints, Ints]], _Group], Future[tuple[Ints, Ints]]],
        empty: Empty,
    ) -> None:
        self._blocks, self._order, self._group, self._submit, self._empty = blocks, order, group, submit, empty
        self._groups: dict[tuple[int, int], _Group] = {}

    def parts(self, pattern: Pattern) -> list[Part]:
        """What a pattern takes, lane by lane; the windows are made ready unless they are already."""
        size = self._order.window
        spans = [
            (lane, low, high, range(low // size, (high - 1) // size + 1))
            for lane, low, high in zip(pattern.lanes, pattern.low.tolist(), pattern.high.tolist(), strict=True)
        ]
        for number in sorted({number for *_, numbers in spans for number in numbers}):
            self._prepare(self._of([lane for lane, _, _, numbers in spans if number in numbers], number))
        parts = []
        for lane, low, high, numbers in spans:
            for number in numbers:
                group, start = self._groups[lane, number], number * size
                assert group.rows is not None  # prepared above
                parts.append(Part(group.rows, lane - group.lanes.start, max(low - start, 0), min(high - start, size)))
        return parts

    def look_ahead(self, pattern: Pattern) -> None:
        """Fetch the window after the current one of each lane, and shuffle it before it is needed, group by group."""
        size = self._order.window
        lasts = [(lane, high - 1) for lane, high in zip(pattern.lanes, pattern.high.tolist(), strict=True)]
        for current in {last // size for _, last in lasts}:
            window_lanes = [(lane, last) for lane, last in lasts if last // size == current]
            groups = self._of(
                [lane for lane, _ in window_lanes if current + 1 < self._order.windows(lane)], current + 1
            )
            read = min(last for _, last in window_lanes) % size
            self._prepare(groups[: read * (len(groups) + 2) // size])

    def retire(self, position: int) -> None:
        """Give back the windows that lie before ``position`` of the epoch."""
        lanes, size = self._order.lanes, self._order.window
        retired_keys = []
        for key, group in self._groups.items():
            if (group.number + 1) * size <= (position + lanes - group.lanes.stop) // lanes:
                retired_keys.append(key)
                if key[0] == group.lanes.start:
                    self._blocks.release(group.blocks)
        for key in retired_keys:
            del self._groups[key]

    def close(self) -> None:
        """Give every window back."""
        for (lane, _), group in self._groups.items():
            if lane == group.lanes.start:
                self._blocks.release(group.blocks)
        self._groups.clear()

    def _of(self, lanes: Sequence[int], number: int) -> list[_Group]:
        """The groups that hold window ``number`` of these lanes; where one is new, its blocks are asked for."""
        for run in self._runs([lane for lane in lanes if (lane, number) not in self._groups]):
            group = _Group(run, number, self._order.row_ranges(run, number)[0].tolist())
            self._blocks.request(group.blocks)
            for lane in run:
                self._groups[lane, number] = group
        return list({id(group): group for group in (self._groups[lane, number] for lane in lanes)}.values())

    def _runs(self, lanes: Sequence[int]) -> Iterable[range]:
        """Neighbouring lanes, at most a group of them."""
        start = 0
        for stop in range(1, len(lanes) + 1):
            if stop == len(lanes) or lanes[stop] != lanes[stop - 1] + 1 or stop - start == self._group:
                yield range(lanes[start], lanes[stop - 1] + 1)
                start = stop

    def _prepare(self, groups: Iterable[_Group]) -> None:
        for group in groups:
            if group.rows is None:
                group.rows = self._submit(self._shuffle, group)

    def _shuffle(self, group: _Group) -> tuple[Ints, Ints]:
        """Task: make a group's blocks readable, and its rows known in training order."""
        unique_blocks = dict.fromkeys(group.blocks)
        replaced = {block: stand_in for block in unique_blocks if (stand_in := self._blocks.ready(block)) != block}
        rows, edges = self._order.window_rows(group.lanes, group.number, self._empty)
        for damaged, stand_in in replaced.items():
            is_damaged = rows >> ROW_BITS == damaged
            rows[is_damaged] = stand_in << ROW_BITS | (rows[is_damaged] & ROW_MASK) % self._blocks.rows[stand_in]
        return rows, edges
