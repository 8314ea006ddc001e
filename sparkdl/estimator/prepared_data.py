"""Horovod's ``prepare_data``: a DataFrame becomes the Parquet files that ``fit_on_parquet`` reads.

Enters: a store and a DataFrame. Leaves: the number under which training and validation files lie in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.fit.data import held_out_rows
from sparkdl.estimator.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["prepare_data"]


@contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: str | float | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write training and validation rows into a store, for ``fit_on_parquet(dataset_idx=...)``; they stay there.

    Args:
        num_processes: number of ranks.
        store: where they go: ``get_train_data_path(idx)`` and ``get_val_data_path(idx)``.
        df: the rows, read once for training and once for validation.
        label_columns: at least one.
        feature_columns: None takes all others.
        validation: share of the rows by a hash of the row, or the column that marks them.
        sample_weight_col: is kept, too.
        compress_sparse: only False is taken: Parquet is compressed in any case.
        partitions_per_process: files a rank at most.
        verbose: above 0 says where the files lie.

    Yields:
        The number, which no earlier call on this store has had.

    Raises:
        SchemaError: a column is missing.
        ConfigError: an argument cannot be meant.
    """
    if num_processes < 1 or partitions_per_process < 1:
        raise ConfigError(
            f"num_processes={num_processes}, partitions_per_process={partitions_per_process}: give at least 1 of each"
        )
    if not label_columns:
        raise ConfigError("label_columns names no column: name at least one")
    if compress_sparse:
        raise ConfigError("compress_sparse=True has no effect on Parquet, which is compressed anyway: leave it out")
    others = [name for name in df.columns if name not in (*label_columns, sample_weight_col, validation)]
    columns = [*(others if feature_columns is None else feature_columns), *label_columns]
    columns += [sample_weight_col] if sample_weight_col else []
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise SchemaError(f"the frame has no column {missing[0]!r}, it has {df.columns}: correct the name")
    marks = held_out_rows(df, validation, columns, seed=0)
    idx = 0
    while store.parquet("train_path", idx).exists() or store.parquet("val_path", idx).exists():
        idx += 1
    parts = {"train_path": df} if marks is None else {"train_path": df.filter(~marks), "val_path": df.filter(marks)}
    for name, rows in parts.items():
        place = store.parquet(name, idx)  # type: ignore[arg-type]
        rows.select(*columns).coalesce(num_processes * partitions_per_process).write.parquet(place.spark_uri)
        if verbose:
            print(f"{name.removesuffix('_path')} rows lie in {place.spark_uri}", flush=True)
    yield idx
