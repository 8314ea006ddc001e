"""Tables scored by their own log, into another table in one commit: ``sparkdl.score_table``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.columns.names import check_listed
from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.transform import predictor_of
from sparkdl.models.folder import BundleInfo
from sparkdl.scoring import score_table as workers
from sparkdl.scoring.models import WithFeatures
from sparkdl.scoring.score import Predictor
from sparkdl.scoring.score_table import TableScore
from sparkdl.tables.engine import AppTransaction, spark_session
from sparkdl.tables.scan.plan import Where
from sparkdl.tables.table import Mode, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def score_table(
    table: str | Table,
    model: TorchModel | Predictor | BundleInfo | WithFeatures | str,
    target: str | Table,
    *,
    version: int | None = None,
    where: Where = (),
    keep: Sequence[str] | None = None,
    config: ScoreConfig | None = None,
    mode: Mode = "append",
    partition_by: Sequence[str] = (),
    partitions: Sequence[Mapping[str, Any]] | None = None,
    transaction: AppTransaction | None = None,
    overwrite_schema: bool = False,
    compression: str = "snappy",
) -> TableScore:
    """Score a Delta table into another one; workers read, score and write its files, and no row enters the JVM.

    The driver plans from the table's log: files whose partition or statistics exclude ``where`` are not opened. What
    the reader does not know (and tables that only a catalog knows) Spark reads instead, with the same predictions.

    Args:
        table: its address, or its name in a catalog.
        model: a fitted or loaded model (``sparkdl.load_model("churn@champion", registry=...)``), the folder of a
            bundle, or a ``Predictor``, which says more of either.
        target: the table that gets ``keep`` and the predictions; its commit names ``table`` and the version that was
            read: ``sparkdl.source``, ``sparkdl.sourceVersion``, ``sparkdl.model``.
        version: of ``table``; None takes the newest, which is pinned when this is called.
        where: conditions, all of which a row must meet: ``[("day", ">=", "2026-03-01"), ("country", "in", ["DE"])]``;
            also ``=``, ``!=``, ``<``, ``<=``, ``>``, ``not in``, ``("note", "is", None)`` and ``"is not"``.
        keep: columns of ``table`` in the result; all by default. Fewer cost less.
        config: rows of a batch, which bound a task's memory, nulls, device, threads; by default the model's own.
        mode: ``"append"``; ``"overwrite"`` replaces all rows of ``target``, ``"replace"`` whole partitions.
        partition_by: partition columns of a ``target`` that this call creates.
        partitions: with ``mode="replace"``, those to replace; None means those that the rows fall into.
        transaction: the identity of this piece of work: if it has committed before, nothing happens.
        overwrite_schema: with ``mode="overwrite"``, let the rows change the columns of ``target``.
        compression: Parquet codec: ``"snappy"``, ``"zstd"``, ``"lz4"`` or ``"none"``.

    Returns:
        the version that was read, how many files, and the commit.

    Raises:
        ConfigError: there is no Spark session, or settings contradict each other.
        SchemaError: a column is missing, or of a type that the model or the target does not take.
        DataError: nulls where the model takes none.
        BundleError: there is no bundle, or it cannot be rebuilt here.
        StorageError: a table cannot be read or written, or has features that nobody here reads.

    Example:
        >>> model = sparkdl.load_model("churn@champion", registry="s3://models")
        >>> sparkdl.score_table("s3://lake/customers", model, "s3://lake/churn", keep=["id"], mode="overwrite")
    """
    check_listed("keep", keep)
    spark = spark_session()
    if spark is None:
        raise ConfigError("score_table needs a Spark session, whose workers score: start one before")

    def predictor(rows: DataFrame) -> Predictor:
        """How the model is asked for the columns of ``rows``."""
        if isinstance(model, Predictor):
            return model if config is None else replace(model, config=config)
        if isinstance(model, TorchModel):
            return predictor_of(*model._asked(rows), config)
        return Predictor(model=model, config=config or ScoreConfig())

    source, goal = (
        table_or_uri if isinstance(table_or_uri, Table) else Table(table_or_uri) for table_or_uri in (table, target)
    )
    write = {
        "mode": mode,
        "partition_by": partition_by,
        "partitions": partitions,
        "transaction": transaction,
        "overwrite_schema": overwrite_schema,
        "compression": compression,
    }
    return workers.score_table(spark, source, predictor, goal, version=version, where=where, keep=keep, write=write)
