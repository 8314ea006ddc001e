"""The steps of a pipeline, in order. A step is one file of this room and one line here.

Enters: a run. Leaves: tables, shards, models, predictions, and a receipt for each thing made. Read
``state/evaluator.py`` first, which says what a step is and when it is stale.
"""

from __future__ import annotations

from sparkdl.errors import ConfigError
from sparkdl.pipeline.file.problems import choices
from sparkdl.pipeline.state.evaluator import Step
from sparkdl.pipeline.steps.drift import DriftStep
from sparkdl.pipeline.steps.evaluate import EvaluateStep
from sparkdl.pipeline.steps.features import FeaturesStep
from sparkdl.pipeline.steps.ingest import IngestStep
from sparkdl.pipeline.steps.live import LiveStep
from sparkdl.pipeline.steps.publish import PublishStep
from sparkdl.pipeline.steps.score import ScoreStep
from sparkdl.pipeline.steps.shards import ShardsStep
from sparkdl.pipeline.steps.train import TrainStep
from sparkdl.pipeline.steps.trial import TrialStep

STEPS: tuple[Step, ...] = (
    IngestStep(),
    LiveStep(),
    DriftStep(),
    FeaturesStep(),
    ShardsStep(),
    TrialStep(),
    TrainStep(),
    EvaluateStep(),
    PublishStep(),
    ScoreStep(),
)


def steps_asked_for(until: str | None = None, *, train: bool = True) -> tuple[Step, ...]:
    """The steps that a run is asked for, in order.

    Args:
        until: the last of them; None takes all.
        train: whether to learn; else rows are ingested, and the champion predicts.

    Raises:
        ConfigError: there is no such step, or it is one of learning, and ``train`` is False.
    """
    names = [step.name for step in STEPS if step.listed]
    if until is not None and until not in names:
        raise ConfigError(f"until={until} is no step: {choices(until, names)}")
    last = next((step for step in STEPS if step.name == until), STEPS[-1])
    if last.learns and not train:
        raise ConfigError(f"until={until} is a step of learning, and this run learns nothing: give one of both")
    return tuple(step for step in STEPS[: STEPS.index(last) + 1] if train or not step.learns)
