"""The rows of its lanes that a rank takes for some steps, and their places in the batch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sparkdl.batches.order.plan import Segments, Steps, segments

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which rows of its lanes some steps take, and where they go.

    Attributes:
        lanes: that are touched, ascending.
        low: first row of each, ``(lanes touched,)``.
        high: row behind the last of each.
        places: where each row, in training order, lies among the rows of the lanes laid end to end.
        sizes: rows of each step.
        turn: rows of every lane that lie before the steps.
    """

    lanes: list[int]
    low: Ints
    high: Ints
    places: Ints
    sizes: list[int]
    turn: int

    @classmethod
    def of(cls, part: Segments, steps: range, turn: int) -> Pattern:
        """The pattern of the runs of ``steps``."""
        sizes = part.high - part.low
        shift = np.cumsum(sizes) - sizes - part.low
        runs = part.start + shift[np.searchsorted(part.lanes, part.lane)] - np.cumsum(part.count) + part.count
        places: Ints = np.repeat(runs, part.count)
        places += np.arange(places.size)
        rows = np.bincount(part.step - steps.start, weights=part.count, minlength=len(steps)).astype(np.int64)
        return cls(part.lanes.tolist(), part.low, part.high, places, rows.tolist(), turn)

    def moved(self, turn: int) -> Pattern:
        """The same rows, further along their lanes."""
        by = turn - self.turn
        return replace(self, low=self.low + by, high=self.high + by, turn=turn)


class Patterns:
    """The patterns of one rank.

    Steps of equal size that begin at the same lane take the same rows but for how far the lanes are along, in every
    epoch: a pattern is worked out once, then moved on.

    Args:
        steps: the cut of an epoch.
        lanes: that every step draws from.
        rank: the one that reads.
        keep_rows: rows of the patterns that are kept; those not used for longest are forgotten first.
    """

    def __init__(self, steps: Steps, lanes: int, rank: int, keep_rows: int) -> None:
        self.steps = steps
        self._lanes, self._rank, self._keep_rows = lanes, rank, keep_rows
        self._kept: OrderedDict[tuple[int, int], Pattern] = OrderedDict()
        self._kept_rows = 0

    def of(self, steps: range) -> Pattern:
        """What the rank takes for ``steps``."""
        batch = self.steps.global_batch
        turn, lane = divmod(steps.start * batch, self._lanes)
        if steps.stop * batch > self.steps.rows:  # the tail is of its own kind
            return Pattern.of(segments(self.steps, self._lanes, self._rank, steps.start, steps.stop), steps, turn)
        key = (len(steps), lane)
        pattern = self._kept.get(key)
        if pattern is not None:
            self._kept.move_to_end(key)
            return pattern.moved(turn)
        pattern = Pattern.of(segments(self.steps, self._lanes, self._rank, steps.start, steps.stop), steps, turn)
        if pattern.places.size <= self._keep_rows:
            self._kept[key] = pattern
            self._kept_rows += pattern.places.size
            while self._kept_rows > self._keep_rows:
                self._kept_rows -= self._kept.popitem(last=False)[1].places.size
        return pattern
