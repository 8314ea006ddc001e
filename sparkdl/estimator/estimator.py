"""TorchEstimator: fits a PyTorch model to a DataFrame on the ranks of a Spark cluster.

Enters: a DataFrame, or shards, or a table version. Leaves: a ``TorchModel``. Parameter names are those of Horovod's
TorchEstimator and Spark ML's column parameters; ``PARAMETERS.md`` beside this file explains each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator import settings
from sparkdl.estimator.data import Prepared, data_key, prepare, prepare_existing
from sparkdl.estimator.fit import slots_of, train, user_parts
from sparkdl.estimator.model import TorchModel, model_of
from sparkdl.estimator.params import CheckedParams, check_conflicts, declare, set_defaults, value_of
from sparkdl.estimator.persistence import EstimatorReader, EstimatorWriter
from sparkdl.estimator.probe import floating_dtype
from sparkdl.estimator.shipping import Parcel, pack
from sparkdl.estimator.spec import SPECS
from sparkdl.estimator.store import Store, open_store
from sparkdl.observe import logger
from sparkdl.shards.manifest import Manifest, Source

if TYPE_CHECKING:
    from sparkdl.lakehouse.tables import Table

__all__ = ["TorchEstimator"]

ParamMap = Mapping[Param[Any], Any]


@declare(SPECS)
class TorchEstimator(CheckedParams, Estimator[TorchModel], MLReadable["TorchEstimator"], MLWritable):
    """A Spark ML estimator for PyTorch models.

    Model, optimizer, loss and callbacks travel to the ranks in one piece, so an optimizer stays bound to its model's
    parameters; the objects that were given are never changed.

    Raises:
        ConfigError: an unknown parameter, a value that it does not take, or two names for one thing.

    Example:
        >>> estimator = TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.MSELoss(),
        ...                            feature_cols=["x1", "x2"], label_cols=["y"], num_proc=2, epochs=3)
        >>> estimator.fit(df).transform(df)
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        set_defaults(self)
        self.setParams(**params)

    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """Fit to the rows of a DataFrame.

        Args:
            dataset: the rows; read once for training, and once for validation rows.
            params: a param map that overrides this estimator's values, or a list of them, which gives a list of models.

        Raises:
            SchemaError: a column is missing or of a type that cannot be used.
            DataError: the rows do not fit the model, the loss or the number of ranks.
            ConfigError: parameters do not fit each other or the model.
            RankFailedError: a rank failed more often than max_failures allows.
        """
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Iterator[tuple[int, TorchModel]]:
        """Fit one model a param map; maps that differ in training alone share their shards. Thread-safe."""
        return _Fits(dataset, [self.copy(dict(overrides)) for overrides in paramMaps])

    def fit_on_parquet(self, params: ParamMap | None = None, dataset_idx: int | None = None) -> TorchModel:
        """Fit to the Parquet files at the store's ``get_train_data_path()``, validating on ``get_val_data_path()``.

        Raises:
            ConfigError: no store is set, or both a validation parameter and validation files are there.
            StorageError: the training files do not exist.
        """
        estimator = self.copy(dict(params)) if params else self
        spark = _session()
        given = estimator.getOrDefault("store")
        if given is None:
            raise ConfigError("fit_on_parquet reads from a store, and none is set: set store, or use fit(df)")
        store = open_store(given, shared_disk=True)
        frame = spark.read.parquet(store.get_train_data_path(dataset_idx))
        held_out = store.get_val_data_path(dataset_idx)
        if not store.exists(held_out):
            return estimator._fit(frame)
        if value_of(estimator, "validation") is not None:
            raise ConfigError(f"validation is set, and {held_out} holds validation rows: drop one of the two")
        fit = _Fit(estimator, spark)
        with fit:
            training = fit.prepare(frame)
            fit.keep(prepare(estimator, spark.read.parquet(held_out), fit.store, **fit.sizes))
            training.validation = fit.kept[-1].train
            return fit.train(training)

    def fit_on_shards(
        self, train_uri: str, validation_uri: str | None = None, params: ParamMap | None = None
    ) -> TorchModel:
        """Fit to shard sets that exist, as ``write_shards`` makes them.

        Args:
            train_uri: the set to train on.
            validation_uri: the set to validate on; None skips validation.
            params: a param map that overrides this estimator's values.

        Raises:
            StorageError: there is no committed set.
            SchemaError: it lacks a column.
        """
        estimator = self.copy(dict(params)) if params else self
        fit = _Fit(estimator, _session())
        with fit:
            held_out = Manifest.load(validation_uri) if validation_uri else None
            manifest = Manifest.load(train_uri)
            return fit.train(prepare_existing(estimator, manifest, held_out, fit.store, fit.sizes["float_dtype"]))

    def fit_on_table(
        self, table: str | Table, version: int | None = None, params: ParamMap | None = None
    ) -> TorchModel:
        """Fit to one version of a Delta table; with a store, the next fit on it finds its shards written.

        Args:
            table: its path or URI.
            version: None takes the newest, which is then pinned for this fit.
            params: a param map that overrides this estimator's values.

        Raises:
            StorageError: there is no such table or version.
        """
        from sparkdl.lakehouse.tables import Table

        estimator = self.copy(dict(params)) if params else self
        spark = _session()
        opened = Table(table) if isinstance(table, str) else table
        pinned = opened.version() if version is None else version
        return _Fit(estimator, spark).run(opened.read(spark, pinned), Source(uri=opened.uri, version=str(pinned)))

    def _fit(self, dataset: DataFrame) -> TorchModel:
        return _Fit(self, dataset.sparkSession).run(dataset)

    def write(self) -> MLWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchEstimator]:
        """Return a reader: ``read().load(path)``."""
        return EstimatorReader(cls)

    def getOptimizer(self) -> Any:
        """Return the optimizer as it was given, bound to the parameters of ``getModel()``."""
        return self.getOrDefault("optimizer")


