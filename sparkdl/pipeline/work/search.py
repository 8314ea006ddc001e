"""Search: several settings on the same shards, of which the best on the validation rows becomes the challenger.

Enters: shards, the section ``search``. Leaves: the training of the best trial, with what all of them came to. Trials
train side by side where the cluster has slots for more than one. Each is a step of its own, found again by everything
that decides it: a search that was killed goes on where it was, and one whose space has grown tries only what is new.
"""

from __future__ import annotations

import contextvars
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from sparkdl.errors import ConfigError, DataError, NonFiniteLossError, RankFailedError, SchemaError, SparkdlError
from sparkdl.estimator.fit.attempts import is_transient
from sparkdl.launch.driver.slots import slots_of
from sparkdl.observe import logger
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.spec.bounds import HIGHER_IS_BETTER
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import bundle_is_whole, trial_inputs
from sparkdl.pipeline.state.results import Trained, Trial, Tried
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.trials import chosen_by, compared_by, metrics_of_trials, trials_of, with_settings
from sparkdl.pipeline.work.prepare import Prepared
from sparkdl.pipeline.work.training import checkpoints_of, network_of, train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["search"]

_BUGS = ("ValueError", "OverflowError", "IndexError", "KeyError", "ZeroDivisionError", "AssertionError")


def search(context: Context, spark: SparkSession, prepared: Prepared) -> Trained:
    """Train every trial that was not trained yet, and return the best.

    The best has the greatest or the least value of the metric, as that is better; of equal ones it is the first. The
    networks of trials that run side by side are all made before the first one trains, since making one draws from
    torch's one generator: so a trial's weights do not depend on what runs beside it.

    Raises:
        ConfigError: every trial failed.
        ClusterError: ranks could not be started, or were lost.
        TrainingError: a training went wrong for a reason that another attempt may not meet.
    """
    trials = [_Trial(context, spark, prepared, settings) for settings in trials_of(context.spec)]
    waiting = [trial for trial in trials if trial.found() is None]
    side_by_side = min(len(waiting), _room(context.spec, spark))
    if side_by_side > 1:
        for trial in waiting:
            trial.make()
    _run([trial.run for trial in trials], spark, side_by_side)
    column = chosen_by(context.spec)
    told = tuple(trial.told(column) for trial in trials)
    chosen = _best(told, higher=HIGHER_IS_BETTER.get(compared_by(context.spec) or "", False))
    best = trials[chosen].done.trained
    assert best is not None
    return replace(best, trials=told, chosen=chosen, chosen_by=column)


class _Trial:
    """One setting: its pipeline, its key, and what it came to."""

    def __init__(self, context: Context, spark: SparkSession, prepared: Prepared, settings: dict[str, Any]) -> None:
        self.settings, self._context, self._spark, self._prepared = settings, context, spark, prepared
        self._inputs = trial_inputs(context, prepared.key, settings)
        self._key = content_key("trial", self._inputs)
        self._spec = _for_one(with_settings(context.spec, settings))
        self._network: nn.Module | ConfigError | None = None
        self.done = Tried(trained=None)

    def found(self) -> Tried | None:
        """What an earlier run left."""
        return self._context.steps.find("trial", self._inputs, Tried, _holds)

    def make(self) -> None:
        """Make its network; what speaks against that fails the trial once it is its turn."""
        try:
            self._network = network_of(self._spec, self._prepared)
        except ConfigError as error:
            self._network = error

    def run(self) -> None:
        """Train, unless that was done."""
        self.done = self._context.steps.do("trial", self._inputs, Tried, self._tried, _holds)

    def _tried(self) -> Tried:
        started = time.perf_counter()
        try:
            if self._network is None:
                self.make()
            network, self._network = self._network, None  # which is then the fit's alone
            if not isinstance(network, nn.Module):
                raise network or ConfigError("no network was made")
            trained = train(self._spark, self._spec, self._prepared, self._key, network)
        except (NonFiniteLossError, ConfigError, DataError, SchemaError, RankFailedError) as error:
            if isinstance(error, RankFailedError) and not _of_the_setting(error):
                logger.warning("the search ends with the trial %s, and goes on with it next time", _said(self.settings))
                raise
            checkpoints_of(self._spec, self._key).delete(recursive=True)
            reason = " ".join(str(error).split())
            logger.warning("the trial %s failed: %s", _said(self.settings), reason)
            return Tried(trained=None, failed=reason, seconds=time.perf_counter() - started)
        return Tried(trained=trained, seconds=time.perf_counter() - started)

    def told(self, column: str) -> Trial:
        """What the record says of it."""
        trained, failed = self.done.trained, self.done.failed
        value = None if trained is None else trained.metrics.get(column)
        if trained is not None and (value is None or not math.isfinite(value)):
            value, failed = None, f"{column} is not finite"
        epochs = 0 if trained is None else trained.epochs
        return Trial(settings=self.settings, value=value, epochs=epochs, seconds=self.done.seconds, failed=failed)


def _of_the_setting(error: RankFailedError) -> bool:
    """Whether a rank failed by code that would fail again, and not because it was lost."""
    return not is_transient(error) or error.cause.partition(":")[0] in _BUGS


def _holds(done: Tried) -> bool:
    return done.trained is None or bundle_is_whole(done.trained.bundle)


def _for_one(spec: PipelineSpec) -> PipelineSpec:
    """The pipeline of a trial, on as many ranks as the file says, or one, and with the metric that judges it."""
    settings = msgspec.structs.replace(spec.train, num_proc=spec.train.num_proc or 1, metrics=metrics_of_trials(spec))
    return msgspec.structs.replace(spec, train=settings)


def _room(spec: PipelineSpec, spark: SparkSession) -> int:
    """How many trials run side by side."""
    assert spec.search is not None
    slots = slots_of(spark)
    return max(1, min(slots, spec.search.slots or slots) // (spec.train.num_proc or 1))


def _run(tasks: Sequence[Callable[[], None]], spark: SparkSession, side_by_side: int) -> None:
    """Run the tasks, so many at a time; the first error ends it once those that run have ended."""
    if side_by_side <= 1:
        for task in tasks:
            task()
        return
    tag = f"sparkdl-search-{uuid.uuid4().hex}"

    def tagged(task: Callable[[], None]) -> None:
        spark.addTag(tag)
        try:
            task()
        finally:
            spark.removeTag(tag)

    pool, futures = ThreadPoolExecutor(side_by_side, thread_name_prefix="trial"), list[Future[None]]()
    try:
        futures += [pool.submit(contextvars.copy_context().run, tagged, task) for task in tasks]
        for future in futures:
            future.result()
    except BaseException as error:
        for future in futures:
            future.cancel()
        if not isinstance(error, SparkdlError):  # the user wants it to end now
            spark.interruptTag(tag)
        raise
    finally:
        pool.shutdown(wait=True)


def _best(trials: Sequence[Trial], *, higher: bool) -> int:
    """The place of the best; of equal ones the first.

    Raises:
        ConfigError: all failed.
    """
    values = {place: trial.value for place, trial in enumerate(trials) if trial.value is not None}
    if not values:
        first = trials[0]
        raise ConfigError(
            f"all {len(trials)} trials of the search failed, the first ({_said(first.settings)}): {first.failed}; "
            "change search.space"
        )
    return min(values, key=lambda place: (-values[place] if higher else values[place], place))


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
