"""The fits of a grid: those that differ in training alone share their shards.

Enters: a frame, and one estimator a fit. Leaves: fitted models, as many at a time as threads ask for; shards are gone
once nobody needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from sparkdl.estimator.fit.data import Prepared, sharing_key
from sparkdl.estimator.fit.fit import Fit, Trained
from sparkdl.estimator.params.callers_names import callers_names
from sparkdl.estimator.params.params import CheckedParams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["GridFits"]

E = TypeVar("E", bound=CheckedParams)
M = TypeVar("M")


class _Shared:
    """Shards of several fits, written by the first that needs them and deleted after the last."""

    def __init__(self) -> None:
        self.to_come = 0  # fits that will still want them
        self._running = 0
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._owner: Fit | None = None

    def prepared(self, fit: Fit, frame: DataFrame) -> Prepared:
        """The shards; ``fit`` writes them if nobody has."""
        with self._lock:
            self.to_come, self._running = self.to_come - 1, self._running + 1
            if self._prepared is not None:
                fit.store.close()
                return self._prepared
            self._owner = fit
            self._prepared = fit.write(frame)
            return self._prepared

    def leave(self) -> None:
        """One fit is done."""
        with self._lock:
            self._running -= 1
        self.close(self.to_come)

    def close(self, to_come: int = 0) -> None:
        """Expect so many fits more; without any, and with none at work, delete the shards."""
        with self._lock:
            self.to_come = to_come
            if self.to_come <= 0 and self._running == 0 and self._owner is not None:
                self._owner.close()
                self._owner = self._prepared = None


class GridFits(Iterator[tuple[int, M]], Generic[E, M]):
    """Fits of one frame, each started by whoever asks for the next; several threads may ask at once.

    Args:
        frame: the rows.
        estimators: one a fit; those that differ in training alone share their shards.
        model_of: makes the fitted model.
    """

    def __init__(
        self, frame: DataFrame, estimators: Sequence[E], model_of: Callable[[E, Prepared, Trained], M]
    ) -> None:
        self._frame, self._estimators, self._model_of = frame, estimators, model_of
        self._lock = threading.Lock()
        self._next = 0
        self._keys = [sharing_key(estimator) for estimator in estimators]
        self._shared = {key: _Shared() for key in self._keys}
        for key in self._keys:
            self._shared[key].to_come += 1

    def __next__(self) -> tuple[int, M]:
        with self._lock:
            index = self._next
            if index >= len(self._estimators):
                raise StopIteration
            self._next += 1
        try:
            with callers_names():
                return index, self._fitted(self._estimators[index], self._shared[self._keys[index]])
        except BaseException:
            self.close()  # a search ends with its first error
            raise

    def _fitted(self, estimator: E, shared: _Shared) -> M:
        fit = Fit(estimator, self._frame.sparkSession)
        try:
            prepared = shared.prepared(fit, self._frame)
            return self._model_of(estimator, prepared, fit.train(prepared))
        finally:
            shared.leave()

    def close(self) -> None:
        """Delete the shards of fits that nobody will ask for; idempotent."""
        for shared in self._shared.values():
            shared.close()
