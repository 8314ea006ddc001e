"""The step ``shards``: the training and the validation rows, cut into the shards that a training reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.pipeline.state.receipts import content_key
from sparkdl.pipeline.state.results import Shards
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.features import VERSION, features_of, fitted_key
from sparkdl.pipeline.steps.learning import LearningStep, part_rows
from sparkdl.pipeline.windows import Part, Parts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.pipeline.work.prepare import Prepared


class ShardsStep(LearningStep):
    """Two shard sets of what the training and validation rows become under the fitted features."""

    name = "shards"
    result = Shards
    part = "validate"
    cause = "windows, weight or seed differ"

    def key(self, run: Run, parts: Parts) -> str:
        """What decides both sets."""
        train = run.spec.train
        inputs = {
            "version": VERSION,
            "fitted": fitted_key(run, parts),
            "split": run.project.settings["split"],
            "weight": run.spec.weight,
            "seed": train.random_seed,
            "spread": train.spreads,
            **({"partitions": [train.partitions_per_process, train.num_proc]} if train.partitions_per_process else {}),
            "rows": {"train": part_rows(run, parts.train), "validate": part_rows(run, parts.validate)},
        }
        return content_key("shards", inputs)

    def is_there(self, run: Run, result: Shards) -> bool:
        """Whether both sets lie where they were left."""
        return run.places.shards(result)

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> Shards:
        """Cut them."""
        from sparkdl.pipeline.work.prepare import cut_shards

        features, labels, _ = features_of(run, parts)
        windows: dict[Part, tuple[str, ...]] = {"train": parts.train, "validate": parts.validate}
        return cut_shards(run.project, run.clean_to_divide(spark), windows, features, labels, key, run.check_lease)

    def tell_result(self, run: Run, parts: Parts) -> None:
        """How many rows train and validate."""
        shards = self.kept(run, parts)
        run.record.rows |= {"train": shards.train_rows, "validate": shards.validate_rows}
        run.record.unlabelled |= {"train": shards.train_unlabelled, "validate": shards.validate_unlabelled}


def prepared_of(run: Run, parts: Parts, spark: SparkSession) -> Prepared:
    """What a training needs: features, labels, shards."""
    from sparkdl.pipeline.work.prepare import Prepared

    step = ShardsStep()
    features, labels, start = features_of(run, parts)
    columns = set(features.columns)
    types = {field.name: field.dataType.simpleString() for field in run.clean(spark).schema if field.name in columns}
    return Prepared(
        features=features,
        labels=labels,
        shards=step.kept(run, parts),
        start=start,
        key=step.key(run, parts),
        types=types,
    )
