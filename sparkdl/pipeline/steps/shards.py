"""The step ``shards``: the training and the validation rows, cut into the shards that a training reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.pipeline.rows.parts import Parts, rows_of
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Shards
from sparkdl.pipeline.steps.features import VERSION, features_of, fitted_key
from sparkdl.pipeline.steps.learning import part_rows, parts_to_learn, unless_labels_are_missing, windows_and_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.pipeline.work.prepare import Prepared

__all__ = ["ShardsStep", "prepared_of", "shards_key"]


class ShardsStep(Step):
    """Two shard sets of what the training and validation rows become under the fitted features."""

    name = "shards"
    learns = True
    reads = ("features",)

    def wanted(self, context: Context) -> Mapping[str, str | None]:
        """The one key of both sets."""
        parts, _ = parts_to_learn(context)
        return {} if parts is None else {str(key := shards_key(context, parts)): key}

    def exists(self, context: Context, receipt: Receipt) -> bool:
        """Whether both sets lie where they were left."""
        shards = context.receipts.result(self.name, receipt.key, Shards)
        return shards is not None and context.places.shards(shards)

    def why(self, context: Context, partition: str, receipt: Receipt | None) -> str:
        """What differs."""
        return "windows, weight or seed differ"

    def make(self, context: Context, spark: SparkSession, stale: Stale) -> bool:
        """Cut them."""
        from sparkdl.pipeline.session import start_torch_daemon
        from sparkdl.pipeline.work.prepare import cut_shards

        parts, key = windows_and_key(context, stale)
        start_torch_daemon(spark)  # a training follows
        spec, clean = context.spec, context.clean(spark)
        features, labels, _ = features_of(context, parts)
        with unless_labels_are_missing(context, parts):
            rows = rows_of(clean, spec, "train", parts.train)
            train, train_unlabelled = cut_shards(context, rows, features, labels, "train", key)
            rows = rows_of(clean, spec, "validate", parts.validate)
            validate, validate_unlabelled = cut_shards(context, rows, features, labels, "validate", key)
            shards = Shards(
                train=train.uri,
                validate=validate.uri,
                train_rows=train.rows,
                validate_rows=validate.rows,
                train_unlabelled=train_unlabelled,
                validate_unlabelled=validate_unlabelled,
            )
            context.receipts.keep(self.name, key, shards)
        return True

    def tell(self, context: Context) -> None:
        """How many rows train and validate."""
        parts, _ = parts_to_learn(context)
        if parts is not None:
            shards = context.receipts.result(self.name, str(shards_key(context, parts)), Shards)
            assert shards is not None
            context.record.rows |= {"train": shards.train_rows, "validate": shards.validate_rows}
            unlabelled = {"train": shards.train_unlabelled, "validate": shards.validate_unlabelled}
            context.record.unlabelled |= unlabelled


def shards_key(context: Context, parts: Parts) -> str | None:
    """What decides the shard sets."""
    fitted, train = fitted_key(context, parts), context.spec.train
    rows = {part: part_rows(context, parts.windows(part)) for part in ("train", "validate")}
    if fitted is None or None in rows.values():
        return None
    repartitioned = [train.partitions_per_process, train.num_proc]
    inputs: dict[str, Any] = {
        "version": VERSION,
        "fitted": fitted,
        "split": context.settings["split"],
        "weight": context.spec.weight,
        "seed": train.random_seed,
        "spread": train.spreads,
        **({"partitions": repartitioned} if train.partitions_per_process else {}),
        "rows": rows,
    }
    return content_key("shards", inputs)


def prepared_of(context: Context, parts: Parts, spark: SparkSession) -> Prepared:
    """What a training needs: features, labels, shards."""
    from sparkdl.pipeline.work.prepare import Prepared

    key = str(shards_key(context, parts))
    shards = context.receipts.result("shards", key, Shards)
    assert shards is not None
    features, labels, start = features_of(context, parts)
    columns = set(features.columns)
    schema = context.clean(spark).schema
    types = {field.name: field.dataType.simpleString() for field in schema if field.name in columns}
    return Prepared(features=features, labels=labels, start=start, key=key, types=types, **vars(shards))
