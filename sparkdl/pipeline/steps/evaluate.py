"""The steps ``evaluate`` and ``publish``: challenger and champion on the same rows, and who of them predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConflictError, FencedError
from sparkdl.estimator.side_by_side import run_side_by_side
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.rows.parts import rows_of, unseen_rows
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Boosted, Evaluated, Published
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.steps.drift import trained_of
from sparkdl.pipeline.steps.learning import (
    key_to_learn,
    part_rows,
    parts_to_learn,
    unless_labels_are_missing,
    windows_and_key,
)
from sparkdl.pipeline.steps.score import check_predictions
from sparkdl.pipeline.steps.shards import prepared_of
from sparkdl.pipeline.steps.train import train_key, trained_now
from sparkdl.pipeline.trials import chosen_settings
from sparkdl.pipeline.windows import Parts
from sparkdl.pipeline.work.labels import check_labels, check_weight, labelled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.pipeline.work.prepare import Prepared

VERSION = 2
"""The version of how a model is judged and published; raise it when that changes."""


class EvaluateStep(Step):
    """One verdict on the newest training, against the champion of the time."""

    name = "evaluate"
    learns = True
    reads = ("features", "shards", "train")

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The one key of the verdict."""
        return key_to_learn(run, _evaluate_key)

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether it can be read."""
        return run.state.receipts.result(self.name, receipt.key, Evaluated) is not None

    def why(self, run: Run, partition: str, receipt: Receipt | None) -> str:
        """What differs."""
        parts, _ = parts_to_learn(run)
        tested = parts is not None and parts.test
        return "publish, report or the test windows differ" if tested else "publish or report differ"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Measure both models on the same held-out rows, and decide."""
        from sparkdl.pipeline.session import torch_for_workers
        from sparkdl.pipeline.work.boosting import TreeRows, boosted, tree_rows
        from sparkdl.pipeline.work.evaluate import evaluate, judged_label, with_last_values

        project, state = run.project, run.state
        parts, key = windows_and_key(run, stale)
        torch_for_workers(spark)
        spec, clean, prepared = project.spec, state.clean(spark), prepared_of(project, state, parts, spark)
        against = judged_against(project, state, publish_inputs(project, state, parts) or {})
        versions = state.registry.list(str(spec.publish.name))
        rival = next((version for version in versions if version.version == against), None)  # or it was removed since
        with unless_labels_are_missing(project, state, parts):
            rows, count, seen_reason = _judging(run, clean, parts, prepared, rival)
            training = labelled(rows_of(clean, spec, "train", parts.train), prepared.labels.names)
            judging = with_last_values(rows, training, spec, prepared.labels)
            trained = trained_now(project, state, parts)

            def judge() -> Evaluated:
                return evaluate(judging, spec, prepared.labels, trained, rival, project.trusted, count, seen_reason)

            def rows_for_trees() -> TreeRows | Boosted | None:
                if spec.train.baseline == "off":
                    return None
                stopping = labelled(rows_of(clean, spec, "validate", parts.validate), prepared.labels.names)
                return tree_rows(training, stopping, rows, spec, prepared, label, count, trained, project.trusted)

            label = judged_label(spec, prepared.labels)
            passes: list[Callable[[], Any]] = [judge, rows_for_trees]
            evaluated, trees = run_side_by_side(passes, spark, len(passes))
            if isinstance(trees, TreeRows):  # in this thread, where Ctrl-C ends it
                trees = boosted(trees, spec, prepared, label, count, trained)
            windows = parts.windows(parts.judging)
            evaluated = replace(evaluated, part=parts.judging, windows=windows, boosted=trees)
            state.receipts.keep(self.name, key, evaluated)
        return True

    def tell(self, run: Run) -> None:
        """The verdict."""
        parts, _ = parts_to_learn(run)
        if parts is not None:
            run.record.evaluated = evaluated = _evaluated(run.project, run.state, parts)
            decision = evaluated.decision
            if decision.beats_baseline is False or decision.baseline_by_chance:
                logger.warning(
                    "%s, and the model %.4g on the same %d rows: it has learned nothing that helps, or its training "
                    "went wrong",
                    decision.baseline_text(),
                    decision.challenger.values[decision.gate.metric],
                    decision.rows,
                )


