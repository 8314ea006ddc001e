"""TorchEstimator: fits a PyTorch model to a DataFrame, shards or a table version on the ranks of a Spark cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator.checks import check_frame
from sparkdl.estimator.data import Prepared
from sparkdl.estimator.fit import Fit
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.params.params import CheckedParams, callers_names, declare, set_defaults, value_of
from sparkdl.estimator.params.spec import SPECS
from sparkdl.estimator.saving.persistence import EstimatorReader, EstimatorWriter
from sparkdl.estimator.store import open_store
from sparkdl.estimator.tuning import GridFits
from sparkdl.shards.manifest import Manifest, Source

if TYPE_CHECKING:
    from sparkdl.tables.table import Table

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
            SchemaError: a column is missing or of a type that cannot be used, or ``dataset`` is not Spark's.
            DataError: the rows do not fit the model, the loss or the number of ranks.
            ConfigError: parameters do not fit each other or the model.
            RankFailedError: a rank failed more often than max_failures allows.
            SparkdlError: what a rank refused, as what it is: a ``NonFiniteLossError``, an ``IntegrityError``.
        """
        check_frame("fit", dataset)
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Iterator[tuple[int, TorchModel]]:
        """Fit one model a param map; maps that differ in training alone share their shards. Thread-safe."""
        return GridFits(dataset, [self.copy(dict(overrides)) for overrides in paramMaps])

    def fit_on_parquet(self, params: ParamMap | None = None, dataset_idx: int | None = None) -> TorchModel:
        """Fit to the Parquet files at the store's ``get_train_data_path()``, validating on ``get_val_data_path()``.

        Raises:
            ConfigError: no store is set, or both a validation parameter and validation files are there.
            StorageError: the training files do not exist.
        """
        estimator = self.copy(dict(params)) if params else self
        spark = _session()
        store_or_path = estimator.getOrDefault("store")
        if store_or_path is None:
            raise ConfigError("fit_on_parquet reads from a store, and none is set: set store, or use fit(df)")
        store = open_store(store_or_path, shared_disk=True)
        training_rows = store.parquet("train_path", dataset_idx)
        if not training_rows.exists():
            raise StorageError(f"there is nothing at {training_rows.uri}: write Parquet files there, or use fit(df)")
        frame = spark.read.parquet(training_rows.spark_uri)
        held_out = store.parquet("val_path", dataset_idx)
        if not held_out.exists():
            return estimator._fit(frame)
        if value_of(estimator, "validation") is not None:
            raise ConfigError(f"validation is set, and {held_out.uri} holds validation rows: drop one of the two")
        validation_rows = spark.read.parquet(held_out.spark_uri)
        return estimator._fitted(spark, lambda fit: fit.write(frame, validation_rows))

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
        held_out = Manifest.load(validation_uri) if validation_uri else None
        return estimator._fitted(_session(), lambda fit: fit.take(Manifest.load(train_uri), held_out))

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
        from sparkdl.tables.table import Table

        estimator = self.copy(dict(params)) if params else self
        spark = _session()
        opened = Table(table) if isinstance(table, str) else table
        pinned = opened.version() if version is None else version
        source = Source(uri=opened.uri, version=str(pinned), table_id=opened.table_id())
        rows = opened.read(spark, pinned)
        return estimator._fitted(spark, lambda fit: fit.write(rows, source=source))

    def _fit(self, dataset: DataFrame) -> TorchModel:
        return self._fitted(dataset.sparkSession, lambda fit: fit.write(dataset))

    def _fitted(self, spark: SparkSession, shards: Callable[[Fit], Prepared]) -> TorchModel:
        with callers_names(), Fit(self, spark) as fit:
            return fit.train(shards(fit))

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
