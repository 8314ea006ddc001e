"""Search: several settings on the same shards, of which the best on the validation rows becomes the challenger."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.estimator.elastic import is_of_settings
from sparkdl.estimator.side_by_side import room_for_fits, run_side_by_side
from sparkdl.estimator.tpe import TpeSampler
from sparkdl.estimator.tune import Range as TuneRange
from sparkdl.estimator.tune import Schedule, looks
from sparkdl.estimator.tune import Trial as TuneTrial
from sparkdl.launch.driver.slots import slots_of
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.observe import emit, logger
from sparkdl.pipeline.recipe import settled_train
from sparkdl.pipeline.spec import PipelineSpec, Range
from sparkdl.pipeline.state.receipts import StepNote, content_key
from sparkdl.pipeline.state.results import Trained, Trial, Tried
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.trials import (
    chosen_by,
    compared_by,
    metrics_of_trials,
    takes_whole_numbers,
    typed_settings,
    with_settings,
)
from sparkdl.pipeline.work.prepare import Prepared
from sparkdl.pipeline.work.training import Look, checkpoints_of, network_of, train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TrialResults:
    """What trials come to, as receipts: in the end by their key, and before by one of that and a number of epochs."""

    def __init__(self, run: Run) -> None:
        self._run, self._receipts = run, run.state.receipts

    def keep(self, key: str, tried: Tried) -> None:
        """Keep what a trial came to in the end."""
        self._receipts.keep("trial", key, tried)
        self._run.note(StepNote(name="trial", key=key, kept=False, seconds=tried.seconds))

    def keep_look(self, key: str, epochs: int, tried: Tried) -> None:
        """Keep what a trial, that may go on, has come to after so many epochs."""
        self._receipts.keep("trial", self.look_key(key, epochs), tried)

    def look(self, key: str, epochs: int) -> Tried | None:
        """What was kept of that by this run or an earlier one."""
        tried = self._receipts.result("trial", self.look_key(key, epochs), Tried)
        if tried is not None and tried.trained is not None and not self._run.state.places.bundle(tried.trained.bundle):
            return None  # another search has cleaned it up
        return tried

    def look_key(self, key: str, epochs: int) -> str:
        """The key under which it is."""
        return content_key("trial", [key, epochs])

    def ended(self, key: str) -> Tried | None:
        """What a trial came to in the end, if it has ended."""
        return self._receipts.result("trial", key, Tried)


def train_trials(
    spark: SparkSession,
    spec: PipelineSpec,
    prepared: Prepared,
    trials: Mapping[str, dict[str, Any]],
    results: TrialResults,
    *,
    stale: Collection[str],
) -> None:
    """Train each trial that has not ended yet, side by side where there is room.

    The networks of trials that run side by side are all made before the first one trains, since making one draws from
    torch's one generator: so a trial's weights do not depend on what runs beside it.

    Args:
        spark: the session.
        spec: the pipeline.
        prepared: shards, and the features and labels that they were cut with.
        trials: settings of all of them by key.
        results: of trials.
        stale: keys of those that are to be trained.

    Raises:
        ClusterError: ranks could not be started, or were lost.
        TrainingError: a training went wrong for a reason that another attempt may not meet.
    """
    assert spec.search is not None
    width = min(len(stale), room_for_fits(spark, spec.train.num_proc or 1, spec.search.slots))
    runs = [_Trial(spark, spec, prepared, trials[key], key, results) for key in trials if key in stale]
    if width > 1 and spec.search.method != "tpe":
        for trial in runs:
            trial.make()
    if spec.search.method == "halving":
        _halve(spark, spec, prepared, runs, results, width)
    elif spec.search.method == "tpe":
        _draw_by_results(spark, spec, list(trials), runs, results, width)
    else:
        run_side_by_side([trial.train for trial in runs], spark, width)


def _halve(
    spark: SparkSession,
    spec: PipelineSpec,
    prepared: Prepared,
    runs: Sequence[_Trial],
    results: TrialResults,
    width: int,
) -> None:
    """Train all of them a little, and the better ones on, as ``sparkdl.tune`` does (ASHA)."""
    assert spec.search is not None
    epochs = settled_train(spec, prepared.shards.train_rows, slots_of(spark)).epochs
    assert epochs is not None
    ladder = looks(epochs, spec.search.min_epochs, spec.search.reduction)
    column = chosen_by(spec)
    looks_by_run = [{rung: tried for rung in ladder if (tried := results.look(run.key, rung))} for run in runs]
    schedule = Schedule(
        ladder,
        spec.search.reduction,
        maximise=HIGHER_IS_BETTER.get(compared_by(spec) or "", False),
        trials=[
            TuneTrial(
                number=number,
                settings=run.settings,
                values={rung: value for rung, tried in looked.items() if (value := _value(tried, column)) is not None},
                failed=next((tried.failed for tried in looked.values() if _value(tried, column) is None), ""),
            )
            for number, (run, looked) in enumerate(zip(runs, looks_by_run, strict=True))
        ],
    )

    def work() -> None:
        while (job := schedule.next()) is not None:
            number, rung = job
            try:
                tried = runs[number].run_to(rung, max(looks_by_run[number], default=None))
            except BaseException:
                schedule.stop()
                raise
            looks_by_run[number][rung] = tried
            schedule.done(number, rung, _value(tried, column))

    run_side_by_side([work] * width, spark, width)
    for run, looked in zip(runs, looks_by_run, strict=True):
        last = looked[max(looked)]
        results.keep(run.key, replace(last, stopped=max(looked) < epochs and not _failed(last, column)))
        checkpoints_of(spec, run.key).delete(recursive=True)


def _draw_by_results(
    spark: SparkSession,
    spec: PipelineSpec,
    keys: Sequence[str],
    runs: Sequence[_Trial],
    results: TrialResults,
    width: int,
) -> None:
    """Draw each by what those before came to; what was drawn is kept before it trains, so that it goes on as it is."""
    assert spec.search is not None
    space = {
        name: TuneRange(values.low, values.high, log=values.log, whole=takes_whole_numbers(spec, name))
        if isinstance(values, Range)
        else list(values)
        for name, values in spec.search.space.items()
    }
    maximise = HIGHER_IS_BETTER.get(compared_by(spec) or "", False)
    sampler = TpeSampler(space, maximise=maximise, seed=spec.search.seed)
    column, drawn = chosen_by(spec), dict[str, Mapping[str, Any]]()
    for number, key in enumerate(keys):
        tried = results.ended(key) or results.look(key, 0)
        if tried is not None:
            drawn[key] = tried.settings
            value = _value(tried, column)
            why = _failed(tried, column) if tried.trained is not None or tried.failed else ""
            sampler.remember(number, tried.settings, value, why)
    waiting, lock = deque(runs), threading.Lock()

    def work() -> None:
        while waiting:
            with lock:
                if not waiting:
                    return
                run = waiting.popleft()
                number = keys.index(run.key)
                settings = drawn.get(run.key) or sampler.ask(number)
                if run.key not in drawn:
                    results.keep_look(run.key, 0, Tried(trained=None, settings=settings))
                run.take(typed_settings(spec, settings))
                run.make()
            try:
                tried = run.train(settings)
            except BaseException:
                waiting.clear()
                raise
            sampler.tell(number, _value(tried, column))

    run_side_by_side([work] * width, spark, width)


def best_of(spec: PipelineSpec, tried: Sequence[tuple[dict[str, Any], Tried]]) -> Trained:
    """The training of the best trial, with what all of them came to.

    The best has the greatest or the least value of the metric, as that is better; of equal ones it is the first. One
    that was stopped early is none, so that all that are compared were trained as long.

    Raises:
        ConfigError: every trial failed.
    """
    column = chosen_by(spec)
    trials = tuple(_trial(settings, attempt, column) for settings, attempt in tried)
    chosen = _best(trials, higher=HIGHER_IS_BETTER.get(compared_by(spec) or "", False))
    best = tried[chosen][1].trained
    assert best is not None
    return replace(best, trials=trials, chosen=chosen, chosen_by=column)


def _trial(settings: dict[str, Any], tried: Tried, column: str) -> Trial:
    """What the record says of a trial."""
    return Trial(
        settings=settings or tried.settings,
        value=_value(tried, column),
        epochs=0 if tried.trained is None else tried.trained.epochs,
        seconds=tried.seconds,
        failed=_failed(tried, column),
        stopped=tried.stopped,
    )


def _value(tried: Tried, column: str) -> float | None:
    """What a trial is compared by; None where it has none, or one that is not finite."""
    value = None if tried.trained is None else tried.trained.metrics.get(column)
    return value if value is not None and math.isfinite(value) else None


def _failed(tried: Tried, column: str) -> str:
    if tried.trained is not None and _value(tried, column) is None:
        return f"{column} is not finite"
    return tried.failed


class _Trial:
    """One setting that is to be trained."""

    def __init__(
        self,
        spark: SparkSession,
        spec: PipelineSpec,
        prepared: Prepared,
        settings: dict[str, Any],
        key: str,
        results: TrialResults,
    ) -> None:
        self.key, self.settings = key, settings
        self._spark, self._whole, self._prepared, self._results = spark, spec, prepared, results
        self._spec = _for_one(with_settings(spec, settings))
        self._network: nn.Module | ConfigError | None = None

    def take(self, settings: dict[str, Any]) -> None:
        """Take settings that were drawn now; what speaks against them fails the trial once it is its turn."""
        self.settings = settings
        try:
            self._spec = _for_one(with_settings(self._whole, settings))
        except ConfigError as error:
            self._network = error

    def make(self) -> None:
        """Make its network; what speaks against that fails the trial once it is its turn."""
        if isinstance(self._network, ConfigError):
            return
        try:
            self._network = network_of(self._spec, self._prepared)
        except ConfigError as error:
            self._network = error

    def train(self, drawn: Mapping[str, Any] | None = None) -> Tried:
        """Train, and keep what came of it with what was drawn."""
        tried = replace(self._tried(None), settings=drawn or {})
        self._results.keep(self.key, tried)
        return tried

    def run_to(self, epochs: int, before: int | None) -> Tried:
        """Train up to so many epochs, ``before`` of which there are, and keep what came of it."""
        tried = self._tried(Look(epochs=epochs, bundle=self._results.look_key(self.key, epochs)))
        earlier = self._results.look(self.key, before) if before is not None else None
        tried = replace(tried, seconds=tried.seconds + (earlier.seconds if earlier else 0.0))
        self._results.keep_look(self.key, epochs, tried)
        return tried

    def _tried(self, look: Look | None) -> Tried:
        emit("step", name="trial", state="started")
        started = time.perf_counter()
        try:
            if self._network is None:
                self.make()
            network, self._network = self._network, None  # which is then the fit's alone
            if isinstance(network, ConfigError):
                raise network
            assert network is not None
            trained = train(self._spark, self._spec, self._prepared, self.key, network, look=look)
            return Tried(trained=trained, seconds=time.perf_counter() - started)
        except SparkdlError as error:
            if not is_of_settings(error):
                shown = _shown(self.settings)
                logger.warning("the search ends with the trial %s, and goes on with it next time", shown)
                raise
            checkpoints_of(self._spec, self.key).delete(recursive=True)
            reason = " ".join(str(error).split())
            logger.warning("the trial %s failed: %s", _shown(self.settings), reason)
            return Tried(trained=None, failed=reason, seconds=time.perf_counter() - started)


def _for_one(spec: PipelineSpec) -> PipelineSpec:
    """The pipeline of a trial, on as many ranks as the file says, or one, and with the metric that judges it."""
    settings = msgspec.structs.replace(spec.train, num_proc=spec.train.num_proc or 1, metrics=metrics_of_trials(spec))
    return msgspec.structs.replace(spec, train=settings)


def _best(trials: Sequence[Trial], *, higher: bool) -> int:
    """The place of the best; of equal ones the first.

    Raises:
        ConfigError: all failed.
    """
    values = {index: trial.value for index, trial in enumerate(trials) if trial.value is not None and not trial.stopped}
    if not values:
        first = trials[0]
        raise ConfigError(
            f"all {len(trials)} trials of the search failed, the first ({_shown(first.settings)}): {first.failed}; "
            "change search.space"
        )
    return min(values, key=lambda index: (-values[index] if higher else values[index], index))


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
