"""Choose a setting by measuring: a few candidates during the first steps, on the real model, data and network.

Enters: the end of each training step. Leaves: the fastest setting, applied on every rank. Training goes on all the
while: what is tuned changes how gradients travel, not what they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sparkdl import observe

__all__ = ["Tuner", "bucket_candidates"]

MARGIN = 0.97
"""A candidate must take at most this part of the present setting's time, lest noise decide."""

ASK_EVERY_STEPS = 100


class _Ranks(Protocol):
    def all_gather_object(self, value: list[float]) -> list[list[float]]: ...


class Tuner:
    """Measures one setting; every rank calls ``step`` after every step, and all of them come to the same choice.

    Args:
        group: the ranks to agree with.
        what: the setting's name and unit, for the log.
        candidates: values to try, the present one first.
        apply: sets a value; called on all ranks after the same step.
        rest_steps: steps to let pass before the first measurement.
        rest_seconds: seconds to let pass on top, for settings whose change takes time.
        steps: steps to measure each candidate for, after one that does not count.
        clock: returns seconds.

    Attributes:
        what: the setting's name and unit.
        chosen: the value that holds once this is done; before, the first candidate.
        done: whether there is nothing left to measure.
    """

    def __init__(
        self,
        group: _Ranks,
        what: str,
        candidates: Sequence[float],
        apply: Callable[[float], None],
        *,
        rest_steps: int = 10,
        rest_seconds: float = 0.0,
        steps: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group = group
        self.what = what
        self._candidates = list(candidates)
        self._apply = apply
        self._rest = rest_steps
        self._steps = steps
        self._clock = clock
        self._rest_seconds = rest_seconds
        self._begun = clock()
        self._rested = 0
        self._last: float | None = None
        self._times: list[list[float]] = []
        self.done = len(self._candidates) < 2
        self.chosen = self._candidates[0]
        self.seconds_per_step = 0.0

    def step(self) -> None:
        """Count one step; at the end of the last measurement, agree with the other ranks and apply the best."""
        if self.done:
            return
        now = self._clock()
        last, self._last = self._last, now
        if self._is_resting(now):
            return
        if not self._times:
            self._times.append([])  # the present setting needs no change before it is measured
        if last is not None:
            self._times[-1].append(now - last)
        if len(self._times[-1]) <= self._steps:
            return
        if len(self._times) < len(self._candidates):
            self._apply(self._candidates[len(self._times)])
            self._times.append([])
            self._last = self._clock()
        else:
            self._decide()

    def choose(self, value: float) -> None:
        """Take ``value``, which an earlier part of the run measured to be the best; every rank calls it alike."""
        if value != self.chosen:
            self._apply(value)
        self.chosen, self.done = value, True

    def _is_resting(self, now: float) -> bool:
        if self._times:
            return False
        self._rested += 1
        if self._rested <= self._rest:
            return True
        if not self._rest_seconds:
            return False
        # Clocks differ, and all ranks must wake in the same step: ask the others, seldom.
        if self._rested % ASK_EVERY_STEPS:
            return True
        waited = max(column[0] for column in self._group.all_gather_object([now - self._begun]))
        return waited < self._rest_seconds

    def _decide(self) -> None:
        self.done = True
        mine = [statistics.median(times[1:]) for times in self._times]
        # Every rank computes the same means of the same numbers, so every rank chooses the same candidate.
        means = [statistics.fmean(column) for column in zip(*self._group.all_gather_object(mine), strict=True)]
        best = min(range(len(means)), key=means.__getitem__)
        if means[best] > MARGIN * means[0]:
            best = 0
        self.seconds_per_step = means[best]
        self.chosen = self._candidates[best]
        if best != len(means) - 1:
            self._apply(self._candidates[best])
        measured = {f"{value:g}": round(1e3 * mean, 3) for value, mean in zip(self._candidates, means, strict=True)}
        observe.emit("tuned", setting=self.what, chosen=self.chosen, step_ms=measured)
        observe.logger.info(
            "%s: %g of %s",
            self.what,
            self.chosen,
            ", ".join(f"{v} ({ms} ms)" for v, ms in measured.items()),
        )


def bucket_candidates(total_mib: float, present_mib: float) -> list[float]:
    """Bucket sizes worth a try for ``total_mib`` of gradients, MiB; the present one first.

    Sizes that lead to the same one bucket are one candidate.
    """
    sizes = [size for size in (1.0, 4.0, 16.0, 64.0) if size < total_mib] + [max(1.0, total_mib)]
    present = min(present_mib, sizes[-1])
    return [present] + [size for size in sizes if size != present]
