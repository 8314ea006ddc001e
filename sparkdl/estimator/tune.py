"""Search over settings of a training: trials side by side on the same shards, the worse ones stopped early."""

from __future__ import annotations

import math
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparkdl.documents.typed import as_json, encode, read
from sparkdl.errors import ConfigError, SparkdlError
from sparkdl.estimator.checks import check_frame
from sparkdl.estimator.data import code_of
from sparkdl.estimator.elastic import is_of_settings
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.fit import Fit
from sparkdl.estimator.fit_spec import sharing_key
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.params.params import callers_names, value_of
from sparkdl.estimator.side_by_side import room_for_fits, run_side_by_side
from sparkdl.estimator.space import Range, Settings, Space, all_settings, drawn_settings, settings_text
from sparkdl.estimator.store import open_store
from sparkdl.estimator.tpe import TpeSampler
from sparkdl.estimator.tuning import SharedShards
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.observe import logger
from sparkdl.storage import Storage
from sparkdl.storage.executors import on_one_machine

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting that was tried.

    Attributes:
        number: from 0.
        settings: what ``make`` was called with.
        values: the metric by the number of epochs after which it was looked at.
        failed: why it failed; empty where it did not.
        seconds: wall-clock seconds of its training.
    """

    number: int
    settings: Settings
    values: Mapping[int, float] = field(default_factory=dict)
    failed: str = ""
    seconds: float = 0.0

    @property
    def epochs(self) -> int:
        """How many it was trained for, or was allowed to be."""
        return max(self.values, default=0)

    @property
    def value(self) -> float | None:
        """The metric where it was looked at last; None where it failed before."""
        return self.values.get(self.epochs)


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a search came to.

    Attributes:
        model: the fitted model of the best trial.
        best: that trial: of those that were trained longest, the one with the best value.
        trials: all of them, in order.
        metric: by which they were compared.
    """

    model: TorchModel
    best: Trial
    trials: tuple[Trial, ...]
    metric: str

    @property
    def settings(self) -> Settings:
        """The settings of the best trial."""
        return self.best.settings

    def table(self) -> pd.DataFrame:
        """One row a trial: ``trial``, the settings, ``epochs``, the metric, ``seconds``, ``failed``."""
        import pandas as pd

        rows = [
            {"trial": trial.number, **trial.settings, "epochs": trial.epochs, self.metric: trial.value,
             "seconds": trial.seconds, "failed": trial.failed}
            for trial in self.trials
        ]  # fmt: skip
        return pd.DataFrame(rows)