class PublishStep(Step):
    """One version of the newest training in the registry, promoted where the verdict says so.

    The champion does not decide it: a challenger is judged once, and does not come back by itself after a rollback. Nor
    does MLflow, which is told of what was decided.
    """

    name = "publish"
    learns = True
    reads = ("features", "shards", "train", "evaluate")
    cause = "publish differs, or the registry has lost the model"

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The one key of the publication."""
        return key_to_learn(run, _publish_key)

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether the registry that it went to still knows the model."""
        state = run.state
        registered = state.places.published(state.registry, str(run.project.spec.publish.name))
        return registered and state.receipts.result(self.name, receipt.key, Published) is not None

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Publish the model, and promote it if the verdict says so."""
        from sparkdl.interchange.mlflow import mirror_published

        project, state = run.project, run.state
        parts, key = windows_and_key(run, stale)
        spec, champion = project.spec.publish, state.champion()
        if state.receipts.of("evaluate").get(str(_evaluate_key(project, state, parts))) is None:
            raise ConflictError(f"another run moved {spec.alias} of {spec.name} meanwhile: run again")
        if _evaluated(project, state, parts).decision.promote:
            check_predictions(run, spark, trained_now(project, state, parts).bundle)
        published = _published(project, state, parts, champion)
        if spec.mlflow is not None:  # with the alias where it points now
            version = state.registry.get(str(spec.name), published.version)
            mirror_published(state.registry, version, spec.mlflow)
        state.receipts.keep(self.name, key, published)
        return True

    def tell(self, run: Run) -> None:
        """What became of the challenger."""
        parts, _ = parts_to_learn(run)
        if parts is not None:
            published = published_now(run)
            assert published is not None
            run.record.model |= {
                "name": run.project.spec.publish.name,
                "version": published.version,
                "promoted": published.reason,
            }


def published_now(run: Run) -> Published | None:
    """What became of the newest training; None where there is none."""
    parts, _ = parts_to_learn(run)
    key = None if parts is None else _publish_key(run.project, run.state, parts)
    return None if key is None else run.state.receipts.result("publish", key, Published)


def publish_inputs(project: Project, state: State, parts: Parts) -> dict[str, Any] | None:
    """What decides the publication of the training on these windows; None where one is not ingested yet."""
    train, tested = train_key(project, state, parts), part_rows(state, parts.test)
    if train is None or tested is None:
        return None
    settings = {name: value for name, value in project.settings["publish"].items() if name != "mlflow"}
    if project.spec.publish.gate.baseline == "first":  # as keys were before there was a choice: nobody is judged again
        settings["gate"] = {name: value for name, value in settings["gate"].items() if name != "baseline"}
    units = {"units": project.spec.source.key}  # rows of one key are judged as one
    test = {"test": tested} if parts.test else {}
    return {"version": VERSION, "train": train, "publish": settings, **units, **test}


def _publish_key(project: Project, state: State, parts: Parts) -> str | None:
    inputs = publish_inputs(project, state, parts)
    return None if inputs is None else content_key("publish", inputs)


def _evaluate_key(project: Project, state: State, parts: Parts) -> str | None:
    """What decides the verdict: the publication, the report, and the version that the model is compared with."""
    inputs = publish_inputs(project, state, parts)
    if inputs is None:
        return None
    against = judged_against(project, state, inputs)
    boosted = {"baseline": "off"} if project.spec.train.baseline == "off" else {}
    return content_key("evaluate", {**inputs, "report": project.settings["report"], "against": against, **boosted})


def judged_against(project: Project, state: State, publish: Mapping[str, Any]) -> int | None:
    """The version that a publication's model is compared with: the champion when it was first judged, or now.

    A model that is the champion itself is compared with the one that it followed.

    Args:
        project: the pipeline.
        state: what there is of it.
        publish: what decides the publication.
    """
    name, alias = str(project.spec.publish.name), project.spec.publish.alias
    earlier = state.receipts.result("publish", content_key("publish", publish), Published)
    if earlier is not None and state.places.published(state.registry, name):
        return earlier.against
    champion = state.champion()
    if champion is None or champion.publication != publish["train"]:
        return champion.version if champion is not None else None
    # it is this very model: a run ended once the alias had moved, or only the gate was changed since
    moves = [move for move in state.registry.history(name) if move.kind == "aliased" and move.alias == alias]
    followed = [move.previous for move in moves if move.version == champion.version]
    published = {version.version for version in state.registry.list(name)}
    return followed[-1] if followed and followed[-1] in published else None


def _evaluated(project: Project, state: State, parts: Parts) -> Evaluated:
    evaluated = state.receipts.result("evaluate", str(_evaluate_key(project, state, parts)), Evaluated)
    assert evaluated is not None
    return evaluated


def _judging(
    run: Run, clean: DataFrame, parts: Parts, prepared: Prepared, rival: ModelVersion | None
) -> tuple[DataFrame, int, str]:
    """The rows that judge, checked as those of shards are, their number, and why they cannot judge the champion.

    Rows that the champion was trained on, as after a training that drift asked for, tell nothing of it.
    """
    spec, part, record = run.project.spec, parts.judging, run.record
    windows = parts.windows(part)
    rows = rows_of(clean, spec, part, windows)
    labelled_rows, count = labelled(rows, prepared.labels.names), prepared.shards.validate_rows
    if part == "test":
        record.unlabelled["test"] = check_labels(rows, prepared.labels, "test")
        if spec.weight is not None:
            check_weight(labelled_rows, spec.weight, "test")
        record.rows["test"] = count = labelled_rows.count()
    trained = trained_of(run.state.receipts, rival)
    taught = [name for name in windows if trained is not None and name in trained.windows]
    unseen = None
    if trained is not None:
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


def _published(project: Project, state: State, parts: Parts, champion: ModelVersion | None) -> Published:
    """Publish the model of the newest training, and promote it if the verdict says so."""
    from sparkdl.estimator.publishing import publish_bundle

    name, alias = str(project.spec.publish.name), project.spec.publish.alias
    evaluated, trained = _evaluated(project, state, parts), trained_now(project, state, parts)
    decision, against = evaluated.decision, judged_against(project, state, publish_inputs(project, state, parts) or {})
    metrics, metric = dict(decision.challenger.values), decision.gate.metric
    if decision.baseline is not None and metric in decision.baseline.values:
        metrics[f"baseline_{metric}"] = decision.baseline.values[metric]
    state.check_lease()  # before files are copied that nobody would need
    version = publish_bundle(
        state.registry,
        name,
        trained.bundle,
        trained.origin,
        metrics=metrics,
        parameters=chosen_settings(project.file.resolved(), trained.settings),
        publication=str(train_key(project, state, parts)),
    ).version
    current_version = champion.version if champion is not None else None
    if current_version == version:
        already = "it is the champion already, and would not be promoted: "
        reason = decision.reason if decision.promote else f"{already}{decision.reason}"
        return Published(version=version, promoted=True, reason=reason, against=against)
    if not decision.promote:
        return Published(version=version, promoted=False, reason=decision.reason, against=against)
    try:
        state.registry.set_alias(name, alias, version, expected=current_version, reason=decision.reason)
    except FencedError:
        raise
    except ConflictError as error:
        raise ConflictError(f"another run moved {alias} of {name} meanwhile: run again") from error
    return Published(version=version, promoted=True, reason=decision.reason, against=against)