def _session() -> SparkSession:
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


class _Fit:
    """One fit: opens the store, keeps account of what was written, and cleans up."""

    def __init__(self, estimator: TorchEstimator, spark: SparkSession) -> None:
        check_conflicts(estimator)
        self.estimator, self.spark = estimator, spark
        self.parcel: Parcel = pack(user_parts(estimator))
        self.num_proc = settings.ranks_wanted(estimator) or slots_of(spark)
        settings.launch_settings(estimator)
        master = str(spark.conf.get("spark.master", ""))
        self.store: Store = open_store(estimator.getOrDefault("store"), shared_disk=master.startswith("local"))
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

    def __enter__(self) -> _Fit:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for prepared in self.kept:
                prepared.discard()
            self.store.close()
        except StorageError as error:  # the fit is done, or has an error of its own that matters more
            logger.warning("intermediate shards were not removed: %s", error)


@dataclass
class _Shared:
    """Shards of several fits, written by the first and deleted after the last."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    prepared: Prepared | None = None
    left: int = 0
    close: Callable[[], None] | None = None


class _Fits(Iterator[tuple[int, TorchModel]]):
    """Fits of one frame, each started by whoever asks for the next; several threads may ask at once."""

    def __init__(self, frame: DataFrame, estimators: Sequence[TorchEstimator]) -> None:
        self._frame, self._estimators = frame, estimators
        self._lock = threading.Lock()
        self._next = 0
        self._shared: dict[Any, _Shared] = {}
        for estimator in estimators:
            self._shared.setdefault(self._key(estimator), _Shared()).left += 1

    def __next__(self) -> tuple[int, TorchModel]:
        with self._lock:
            index = self._next
            if index >= len(self._estimators):
                raise StopIteration
            self._next += 1
        return index, self._fit(self._estimators[index])

    def _key(self, estimator: TorchEstimator) -> Any:
        model = estimator.getOrDefault("model")
        dtype = floating_dtype(model) if isinstance(model, torch.nn.Module) else "float32"
        ranks = settings.ranks_wanted(estimator) or 0
        return (*data_key(estimator, ranks), dtype, repr(estimator.getOrDefault("store")))

    def _fit(self, estimator: TorchEstimator) -> TorchModel:
        shared = self._shared[self._key(estimator)]
        try:
            fit = _Fit(estimator, self._frame.sparkSession)
            with shared.lock:
                if shared.prepared is None:
                    shared.prepared = fit.prepare(self._frame)
                    shared.close = fit.__exit__
                else:
                    fit.store.close()
            return fit.train(shared.prepared)
        finally:
            with shared.lock:
                shared.left -= 1
                if shared.left == 0 and shared.close is not None:
                    shared.close()