def tune(
    make: Callable[..., TorchEstimator],
    df: DataFrame,
    space: Mapping[str, Sequence[Any] | Range],
    *,
    metric: str = "val_loss",
    mode: Literal["min", "max"] | None = None,
    method: Literal["random", "grid", "halving", "tpe"] = "random",
    trials: int | None = None,
    min_epochs: int = 1,
    reduction: int = 3,
    slots: int | None = None,
    seed: int = 0,
    run_id: str | None = None,
) -> TuneResult:
    """Try settings, side by side where there is room, and return the best fitted model.

    Trials that differ in training alone share their shards. A trial runs on as many ranks as its estimator's
    ``num_proc`` says, one by default, so that a session with four slots runs four.

    ``"halving"`` is ASHA (Li et al., MLSys 2020): every trial is trained for ``min_epochs``; of those that were looked
    at after as many epochs the best share ``1 / reduction`` goes on to ``reduction`` times as many, up to the
    estimator's ``epochs``, from the checkpoint where it stopped. Which trial goes on hangs on who is done first where
    several run.

    With a ``run_id`` and a store of the estimators, what each trial came to is kept there: a search that was killed
    goes on with the trials that are left, and those in the middle from their last checkpoint.

    Args:
        make: called with the settings as keywords, under a seed of the trial's own; returns the estimator of a trial.
            All have the same store, or none: then there is one for the search, which is deleted at its end.
        df: the rows.
        space: by name of a setting a ``Range``, or the values it may have, plain ones as JSON has them.
        metric: a column of the history, ``"val_loss"`` or ``"val_<metric>"``, of the epoch whose weights a trial has.
        mode: whether less or more is better; None knows that of sparkdl's own metrics, and takes less for others.
        method: ``"random"`` draws settings, ``"grid"`` takes all combinations, ``"halving"`` draws and stops early,
            ``"tpe"`` draws each by what those before came to, by Optuna's sampler (``pip install sparkdl[optuna]``).
        trials: how many settings are drawn; None is 20. A grid has as many as it has.
        min_epochs: with ``"halving"``, epochs before the first look.
        reduction: with ``"halving"``, one of how many goes on.
        slots: that all trials may take together; None takes all there are.
        seed: of the settings that are drawn, and of each trial's model.
        run_id: name of the search; None keeps nothing.

    Raises:
        ConfigError: the space is empty or has too few settings, an estimator does not fit, or every trial failed.
        SparkdlError: what ended a trial and is no fault of its settings, as a lost cluster.

    Example:
        >>> def make(lr, width):
        ...     net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
        ...     return TorchEstimator(model=net, optimizer=functools.partial(torch.optim.Adam, lr=lr), ...)
        >>> search = tune(make, df, {"lr": Range(1e-4, 1e-1, log=True), "width": [32, 64]}, method="halving", trials=27)
        >>> search.settings, search.table(), search.model.transform(df)
    """
    check_frame("tune", df)
    halves = method == "halving"
    _check_call(method, trials, min_epochs, reduction, slots)
    settings = _settings_of(space, method, trials, seed)
    name = run_id or f"tune-{uuid.uuid4().hex[:12]}"
    search = _Search(
        make,
        df,
        settings,
        metric,
        mode=mode,
        seed=seed,
        name=name,
        keeps=run_id is not None,
        tpe_space=space if method == "tpe" else None,
    )
    try:
        ladder = looks(search.epochs, min_epochs, reduction) if halves else (search.epochs,)
        search.check_looks(ladder)
        schedule = Schedule(ladder, reduction, maximise=search.maximise, trials=search.trials)
        width = min(len(settings), room_for_fits(df.sparkSession, search.ranks, slots))
        run_side_by_side([lambda: schedule.work(search.train)] * width, df.sparkSession, width)
        return search.result()
    finally:
        search.close()


