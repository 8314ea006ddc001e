"""The step ``publish``: the challenger to the registry, and who predicts from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import ConflictError, FencedError
from sparkdl.pipeline.judging.gate import Decision
from sparkdl.pipeline.state.evaluator import StepState
from sparkdl.pipeline.state.receipts import content_key
from sparkdl.pipeline.state.results import Published, Trained
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.evaluate import EvaluateStep, judged_against, publish_inputs
from sparkdl.pipeline.steps.learning import LearningStep
from sparkdl.pipeline.steps.score import check_predictions
from sparkdl.pipeline.steps.train import TrainStep
from sparkdl.pipeline.trials import chosen_settings
from sparkdl.pipeline.windows import Parts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class PublishStep(LearningStep):
    """One version of the newest training in the registry, promoted where the verdict says so.

    The champion does not decide it: a challenger is judged once, and does not come back by itself after a rollback. Nor
    does MLflow, which is told of what was decided.
    """

    name = "publish"
    result = Published
    cause = "publish differs, or the registry has lost the model"

    def key(self, run: Run, parts: Parts) -> str:
        """What decides the publication."""
        return content_key("publish", publish_inputs(run, parts))

    def is_there(self, run: Run, result: Published) -> bool:
        """Whether the registry that it went to still knows the model."""
        return run.places.published(run.registry, str(run.spec.publish.name))

    def planned_after(self, earlier: str) -> tuple[StepState, str]:
        """The verdict on the new model is not known."""
        return "open", "evaluate decides"

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> Published:
        """Publish the model, and promote it if the verdict says so."""
        from sparkdl.interchange.mlflow import mirror_published

        publish, evaluated = run.spec.publish, EvaluateStep().kept(run, parts)
        if evaluated is None:
            raise ConflictError(f"another run moved {publish.alias} of {publish.name} meanwhile: run again")
        decision, trained = evaluated.decision, TrainStep().kept(run, parts)
        if decision.promote:
            check_predictions(run, spark, trained.bundle)
        published = _published(run, parts, decision, trained)
        if publish.mlflow is not None:  # with the alias where it points now
            version = run.registry.get(str(publish.name), published.version)
            mirror_published(run.registry, version, publish.mlflow)
        return published

    def tell_result(self, run: Run, parts: Parts) -> None:
        """What became of the challenger."""
        published = self.kept(run, parts)
        run.record.model |= {
            "name": run.spec.publish.name,
            "version": published.version,
            "promoted": published.reason,
        }


def _published(run: Run, parts: Parts, decision: Decision, trained: Trained) -> Published:
    """Publish the model of the newest training, and promote it if the verdict says so."""
    from sparkdl.estimator.publishing import publish_bundle

    name, alias, champion = str(run.spec.publish.name), run.spec.publish.alias, run.champion()
    against = judged_against(run, publish_inputs(run, parts))
    metrics, metric = dict(decision.challenger.values), decision.gate.metric
    if decision.baseline is not None and metric in decision.baseline.values:
        metrics[f"baseline_{metric}"] = decision.baseline.values[metric]
    run.check_lease()  # before files are copied that nobody would need
    version = publish_bundle(
        run.registry,
        name,
        trained.bundle,
        trained.origin,
        metrics=metrics,
        parameters=chosen_settings(run.project.file.resolved(), trained.settings),
        publication=TrainStep().key(run, parts),
    ).version
    current_version = champion.version if champion is not None else None
    reason, promoted = decision.reason, decision.promote
    if current_version == version:
        promoted = True
        if not decision.promote:
            reason = f"it is the champion already, and would not be promoted: {reason}"
    elif promoted:
        try:
            run.registry.set_alias(name, alias, version, expected=current_version, reason=reason)
        except FencedError:
            raise
        except ConflictError as error:
            raise ConflictError(f"another run moved {alias} of {name} meanwhile: run again") from error
    return Published(version=version, promoted=promoted, reason=reason, against=against)
