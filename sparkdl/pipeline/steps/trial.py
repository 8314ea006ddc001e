"""The step ``trial``: the trainings of a search, of which the step ``train`` takes the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.receipts import Receipt, StepNote
from sparkdl.pipeline.state.results import Trained, Tried
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.learning import parts_to_learn
from sparkdl.pipeline.steps.shards import ShardsStep, prepared_of
from sparkdl.pipeline.steps.train import TrainStep, trials_by_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TrialStep(Step):
    """The trials of a search, each once for its settings."""

    name = "trial"
    learns = True
    loads_torch = True
    listed = False
    notes_itself = True

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """A key by trial; none without a search, or where its best is known."""
        parts, _ = parts_to_learn(run)
        if parts is None or run.spec.search is None:
            return {}
        best: Trained | None = TrainStep().kept(run, parts)
        if best is not None and run.places.bundle(best.bundle):
            return {}
        return {key: key for key in trials_by_key(run.project, ShardsStep().key(run, parts))}

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether its bundle is there, unless it failed."""
        tried = run.receipts.result(self.name, receipt.key, Tried)
        return tried is not None and (tried.trained is None or run.places.bundle(tried.trained.bundle))

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Train the trials that are not trained yet."""
        from sparkdl.pipeline.work.search import TrialSearch

        parts, _ = parts_to_learn(run)
        assert parts is not None
        prepared = prepared_of(run, parts, spark)
        TrialSearch(run, spark, prepared, trials_by_key(run.project, prepared.key)).train(stale.keys)
        return True

    def tell(self, run: Run) -> None:
        """Which trials of the search earlier runs have made."""
        noted = {note.key for note in run.record.steps if note.name == self.name}
        kept_keys = [key for key in self.wanted(run) if key not in noted]
        run.record.steps += [StepNote(name=self.name, key=key, kept=True, seconds=0.0) for key in kept_keys]