class Schedule:
    """Which trial is trained next, and for how many epochs: ASHA's promotions, safe to ask from several threads.

    Args:
        ladder: numbers of epochs at which trials are looked at, rising.
        reduction: one of how many goes on from each.
        maximise: whether more is better.
        trials: all of them, with what earlier runs have seen of them.
    """

    def __init__(self, ladder: Sequence[int], reduction: int, *, maximise: bool, trials: Sequence[Trial]) -> None:
        self._ladder, self._reduction, self._sign = ladder, reduction, -1.0 if maximise else 1.0
        self._values = [{trial.number: trial.values[epochs] for trial in trials if epochs in trial.values}
                        for epochs in ladder]  # fmt: skip
        failed = {trial.number for trial in trials if trial.failed}
        self._begun = [failed | set(values) for values in self._values]  # by rung, trials that were sent there
        self._waiting = [trial.number for trial in trials if not trial.values and not trial.failed]
        self._running, self._stopped = 0, False
        self._changed = threading.Condition()

    def work(self, train: Callable[[int, int], float | None]) -> None:
        """Train what is next until nothing is; an error ends the work of all threads.

        Args:
            train: takes a trial's number and how many epochs it is to have; None where the trial failed.
        """
        while (job := self.next()) is not None:
            try:
                self.done(*job, train(*job))
            except BaseException:
                self.stop()
                raise

    def next(self) -> tuple[int, int] | None:
        """A trial's number and how many epochs it is to have; waits while others may send one on; None at the end."""
        with self._changed:
            while not self._stopped:
                job = self._job()
                if job is not None:
                    rung, number = job
                    self._begun[rung].add(number)
                    self._running += 1
                    return number, self._ladder[rung]
                if not self._running:
                    return None
                self._changed.wait()
            return None

    def _job(self) -> tuple[int, int] | None:
        """The rung to reach and a trial: from the highest rung that one may leave, else one that has not begun."""
        for rung in range(len(self._ladder) - 2, -1, -1):
            values = self._values[rung]
            best = sorted(values, key=lambda number: (self._sign * values[number], number))
            for number in best[: len(values) // self._reduction]:
                if number not in self._begun[rung + 1]:
                    return rung + 1, number
        return (0, self._waiting.pop(0)) if self._waiting else None

    def stop(self) -> None:
        """Give nobody a trial any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def done(self, number: int, epochs: int, value: float | None) -> None:
        """A trial was looked at; None where it failed."""
        with self._changed:
            self._running -= 1
            if value is not None:
                self._values[self._ladder.index(epochs)][number] = value
            self._changed.notify_all()


class _Search:
    """The trials of one call, their shards, what is kept of them, and the best model so far."""

    def __init__(
        self,
        make: Callable[..., TorchEstimator],
        df: DataFrame,
        settings: Sequence[Settings],
        metric: str,
        *,
        mode: Literal["min", "max"] | None,
        seed: int,
        name: str,
        keeps: bool,
        tpe_space: Space | None = None,
    ) -> None:
        self._make, self._frame, self._metric, self._seed, self._name = make, df, metric, seed, name
        self._making = threading.Lock()  # torch has one generator
        self._best: tuple[Trial, TorchModel] | None = None
        self._at_end = ExitStack()
        self._store: str | None = None  # for estimators that have none
        self.trials = [Trial(number=number, settings=of_trial) for number, of_trial in enumerate(settings)]
        self._drawn = set[int]() if tpe_space is not None else set(range(len(self.trials)))
        estimator = self._estimator(self.trials[0])
        labels = value_of(estimator, "label_cols")
        self.maximise = mode == "max" if mode is not None else _more_is_better(metric, labels)
        self._sampler = None if tpe_space is None else TpeSampler(tpe_space, maximise=self.maximise, seed=seed)
        if estimator.getOrDefault("store") is None and not keeps:
            if not on_one_machine(df.sparkSession):
                raise ConfigError("trials go on from checkpoints, and workers share no disk with the driver: set store")
            self._store = self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-tune-"))
            estimator = self._estimator(self.trials[0])
        self._users_store = estimator.getOrDefault("store")
        self.epochs, self.ranks = int(estimator.getOrDefault("epochs")), int(estimator.getOrDefault("num_proc") or 1)
        self._shards = SharedShards(sharing_key(estimator), estimator.getOrDefault("transformation_fn"))
        self._shards.fits_to_come = len(settings) + 1  # one more than there are: close() ends it
        self._kept: Storage | None = None
        if keeps:
            uri = self._users_store
            store = None if uri is None else open_store(uri, shared_disk=False)  # None would make a temporary one
            if store is None or not store.saving_runs():
                raise ConfigError(
                    f"run_id={name!r} keeps a search in the estimators' store, and none is set: set store"
                )
            self._kept = store.run(name)
            self.trials = [self._read(trial) for trial in self.trials]

    def check_looks(self, ladder: Sequence[int]) -> None:
        """Refuse trials that an earlier call has looked at after other numbers of epochs.

        Raises:
            ConfigError: names both.
        """
        for trial in self.trials:
            others = sorted(trial.values.keys() - set(ladder))
            if others and self._kept is not None:
                raise ConfigError(
                    f"trial {trial.number} is looked at after {list(ladder)} epochs, and the search whose trials lie "
                    f"in {self._kept.uri} looked after {others}: go on with the epochs, min_epochs and reduction that "
                    "it had, or give another run_id"
                )

    def train(self, number: int, epochs: int) -> float | None:
        """Train one trial up to so many epochs; its value, or None where its settings let it fail."""
        trial, started = self.trials[number], time.perf_counter()
        if trial.number not in self._drawn and self._sampler is not None:
            trial = replace(trial, settings=self._sampler.ask(trial.number))
            self._keep(trial)  # before it trains: where it is interrupted, its checkpoints are of these
            self._drawn.add(trial.number)
        try:
            model = self._fitted(trial, epochs)
            value = model.summary.metrics.get(self._metric)
            if value is None:
                columns = ", ".join(sorted(model.summary.metrics))
                raise _CallError(f"metric={self._metric!r} is none of this training: choose of {columns}")
            if not math.isfinite(value):
                raise ConfigError(f"{self._metric} is {value}")
        except _CallError:
            raise
        except SparkdlError as error:
            if not is_of_settings(error):
                raise
            reason = " ".join(str(error).split())
            logger.warning("trial %d (%s) failed: %s", trial.number, settings_text(trial.settings), reason)
            self._keep(replace(trial, failed=reason, seconds=trial.seconds + time.perf_counter() - started))
            if self._sampler is not None:
                self._sampler.tell(trial.number, None)
            return None
        seconds = trial.seconds + time.perf_counter() - started
        trial = replace(trial, values={**trial.values, epochs: value}, seconds=seconds)
        self._keep(trial)
        text = settings_text(trial.settings)
        logger.info("trial %d (%s): %s %.6g after %d epochs", trial.number, text, self._metric, value, epochs)
        if self._sampler is not None:
            self._sampler.tell(trial.number, value)
        with self._making:
            if self._best is None or self._rank(trial) > self._rank(self._best[0]):
                self._best = trial, model
        return value

    def _fitted(self, trial: Trial, epochs: int) -> TorchModel:
        estimator = self._estimator(trial)
        estimator.setParams(epochs=epochs)
        transformation = code_of(estimator.getOrDefault("transformation_fn"))
        if (sharing_key(estimator), transformation) != (self._shards.key, code_of(self._shards.transformation)):
            raise _CallError(
                f"trial {trial.number} ({settings_text(trial.settings)}) asks for other rows, columns or store than "
                "trial 0: search over what changes training alone"
            )
        with callers_names():
            fit = Fit(estimator, self._frame.sparkSession)
            try:
                return fit.train(self._shards.prepared(fit, self._frame))
            finally:
                self._shards.leave(fit)

    def _estimator(self, trial: Trial) -> TorchEstimator:
        """The trial's own, with a run of its own in the store.

        Raises:
            ConfigError: ``make`` returned something else.
        """
        with self._making, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + trial.number)
            candidate = self._make(**trial.settings)
        if not isinstance(candidate, TorchEstimator):
            raise ConfigError(f"make returned a {type(candidate).__name__}: return a TorchEstimator")
        estimator: TorchEstimator = candidate.copy()
        estimator.setParams(run_id=self._run_id(trial))
        if self._store is not None:
            estimator.setParams(store=self._store)
        if not estimator.isSet("num_proc"):
            estimator.setParams(num_proc=1)
        return estimator

    def _rank(self, trial: Trial) -> tuple[int, float, int]:
        """The greater, the better: trained longer, a better value, drawn first."""
        value = trial.value or 0.0
        return trial.epochs, value if self.maximise else -value, -trial.number

    def result(self) -> TuneResult:
        """The best of those that were trained longest.

        Raises:
            ConfigError: every trial failed.
        """
        trained = [trial for trial in self.trials if trial.value is not None and not trial.failed]
        if not trained:
            first = self.trials[0]
            raise ConfigError(
                f"all {len(self.trials)} trials failed, the first ({settings_text(first.settings)}): {first.failed}; "
                "change space"
            )
        best = max(trained, key=self._rank)
        if self._best is not None and self._best[0].number == best.number:
            model = self._best[1]
        else:
            model = self._fitted(best, best.epochs)  # trained by an earlier run: its last checkpoint has the weights
        return TuneResult(model=model, best=best, trials=tuple(self.trials), metric=self._metric)

    def close(self) -> None:
        """Delete the shards; of a search that nobody can go on with also its runs, and a store of its own."""
        self._shards.close()
        if self._kept is None:
            shared_disk = on_one_machine(self._frame.sparkSession)
            store = open_store(self._store or self._users_store, shared_disk=shared_disk)
            for trial in self.trials:
                store.run(self._run_id(trial)).delete(recursive=True)
        self._at_end.close()

    def _run_id(self, trial: Trial) -> str:
        return f"{self._name}-trial-{trial.number}"

    # --- what is kept -------------------------------------------------------------------------------------------

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        if self._kept is not None:
            record = _Kept(
                settings=trial.settings,
                metric=self._metric,
                values={str(epochs): value for epochs, value in trial.values.items()},
                failed=trial.failed,
                seconds=trial.seconds,
            )
            self._kept.child(f"trial-{trial.number}.json").write_atomic(encode(record))

    def _read(self, trial: Trial) -> Trial:
        """What an earlier call of this name has seen of a trial.

        Raises:
            ConfigError: that call searched for something else.
        """
        assert self._kept is not None
        document = self._kept.child(f"trial-{trial.number}.json")
        if not document.exists():
            return trial
        stored = read(document, _Kept, "delete it, or give another run_id")
        values = {int(epochs): value for epochs, value in stored.values.items()}
        this_search: dict[str, Any] = {"metric": self._metric}
        stored_search: dict[str, Any] = {"metric": stored.metric}
        if self._sampler is None:
            this_search["settings"], stored_search["settings"] = trial.settings, stored.settings
        if this_search != stored_search:
            raise ConfigError(
                f"trial {trial.number} is {this_search}, and the search whose trials lie in {self._kept.uri} had "
                f"{stored_search}: go on with what it had, or give another run_id"
            )
        if self._sampler is not None:
            self._drawn.add(trial.number)
            self._sampler.remember(trial.number, stored.settings, values.get(max(values, default=0)), stored.failed)
        return replace(trial, settings=stored.settings, values=values, failed=stored.failed, seconds=stored.seconds)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A trial as its file has it."""

    settings: dict[str, Any]
    metric: str
    values: dict[str, float]
    failed: str
    seconds: float


class _CallError(ConfigError):
    """A fault of the call, which ends the search and not one trial of it."""


def _more_is_better(metric: str, labels: Sequence[str]) -> bool:
    """What sparkdl's own metrics say, whose columns name the label where there are several; False of others."""
    name = metric.removeprefix("val_")
    names = [name, *(name.removeprefix(f"{label}_") for label in labels)]
    return any(HIGHER_IS_BETTER.get(candidate, False) for candidate in names)


def _check_call(method: str, trials: int | None, min_epochs: int, reduction: int, slots: int | None) -> None:
    if method not in ("random", "grid", "halving", "tpe"):
        raise ConfigError(f"method={method!r} is not one of 'random', 'grid', 'halving', 'tpe': choose one of these")
    if method == "grid" and trials is not None:
        raise ConfigError(f"trials={trials} and method='grid', which tries all there are: drop one")
    if method != "halving" and (min_epochs, reduction) != (1, 3):
        raise ConfigError(
            f"min_epochs={min_epochs} and reduction={reduction} are of method='halving', and method={method!r}: drop "
            "them"
        )
    for name, value, least in (
        *(("trials", trials, 1), ("min_epochs", min_epochs, 1)),
        *(("reduction", reduction, 2), ("slots", slots, 1)),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r} is below {least}, or no whole number: give at least {least}")


def _settings_of(space: Space, method: str, trials: int | None, seed: int) -> list[Settings]:
    """The settings of every trial, the same each time.

    Raises:
        ConfigError: the space is empty, holds what is no value, or has fewer settings than are to be drawn.
    """
    if not space:
        raise ConfigError("space={} names nothing to search: give a Range or values by name")
    for name, values in space.items():
        if isinstance(values, Range):
            if method == "grid":
                raise ConfigError(f"space[{name!r}] is a Range, which a grid cannot go through: list values")
            continue
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"space[{name!r}]={values!r} holds no values: give a list of them, or a Range")
        as_json("space", {name: list(values)}, ConfigError)
    if method == "grid":
        return all_settings(space)
    count = trials or 20
    drawn = drawn_settings(space, count, seed)
    if len(drawn) < count:
        raise ConfigError(
            f"trials={count}, and space has no more than {len(drawn)} settings: ask for fewer, or for a grid"
        )
    return drawn


def looks(epochs: int, least: int, reduction: int) -> tuple[int, ...]:
    """Numbers of epochs at which trials are looked at: ``least``, ``reduction`` times as many, ..., ``epochs``.

    Raises:
        ConfigError: there is no look before the last.
    """
    if least >= epochs:
        raise ConfigError(f"min_epochs={least}, and a training's epochs={epochs}: there is nothing to stop early")
    rungs = [least]
    while rungs[-1] * reduction < epochs:
        rungs.append(rungs[-1] * reduction)
    return (*rungs, epochs)
