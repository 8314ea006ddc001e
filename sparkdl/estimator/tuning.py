"""Several fits of one frame: Spark's CrossValidator, and fits that differ in training alone and share their shards."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

from pyspark.ml import tuning
from pyspark.ml.util import DefaultParamsReader, MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError
from sparkdl.estimator.checks import check_frame
from sparkdl.estimator.data import Prepared
from sparkdl.estimator.fit import Fit
from sparkdl.estimator.fit_spec import sharing_key
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.params.params import CheckedParams, callers_names
from sparkdl.estimator.saving.persistence import StageWriter
from sparkdl.storage import Storage


class CrossValidator(tuning.CrossValidator):
    """Spark's ``CrossValidator``; parameters, metrics and the fitted model are Spark's own. Any estimator will do.

    Raises:
        ConfigError: estimator, estimatorParamMaps or evaluator is not set.

    Example:
        >>> search = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=accuracy, parallelism=4)
        >>> search.fit(df).bestModel
    """

    def _fit(self, dataset: DataFrame) -> tuning.CrossValidatorModel:
        check_frame("fit", dataset)
        for name in ("estimator", "estimatorParamMaps", "evaluator"):
            if not self.isDefined(name):
                raise ConfigError(f"CrossValidator has no {name}: set it before fit")
        return super()._fit(dataset)

    def write(self) -> MLWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return _SearchWriter(self)

    @classmethod
    def read(cls) -> tuning.CrossValidatorReader:
        """Return a reader: ``read().load(path)``."""
        return _SearchReader(cls)


class _SearchWriter(StageWriter):
    """Writes a search as Spark does, beside what is there already."""

    def __init__(self, instance: CrossValidator) -> None:
        super().__init__()
        self._instance = instance

    def _check(self) -> None:
        for param, value in (
            pair for param_map in self._instance.getEstimatorParamMaps() for pair in param_map.items()
        ):
            try:
                json.dumps(None if isinstance(value, MLWritable) else value)
            except TypeError as cause:
                raise ConfigError(
                    f"estimatorParamMaps holds {param.name}={value!r}, and Spark writes grids as JSON ({cause}): save "
                    "the estimator and the best model instead"
                ) from cause

    def _write(self, root: Storage) -> None:
        tuning.CrossValidatorWriter(self._instance).session(self.sparkSession).saveImpl(root.spark_uri)


class _SearchReader(tuning.CrossValidatorReader):
    """Reads a search as Spark does; Spark itself takes a class outside of pyspark.ml for one that the JVM has saved."""

    def load(self, path: str) -> CrossValidator:
        """Read it from below ``path``."""
        path = Storage.of(path).spark_uri
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        _, estimator, evaluator, maps = tuning._ValidatorSharedReadWrite.load(
            path, self.sparkSession, {**metadata, "class": "pyspark.ml.tuning.CrossValidator"}
        )
        search = cast(CrossValidator, self.cls(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator))
        search._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(search, metadata, skipParams=["estimatorParamMaps"])
        return search


class SharedShards:
    """Shards of several fits, written by the first that needs them and deleted after the last.

    Args:
        key: of all that decides what lies in them but the transformation.
        transformation: of the rows; the very same function for all these fits.
    """

    def __init__(self, key: tuple[Any, ...], transformation: Any) -> None:
        self.key, self.transformation = key, transformation
        self.fits_to_come = 0
        self._running = 0
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._owner: Fit | None = None

    def prepared(self, fit: Fit, frame: DataFrame) -> Prepared:
        """The shards; ``fit`` writes them if nobody has."""
        with self._lock:
            self.fits_to_come, self._running = self.fits_to_come - 1, self._running + 1
            if self._prepared is None:
                self._prepared = fit.write(frame)
                self._owner = fit
            return self._prepared

    def leave(self, fit: Fit) -> None:
        """One fit is done; what it has written stays as long as others need it."""
        with self._lock:
            self._running -= 1
            if fit is not self._owner:
                fit.close()
            self._delete_unneeded()

    def close(self) -> None:
        """Expect no further fit; with none at work, delete the shards."""
        with self._lock:
            self.fits_to_come = 0
            self._delete_unneeded()

    def _delete_unneeded(self) -> None:
        if self.fits_to_come <= 0 and self._running == 0 and self._owner is not None:
            self._owner.close()
            self._owner = self._prepared = None


class GridFits(Iterator[tuple[int, TorchModel]]):
    """Fits of one frame, each started by whoever asks for the next; several threads may ask at once.

    Args:
        frame: the rows.
        estimators: one a fit; those that differ in training alone share their shards.
    """

    def __init__(self, frame: DataFrame, estimators: Sequence[CheckedParams]) -> None:
        self._frame = frame
        self._lock = threading.Lock()
        self._next = 0
        self._shared: list[SharedShards] = []
        self._fits: list[tuple[CheckedParams, SharedShards]] = []
        for estimator in estimators:
            key, transformation = sharing_key(estimator), estimator.getOrDefault("transformation_fn")
            alike = (shared for shared in self._shared if shared.key == key and shared.transformation is transformation)
            shards = next(alike, None)
            if shards is None:
                shards = SharedShards(key, transformation)
                self._shared.append(shards)
            shards.fits_to_come += 1
            self._fits.append((estimator, shards))

    def __next__(self) -> tuple[int, TorchModel]:
        with self._lock:
            index = self._next
            if index >= len(self._fits):
                raise StopIteration
            self._next += 1
        try:
            with callers_names():
                return index, self._fitted(*self._fits[index])
        except BaseException:
            self.close()  # a search ends with its first error
            raise

    def _fitted(self, estimator: CheckedParams, shards: SharedShards) -> TorchModel:
        fit = Fit(estimator, self._frame.sparkSession)
        try:
            return fit.train(shards.prepared(fit, self._frame))
        finally:
            shards.leave(fit)

    def close(self) -> None:
        """Delete the shards of fits that nobody will ask for; idempotent."""
        for shards in self._shared:
            shards.close()
