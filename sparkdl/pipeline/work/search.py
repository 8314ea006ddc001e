"""Search: several settings on the same shards, of which the best on the validation rows becomes the challenger."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.estimator.elastic import is_of_settings
from sparkdl.estimator.side_by_side import room_for_fits, run_side_by_side
from sparkdl.estimator.space import settings_text
from sparkdl.estimator.tpe import TpeSampler
from sparkdl.estimator.tune import Schedule, looks
from sparkdl.estimator.tune import Trial as TuneTrial
from sparkdl.launch.driver.slots import slots_of
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.observe import emit, logger
from sparkdl.pipeline.recipe import settled_train
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.receipts import StepNote
from sparkdl.pipeline.state.results import Trained, Trial, Tried
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.trials import (
    chosen_by,
    compared_by,
    metrics_of_trials,
    space_of,
    with_settings,
)
from sparkdl.pipeline.work.prepare import Prepared
from sparkdl.pipeline.work.training import checkpoints_of, look_key, train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TrialSearch:
    """The trials of a search.

    What they come to is kept as receipts: in the end by the key of the trial, and before by one of that and a number of
    epochs.

    Args:
        run: of the pipeline.
        spark: the session.
        prepared: shards, and the features and labels that they were cut with.
        trials: settings of all of them by key.
    """

    def __init__(self, run: Run, spark: SparkSession, prepared: Prepared, trials: Mapping[str, dict[str, Any]]) -> None:
        assert run.spec.search is not None
        self._run, self._spark, self._prepared = run, spark, prepared
        self._spec, self._search, self._receipts = run.spec, run.spec.search, run.receipts
        self._settings = dict(trials)
        self._column, self._maximise = chosen_by(self._spec), _is_maximised(self._spec)
        self._noting, self._noted_at = threading.Lock(), time.perf_counter()

    def train(self, stale: Collection[str]) -> None:
        """Train the trials with these keys, side by side where there is room.

        Raises:
            ClusterError: ranks could not be started, or were lost.
            TrainingError: a training went wrong for a reason that another attempt may not meet.
        """
        keys = [key for key in self._settings if key in stale]
        width = min(len(keys), room_for_fits(self._spark, self._spec.train.num_proc or 1, self._search.slots))
        if self._search.method == "halving":
            self._halve(stale, width)
        elif self._search.method == "tpe":
            self._draw_by_results(keys, width)
        else:
            run_side_by_side([functools.partial(self._train, key, {}) for key in keys], self._spark, width)

    def _halve(self, stale: Collection[str], width: int) -> None:
        """Train all of them a little, and the better ones on, as ``sparkdl.tune`` does (ASHA).

        Those that an earlier run has kept decide with the others who goes on.
        """
        epochs = settled_train(self._spec, self._prepared.shards.train_rows, slots_of(self._spark)).epochs
        assert epochs is not None
        ladder, column = looks(epochs, self._search.min_epochs, self._search.reduction), self._column
        keys = list(self._settings)
        looks_by_trial = [{rung: tried for rung in ladder if (tried := self._look(key, rung))} for key in keys]
        trials = [
            TuneTrial(
                number=number,
                settings=self._settings[key],
                values={
                    rung: value
                    for rung, tried in tried_by_epochs.items()
                    if (value := _value(tried, column)) is not None
                },
                failed=next(filter(None, (_failed(tried, column) for tried in tried_by_epochs.values())), ""),
            )
            for number, (key, tried_by_epochs) in enumerate(zip(keys, looks_by_trial, strict=True))
        ]
        schedule = Schedule(ladder, self._search.reduction, maximise=self._maximise, trials=trials)

        def look_at(number: int, rung: int) -> float | None:
            key, tried_by_epochs = keys[number], looks_by_trial[number]
            tried = self._fit(key, rung)
            seconds = tried_by_epochs[max(tried_by_epochs)].seconds if tried_by_epochs else 0.0
            tried_by_epochs[rung] = tried = replace(tried, seconds=tried.seconds + seconds)
            self._receipts.keep("trial", look_key(key, rung), tried)
            return _value(tried, column)

        run_side_by_side([lambda: schedule.work(look_at)] * width, self._spark, width)
        full_trials = [tried_by_epochs[epochs] for tried_by_epochs in looks_by_trial if epochs in tried_by_epochs]
        if not any(_value(tried, column) is not None for tried in full_trials):  # few trials send none to the end
            ranks = {
                number: (max(tried_by_epochs), value if self._maximise else -value)
                for number, tried_by_epochs in enumerate(looks_by_trial)
                if (value := _value(tried_by_epochs[max(tried_by_epochs)], column)) is not None
            }
            for number in sorted(ranks, key=ranks.__getitem__, reverse=True):
                if look_at(number, epochs) is not None:
                    break
        for key, tried_by_epochs in zip(keys, looks_by_trial, strict=True):
            most_epochs = max(tried_by_epochs)
            newest = tried_by_epochs[most_epochs]
            tried = replace(newest, stopped=most_epochs < epochs and not _failed(newest, column))
            if key in stale or self._receipts.result("trial", key, Tried) != tried:
                self._keep(key, tried)
            checkpoints_of(self._spec, key).delete(recursive=True)

    def _draw_by_results(self, keys: Sequence[str], width: int) -> None:
        """Draw each by what those before came to; what was drawn is kept before it trains, so that it goes on so."""
        space = space_of(self._spec, self._search)
        sampler = TpeSampler(space, maximise=self._maximise, seed=self._search.seed)
        numbers, drawn = {key: number for number, key in enumerate(self._settings)}, dict[str, Mapping[str, Any]]()
        for key, number in numbers.items():
            tried = self._receipts.result("trial", key, Tried) or self._look(key, 0)
            if tried is not None:
                drawn[key] = tried.settings
                sampler.remember(number, tried.settings, _value(tried, self._column), _failed(tried, self._column))

        def draw_and_train(key: str) -> None:
            settings = drawn.get(key) or sampler.ask(numbers[key])
            if key not in drawn:
                self._receipts.keep("trial", look_key(key, 0), Tried(trained=None, settings=settings))
            self._settings[key] = dict(settings)
            sampler.tell(numbers[key], _value(self._train(key, settings), self._column))

        run_side_by_side([functools.partial(draw_and_train, key) for key in keys], self._spark, width)

    def _look(self, key: str, epochs: int) -> Tried | None:
        """What this run or an earlier one has kept of a trial after so many epochs."""
        tried = self._receipts.result("trial", look_key(key, epochs), Tried)
        if tried is not None and tried.trained is not None and not self._run.places.bundle(tried.trained.bundle):
            return None  # another search has cleaned it up
        return tried

    def _keep(self, key: str, tried: Tried) -> None:
        """Keep what a trial came to in the end."""
        self._receipts.keep("trial", key, tried)
        with self._noting:
            now = time.perf_counter()
            self._run.note(StepNote(name="trial", key=key, kept=False, seconds=now - self._noted_at))
            self._noted_at = now

    def _file_of(self, key: str) -> PipelineSpec:
        """The file of one trial, which runs on as many ranks as it says, or one, and with the metric that judges it.

        Raises:
            ConfigError: its settings do not fit each other.
        """
        spec = with_settings(self._spec, self._settings[key])
        ranks, metrics = spec.train.num_proc or 1, metrics_of_trials(spec)
        return msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, num_proc=ranks, metrics=metrics))

    def _train(self, key: str, drawn: Mapping[str, Any]) -> Tried:
        """Train one to its end, and keep what came of it with what was drawn."""
        tried = replace(self._fit(key, None), settings=drawn)
        self._keep(key, tried)
        return tried

    def _fit(self, key: str, epochs: int | None) -> Tried:
        emit("step", name="trial", state="started")
        started = time.perf_counter()
        try:
            spec = self._file_of(key)
            trained = train(self._spark, spec, self._prepared, key, epochs=epochs)
            return Tried(trained=trained, seconds=time.perf_counter() - started)
        except SparkdlError as error:
            text = settings_text(self._settings[key])
            if not is_of_settings(error):
                logger.warning("the search ends with the trial %s, and goes on with it next time", text)
                raise
            checkpoints_of(self._spec, key).delete(recursive=True)
            reason = " ".join(str(error).split())
            logger.warning("the trial %s failed: %s", text, reason)
            return Tried(trained=None, failed=reason, seconds=time.perf_counter() - started)


def best_of(spec: PipelineSpec, tried: Sequence[tuple[dict[str, Any], Tried]]) -> Trained:
    """The training of the best trial, with what all of them came to.

    The best has the greatest or the least value of the metric, as that is better; of equal ones it is the first. One
    that was stopped early is none, so that all that are compared were trained as long.

    Raises:
        ConfigError: every trial failed.
    """
    column = chosen_by(spec)
    trials = tuple(
        Trial(
            settings=settings or attempt.settings,
            value=_value(attempt, column),
            epochs=0 if attempt.trained is None else attempt.trained.epochs,
            seconds=attempt.seconds,
            failed=_failed(attempt, column),
            stopped=attempt.stopped,
        )
        for settings, attempt in tried
    )
    values = {
        number: trial.value for number, trial in enumerate(trials) if trial.value is not None and not trial.stopped
    }
    if not values:
        raise ConfigError(
            f"all {len(trials)} trials of the search failed, the first ({settings_text(trials[0].settings)}): "
            f"{trials[0].failed}; change search.space"
        )
    chosen = max(values, key=values.__getitem__) if _is_maximised(spec) else min(values, key=values.__getitem__)
    best = tried[chosen][1].trained
    assert best is not None
    return replace(best, trials=trials, chosen=chosen, chosen_by=column)


def _is_maximised(spec: PipelineSpec) -> bool:
    """Whether more of what trials are compared by is better."""
    return HIGHER_IS_BETTER.get(compared_by(spec) or "", False)


def _value(tried: Tried, column: str) -> float | None:
    """What a trial is compared by; None where it has none, or one that is not finite."""
    value = None if tried.trained is None else tried.trained.metrics.get(column)
    return value if value is not None and math.isfinite(value) else None


def _failed(tried: Tried, column: str) -> str:
    if tried.trained is not None and _value(tried, column) is None:
        return f"{column} is not finite"
    return tried.failed
