"""The step ``shards``: the training and the validation rows, cut into the shards that a training reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.estimator.side_by_side import run_side_by_side
from sparkdl.pipeline.rows.parts import rows_of
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Shards
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.steps.features import VERSION, features_of, fitted_key
from sparkdl.pipeline.steps.learning import (
    key_to_learn,
    part_rows,
    parts_to_learn,
    unless_labels_are_missing,
    windows_and_key,
)
from sparkdl.pipeline.windows import Part, Parts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.pipeline.work.prepare import Prepared
    from sparkdl.shards.manifest import Manifest


class ShardsStep(Step):
    """Two shard sets of what the training and validation rows become under the fitted features."""

    name = "shards"
    learns = True
    reads = ("features",)
    cause = "windows, weight or seed differ"

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The one key of both sets."""
        return key_to_learn(run, shards_key)

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether both sets lie where they were left."""
        shards = run.state.receipts.result(self.name, receipt.key, Shards)
        return shards is not None and run.state.places.shards(shards)

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Cut them."""
        from sparkdl.pipeline.session import start_torch_daemon
        from sparkdl.pipeline.work.prepare import cut_shards

        parts, key = windows_and_key(run, stale)
        start_torch_daemon(spark)  # a training follows
        project, state = run.project, run.state
        spec, clean, check_lease = project.spec, state.clean(spark), state.check_lease
        features, labels, _ = features_of(project, state, parts)

        def cut(part: Part) -> tuple[Manifest, int]:
            rows = rows_of(clean, spec, part, parts.windows(part))
            return cut_shards(project, rows, features, labels, part, key, check_lease)

        with unless_labels_are_missing(project, state, parts):
            cuts = [functools.partial(cut, "train"), functools.partial(cut, "validate")]
            (train, train_unlabelled), (validate, validate_unlabelled) = run_side_by_side(cuts, spark, len(cuts))
            shards = Shards(
                train=train.uri,
                validate=validate.uri,
                train_rows=train.rows,
                validate_rows=validate.rows,
                train_unlabelled=train_unlabelled,
                validate_unlabelled=validate_unlabelled,
            )
            state.receipts.keep(self.name, key, shards)
        return True

    def tell(self, run: Run) -> None:
        """How many rows train and validate."""
        parts, _ = parts_to_learn(run)
        if parts is not None:
            shards = run.state.receipts.result(self.name, str(shards_key(run.project, run.state, parts)), Shards)
            assert shards is not None
            run.record.rows |= {"train": shards.train_rows, "validate": shards.validate_rows}
            unlabelled = {"train": shards.train_unlabelled, "validate": shards.validate_unlabelled}
            run.record.unlabelled |= unlabelled


def shards_key(project: Project, state: State, parts: Parts) -> str | None:
    """What decides the shard sets."""
    fitted, train = fitted_key(project, state, parts), project.spec.train
    rows = {part: part_rows(state, parts.windows(part)) for part in ("train", "validate")}
    if fitted is None or None in rows.values():
        return None
    repartitioned = [train.partitions_per_process, train.num_proc]
    inputs: dict[str, Any] = {
        "version": VERSION,
        "fitted": fitted,
        "split": project.settings["split"],
        "weight": project.spec.weight,
        "seed": train.random_seed,
        "spread": train.spreads,
        **({"partitions": repartitioned} if train.partitions_per_process else {}),
        "rows": rows,
    }
    return content_key("shards", inputs)


def prepared_of(project: Project, state: State, parts: Parts, spark: SparkSession) -> Prepared:
    """What a training needs: features, labels, shards."""
    from sparkdl.pipeline.work.prepare import Prepared

    key = str(shards_key(project, state, parts))
    shards = state.receipts.result("shards", key, Shards)
    assert shards is not None
    features, labels, start = features_of(project, state, parts)
    columns = set(features.columns)
    schema = state.clean(spark).schema
    types = {field.name: field.dataType.simpleString() for field in schema if field.name in columns}
    return Prepared(features=features, labels=labels, shards=shards, start=start, key=key, types=types)
