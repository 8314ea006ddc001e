"""Spark's CrossValidator, which can be saved and loaded with a TorchEstimator in it.

Enters: what Spark's own class takes. Leaves: Spark's ``CrossValidatorModel``. The search itself is Spark's:
``parallelism`` fits of a fold run side by side, read the same shards (``TorchEstimator.fitMultiple``) and share the
cluster's slots. Spark's own class and its ``TrainValidationSplit`` fit in the same way.
"""

from __future__ import annotations

import json
from typing import cast

from pyspark.ml import tuning
from pyspark.ml.util import DefaultParamsReader, MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError
from sparkdl.estimator.fit.checks import check_frame
from sparkdl.estimator.saving.persistence import StageWriter
from sparkdl.storage import Storage

__all__ = ["CrossValidator"]


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
        for param, value in (pair for one in self._instance.getEstimatorParamMaps() for pair in one.items()):
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
