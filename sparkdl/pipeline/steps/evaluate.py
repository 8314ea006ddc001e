"""The step ``evaluate``: challenger and champion on the same held-out rows, and what is decided of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.estimator.side_by_side import run_side_by_side
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.rows.parts import unseen_rows
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Boosted, Evaluated, Published
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.drift import trained_of
from sparkdl.pipeline.steps.learning import LearningStep, part_rows, parts_to_learn
from sparkdl.pipeline.steps.shards import prepared_of
from sparkdl.pipeline.steps.train import TrainStep
from sparkdl.pipeline.windows import Parts
from sparkdl.pipeline.work.labels import labelled

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.pipeline.work.prepare import Prepared

VERSION = 2
"""The version of how a model is judged and published; raise it when that changes."""


class EvaluateStep(LearningStep):
    """One verdict on the newest training, against the champion of the time."""

    name = "evaluate"
    loads_torch = True
    result = Evaluated

    def key(self, run: Run, parts: Parts) -> str:
        """What decides the verdict: the publication, the report, and the version that the model is compared with."""
        inputs = publish_inputs(run, parts)
        boosted = {"baseline": "off"} if run.spec.train.baseline == "off" else {}
        report, against = run.project.settings["report"], judged_against(run, inputs)
        return content_key("evaluate", {**inputs, "report": report, "against": against, **boosted})

    def why(self, run: Run, partition: str, receipt: Receipt | None) -> str:
        """What differs."""
        parts, _ = parts_to_learn(run)
        tested = parts is not None and parts.test
        return "publish, report or the test windows differ" if tested else "publish or report differ"

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> Evaluated:
        """Measure both models on the same held-out rows, and decide."""
        from sparkdl.pipeline.work.boosting import TreeColumns, boosted, tree_columns, tree_rows
        from sparkdl.pipeline.work.evaluate import Judged, evaluate, judged, judged_label, with_last_values
        from sparkdl.pipeline.work.file_rows import part_files, part_frame

        spec, clean, prepared = run.spec, run.clean_to_divide(spark), prepared_of(run, parts, spark)
        trusted, trained = run.project.trusted, TrainStep().kept(run, parts)
        against = judged_against(run, publish_inputs(run, parts))
        versions = run.registry.list(str(spec.publish.name))
        rival = next((version for version in versions if version.version == against), None)  # or it was removed since
        rows, count, seen_reason = _judging(run, clean, parts, prepared, rival)
        training = labelled(part_frame(run.project, clean, {"train": parts.train}), prepared.labels.names)
        judging, label = with_last_values(rows, training, spec, prepared.labels), judged_label(spec, prepared.labels)

        columns = None if spec.train.baseline == "off" else tree_columns(prepared.features, label)

        def judge(raw: Sequence[str] = (), most_raw: int = 0) -> tuple[Judged, Evaluated]:
            champion = None if seen_reason else rival
            predicted = judged(judging, spec, prepared.labels, trained, champion, trusted, count, raw, most_raw)
            return predicted, evaluate(predicted, spec, trained, count, seen_reason)

        def rows_for_trees(columns: TreeColumns) -> list[pa.Table] | Boosted:
            stopping = None  # where they are the rows that judge, which are read anyway
            if parts.judging != "validate" or count != prepared.shards.validate_rows:
                stopping = part_frame(run.project, clean, {"validate": parts.validate})
                stopping = labelled(stopping, prepared.labels.names)
            files = part_files(run.project, "train", parts.train, spark)
            return tree_rows(training, stopping, spec, prepared, label, columns, files)

        evaluated: Evaluated
        if isinstance(columns, TreeColumns):
            raw, most_raw = columns.features.columns, columns.most_rows
            passes: list[Callable[[], Any]] = [lambda: judge(raw, most_raw), lambda: rows_for_trees(columns)]
            (predicted, evaluated), tables = run_side_by_side(passes, spark, len(passes))
            # in this thread, where Ctrl-C ends it
            trees: Boosted | None = boosted(tables, predicted, spec, prepared, columns, count, trained)
        else:
            _, evaluated = judge()
            trees = columns
        return replace(evaluated, part=parts.judging, windows=parts.windows(parts.judging), boosted=trees)

    def tell_result(self, run: Run, parts: Parts) -> None:
        """The verdict."""
        run.record.evaluated = evaluated = self.kept(run, parts)
        decision = evaluated.decision
        if decision.beats_baseline is False or decision.baseline_by_chance:
            logger.warning(
                "%s, and the model %.4g on the same %d rows: it has learned nothing that helps, or its training went "
                "wrong",
                decision.baseline_text(),
                decision.challenger.values[decision.gate.metric],
                decision.rows,
            )


def publish_inputs(run: Run, parts: Parts) -> dict[str, Any]:
    """What decides the publication of the training on these windows."""
    settings = {name: value for name, value in run.project.settings["publish"].items() if name != "mlflow"}
    if run.spec.publish.gate.baseline == "first":  # as keys were before there was a choice: nobody is judged again
        settings["gate"] = {name: value for name, value in settings["gate"].items() if name != "baseline"}
    units = {"units": run.spec.source.key}  # rows of one key are judged as one
    test = {"test": part_rows(run, parts.test)} if parts.test else {}
    return {"version": VERSION, "train": TrainStep().key(run, parts), "publish": settings, **units, **test}


def judged_against(run: Run, publish: Mapping[str, Any]) -> int | None:
    """The version that a publication's model is compared with: the champion when it was first judged, or now.

    A model that is the champion itself is compared with the one that it followed. ``publish`` decides the publication.
    """
    name, alias = str(run.spec.publish.name), run.spec.publish.alias
    earlier = run.receipts.result("publish", content_key("publish", publish), Published)
    if earlier is not None and run.places.published(run.registry, name):
        return earlier.against
    champion = run.champion()
    if champion is None or champion.publication != publish["train"]:
        return run.champion_version()
    # it is this very model: a run ended once the alias had moved, or only the gate was changed since
    moves = [move for move in run.registry.history(name) if move.kind == "aliased" and move.alias == alias]
    followed = [move.previous for move in moves if move.version == champion.version]
    published = {version.version for version in run.registry.list(name)}
    return followed[-1] if followed and followed[-1] in published else None


def _judging(
    run: Run, clean: DataFrame, parts: Parts, prepared: Prepared, rival: ModelVersion | None
) -> tuple[DataFrame, int, str]:
    """The rows that judge, checked as those of shards are, their number, and why they cannot judge the champion.

    Rows that the champion was trained on, as after a training that drift asked for, tell nothing of it.
    """
    from sparkdl.pipeline.work.file_rows import part_frame
    from sparkdl.pipeline.work.shard_rows import shard_rows

    spec, part, record = run.spec, parts.judging, run.record
    windows = parts.windows(part)
    labelled_rows = labelled(part_frame(run.project, clean, {part: windows}), prepared.labels.names)
    count = prepared.shards.validate_rows
    if part == "test":
        counts = shard_rows(run.project, clean, {part: windows}, (), prepared.labels).count()[part]
        record.unlabelled["test"], record.rows["test"] = counts.unlabelled, counts.labelled
        count = counts.labelled
    trained = trained_of(run.receipts, rival)
    unseen = None
    if trained is not None:
        taught = [name for name in windows if name in trained.windows]
        unseen = unseen_rows(labelled_rows, spec, taught, trained.split, trained.columns, trained.labels)
    if rival is None or unseen is None:
        return labelled_rows, count, ""
    judging_rows = labelled_rows.where(unseen)
    if unseen_count := judging_rows.count():
        logger.info("%d of %d rows judge: version %d was trained on the others", unseen_count, count, rival.version)
        return judging_rows, unseen_count, ""
    seen_windows = windows[0] if len(windows) == 1 else f"all of {windows[0]} to {windows[-1]}"
    why = f"version {rival.version} was trained on {seen_windows}: no row judges both, and it stays the champion"
    return labelled_rows, count, why
