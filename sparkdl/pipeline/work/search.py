"""Search: several settings on the same shards, of which the best on the validation rows becomes the challenger."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.estimator.elastic import is_of_settings
from sparkdl.estimator.side_by_side import room_for_fits, run_side_by_side
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.observe import emit, logger
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.results import Trained, Trial, Tried
from sparkdl.pipeline.trials import chosen_by, compared_by, metrics_of_trials, with_settings
from sparkdl.pipeline.work.prepare import Prepared
from sparkdl.pipeline.work.training import checkpoints_of, network_of, train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["best_of", "train_trials"]

Keep = Callable[[str, Tried, float], None]


def train_trials(
    spark: SparkSession, spec: PipelineSpec, prepared: Prepared, trials: Mapping[str, dict[str, Any]], keep: Keep
) -> None:
    """Train each trial, side by side where there is room.

    The networks of trials that run side by side are all made before the first one trains, since making one draws from
    torch's one generator: so a trial's weights do not depend on what runs beside it.

    Args:
        spark: the session.
        spec: the pipeline.
        prepared: shards, and the features and labels that they were cut with.
        trials: settings by key.
        keep: called with the key of each trial that has ended, what it came to, and its seconds.

    Raises:
        ClusterError: ranks could not be started, or were lost.
        TrainingError: a training went wrong for a reason that another attempt may not meet.
    """
    runs = [_Trial(spark, spec, prepared, settings, key, keep) for key, settings in trials.items()]
    assert spec.search is not None
    width = min(len(runs), room_for_fits(spark, spec.train.num_proc or 1, spec.search.slots))
    if width > 1:
        for trial in runs:
            trial.make()
    run_side_by_side([trial.run for trial in runs], spark, width)


def best_of(spec: PipelineSpec, tried: Sequence[tuple[dict[str, Any], Tried]]) -> Trained:
    """The training of the best trial, with what all of them came to.

    The best has the greatest or the least value of the metric, as that is better; of equal ones it is the first.

    Raises:
        ConfigError: every trial failed.
    """
    column = chosen_by(spec)
    trials = tuple(_trial(settings, done, column) for settings, done in tried)
    chosen = _best(trials, higher=HIGHER_IS_BETTER.get(compared_by(spec) or "", False))
    best = tried[chosen][1].trained
    assert best is not None
    return replace(best, trials=trials, chosen=chosen, chosen_by=column)


def _trial(settings: dict[str, Any], done: Tried, column: str) -> Trial:
    """What the record says of a trial."""
    trained, failed = done.trained, done.failed
    value = None if trained is None else trained.metrics.get(column)
    if trained is not None and (value is None or not math.isfinite(value)):
        value, failed = None, f"{column} is not finite"
    epochs = 0 if trained is None else trained.epochs
    return Trial(settings=settings, value=value, epochs=epochs, seconds=done.seconds, failed=failed)


class _Trial:
    """One setting that is to be trained."""

    def __init__(
        self,
        spark: SparkSession,
        spec: PipelineSpec,
        prepared: Prepared,
        settings: dict[str, Any],
        key: str,
        keep: Keep,
    ) -> None:
        self._settings, self._spark, self._prepared, self._key, self._keep = settings, spark, prepared, key, keep
        self._spec = _for_one(with_settings(spec, settings))
        self._network: nn.Module | ConfigError | None = None

    def make(self) -> None:
        """Make its network; what speaks against that fails the trial once it is its turn."""
        try:
            self._network = network_of(self._spec, self._prepared)
        except ConfigError as error:
            self._network = error

    def run(self) -> None:
        """Train, and keep what came of it."""
        emit("step", name="trial", state="started")
        started = time.perf_counter()
        done = self._tried()
        seconds = time.perf_counter() - started
        self._keep(self._key, replace(done, seconds=seconds), seconds)

    def _tried(self) -> Tried:
        try:
            if self._network is None:
                self.make()
            network, self._network = self._network, None  # which is then the fit's alone
            if not isinstance(network, nn.Module):
                raise network or ConfigError("no network was made")
            return Tried(trained=train(self._spark, self._spec, self._prepared, self._key, network))
        except SparkdlError as error:
            if not is_of_settings(error):
                shown = _shown(self._settings)
                logger.warning("the search ends with the trial %s, and goes on with it next time", shown)
                raise
            checkpoints_of(self._spec, self._key).delete(recursive=True)
            reason = " ".join(str(error).split())
            logger.warning("the trial %s failed: %s", _shown(self._settings), reason)
            return Tried(trained=None, failed=reason)


def _for_one(spec: PipelineSpec) -> PipelineSpec:
    """The pipeline of a trial, on as many ranks as the file says, or one, and with the metric that judges it."""
    settings = msgspec.structs.replace(spec.train, num_proc=spec.train.num_proc or 1, metrics=metrics_of_trials(spec))
    return msgspec.structs.replace(spec, train=settings)


def _best(trials: Sequence[Trial], *, higher: bool) -> int:
    """The place of the best; of equal ones the first.

    Raises:
        ConfigError: all failed.
    """
    values = {index: trial.value for index, trial in enumerate(trials) if trial.value is not None}
    if not values:
        first = trials[0]
        raise ConfigError(
            f"all {len(trials)} trials of the search failed, the first ({_shown(first.settings)}): {first.failed}; "
            "change search.space"
        )
    return min(values, key=lambda index: (-values[index] if higher else values[index], index))


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
