"""One fit, and the fits of a grid: who writes shards, who shares them, who cleans up.

Enters: estimators with their parameters, and a frame. Leaves: fitted models; shards are gone once nobody needs them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.documents.payload import Parcel
from sparkdl.errors import StorageError
from sparkdl.estimator.fit import settings
from sparkdl.estimator.fit.data import Prepared, data_key, prepare
from sparkdl.estimator.fit.fit import slots_of, train, user_parts
from sparkdl.estimator.fit.probe import floating_dtype
from sparkdl.estimator.fit.shipping import pack
from sparkdl.estimator.model import TorchModel, model_of
from sparkdl.estimator.params.params import CheckedParams, check_conflicts
from sparkdl.estimator.store import Store, open_store
from sparkdl.launch.driver import barrier
from sparkdl.observe import logger
from sparkdl.shards.manifest import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Fit", "GridFits"]


class Fit:
    """One fit: opens the store, keeps account of what was written, and cleans up."""

    def __init__(self, estimator: CheckedParams, spark: SparkSession) -> None:
        check_conflicts(estimator)
        self.estimator, self.spark = estimator, spark
        self.parcel: Parcel = pack(user_parts(estimator))
        self.num_proc = settings.ranks_wanted(estimator) or slots_of(spark)
        launch = settings.launch_settings(estimator)
        barrier.check(spark, self.num_proc, launch["config"])
        master = str(spark.conf.get("spark.master", ""))
        self.store: Store = open_store(estimator.getOrDefault("store"), shared_disk=master.startswith("local"))
        settings.check_used(estimator, self.store)
        self.kept: list[Prepared] = []

    @property
    def sizes(self) -> dict[str, Any]:
        """What writing shards depends on besides the parameters."""
        model = self.estimator.getOrDefault("model")
        dtype = floating_dtype(model) if isinstance(model, torch.nn.Module) else "float32"
        return {"num_proc": self.num_proc, "float_dtype": dtype}

    def prepare(self, frame: DataFrame, source: Source | None = None) -> Prepared:
        """Write the shards of ``frame``."""
        return self.keep(prepare(self.estimator, frame, self.store, source=source, **self.sizes))

    def keep(self, prepared: Prepared) -> Prepared:
        """Remember to clean up."""
        self.kept.append(prepared)
        return prepared

    def train(self, prepared: Prepared) -> TorchModel:
        """Train on shards; return the fitted model."""
        trained = train(self.estimator, prepared, self.parcel, self.spark)
        return model_of(self.estimator, prepared, trained)

    def run(self, frame: DataFrame, source: Source | None = None) -> TorchModel:
        """Do all of it."""
        with self:
            return self.train(self.prepare(frame, source))

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete what was written, as the store's policy says; idempotent."""
        try:
            for prepared in self.kept:
                prepared.discard()
            self.store.close()
        except StorageError as error:  # the fit is done, or has an error of its own that matters more
            logger.warning("intermediate shards were not removed: %s", error)


class _Shared:
    """Shards of several fits, written by the first that needs them and deleted after the last."""

    def __init__(self) -> None:
        self.left = 0  # fits that may still want them
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._owner: Fit | None = None

    def prepared(self, fit: Fit, frame: DataFrame) -> Prepared:
        """The shards; ``fit`` writes them if nobody has."""
        with self._lock:
            if self._prepared is not None:
                fit.store.close()
                return self._prepared
            try:
                self._prepared, self._owner = fit.prepare(frame), fit
            except BaseException:
                fit.close()
                raise
            return self._prepared

    def done(self, *, with_all: bool = False) -> None:
        """One fit less, or none at all any more."""
        with self._lock:
            self.left = 0 if with_all else self.left - 1
            if self.left == 0 and self._owner is not None:
                self._owner.close()
                self._owner = self._prepared = None


class GridFits(Iterator[tuple[int, TorchModel]]):
    """Fits of one frame, each started by whoever asks for the next; several threads may ask at once.

    Args:
        frame: the rows.
        estimators: one a fit; those that differ in training alone share their shards.
    """

    def __init__(self, frame: DataFrame, estimators: Sequence[CheckedParams]) -> None:
        self._frame, self._estimators = frame, estimators
        self._lock = threading.Lock()
        self._next = 0
        self._keys = [_key(estimator) for estimator in estimators]
        self._shared = {key: _Shared() for key in self._keys}
        for key in self._keys:
            self._shared[key].left += 1

    def __next__(self) -> tuple[int, TorchModel]:
        with self._lock:
            index = self._next
            if index >= len(self._estimators):
                raise StopIteration
            self._next += 1
        return index, self.fit(index)

    def fit(self, index: int) -> TorchModel:
        """Make one fit, out of turn."""
        shared = self._shared[self._keys[index]]
        try:
            fit = Fit(self._estimators[index], self._frame.sparkSession)
            return fit.train(shared.prepared(fit, self._frame))
        finally:
            shared.done()

    def write_ahead(self) -> None:
        """Write the shards of the first fit before it is asked for; what goes wrong is said when it is."""
        with contextlib.suppress(Exception):
            self._shared[self._keys[0]].prepared(Fit(self._estimators[0], self._frame.sparkSession), self._frame)

    def close(self) -> None:
        """Delete the shards of fits that nobody will ask for; idempotent."""
        for shared in self._shared.values():
            shared.done(with_all=True)


def _key(estimator: CheckedParams) -> Any:
    """What the shards of an estimator depend on besides the frame."""
    model = estimator.getOrDefault("model")
    dtype = floating_dtype(model) if isinstance(model, torch.nn.Module) else "float32"
    ranks = settings.ranks_wanted(estimator) or 0
    return (*data_key(estimator, ranks), dtype, repr(estimator.getOrDefault("store")))
