"""Spark's CrossValidator with folds and grid dealt as one queue.

Enters: what Spark's own class takes. Leaves: Spark's ``CrossValidatorModel`` with the same metrics. Spark runs the
folds one after another and the final fit alone, so slots stand idle at the end of each fold and for the whole of the
final fit. Here whoever is free takes the next fit of any fold while the model before is still being evaluated. The last
two folds are dealt together, the best candidate's fits first: once only also-rans are left, the final fit of the leader
starts beside them. Should one of them win after all, its own final fit is made. With parallelism 1 one thing follows
another.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
from pyspark.ml import tuning
from pyspark.ml.base import Estimator, Model
from pyspark.ml.util import DefaultParamsReader, MLWritable, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.fit.checks import check_frame
from sparkdl.estimator.fit.fits import GridFits
from sparkdl.estimator.saving.persistence import StageWriter
from sparkdl.launch.driver.session import is_connect
from sparkdl.observe import logger

__all__ = ["CrossValidator"]

Fold = tuple[DataFrame, DataFrame]
"""Training rows and validation rows."""


class CrossValidator(tuning.CrossValidator):
    """Spark's ``CrossValidator``; ``parallelism`` counts fits of all folds, the final one included.

    Parameters, metrics and the fitted model are Spark's own. Any estimator will do.

    Raises:
        ConfigError: estimator, estimatorParamMaps or evaluator is not set.
        DataError: a fold has no rows, or foldCol holds a number that is no fold.

    Example:
        >>> search = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=accuracy, parallelism=4)
        >>> search.fit(df).bestModel
    """

    def _fit(self, dataset: DataFrame) -> tuning.CrossValidatorModel:
        check_frame("fit", dataset)
        for name in ("estimator", "estimatorParamMaps", "evaluator"):
            if not self.isDefined(name):
                raise ConfigError(f"CrossValidator has no {name}: set it before fit")
        search = _Search(self, dataset, list(self._folds(dataset)))
        best, averages, deviations = search.run(lambda: self._check_folds(dataset))
        models: Any = search.models if self.getCollectSubModels() else None
        return self._copyValues(tuning.CrossValidatorModel(best, averages, models, deviations))

    def _folds(self, dataset: DataFrame) -> Iterator[Fold]:
        """Spark's folds; no job runs."""
        column = self.getFoldCol()
        if not column:
            yield from self._kFold(dataset)
            return
        for fold in range(self.getNumFolds()):
            yield dataset.filter(F.col(column) != fold), dataset.filter(F.col(column) == fold)

    def _check_folds(self, dataset: DataFrame) -> None:
        """Check the folds of a column by one job, where Spark runs two a fold."""
        column, count = self.getFoldCol(), self.getNumFolds()
        if not column:
            return
        sizes = {row[0]: row[1] for row in dataset.groupBy(column).count().collect()}
        strangers = [fold for fold in sizes if fold is None or not 0 <= fold < count]
        if strangers:
            raise DataError(
                f"foldCol {column!r} holds {strangers[0]!r}, allowed are 0..{count - 1}: renumber the folds"
            )
        for fold in range(count):
            if not sizes.get(fold) or len(sizes) == 1:
                raise DataError(
                    f"fold {fold} of foldCol {column!r} leaves 0 rows on one side: spread the rows over folds"
                )

    def write(self) -> MLWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return _SearchWriter(self)

    @classmethod
    def read(cls) -> tuning.CrossValidatorReader:
        """Return a reader: ``read().load(path)``."""
        return _SearchReader(cls)


class _SearchWriter(StageWriter):
    """Writes a search as Spark does, beside what is there already."""

    def __init__(self, instance: CrossValidator) -> None:
        super().__init__()
        self._instance = instance

    def _check(self) -> None:
        for param, value in (pair for one in self._instance.getEstimatorParamMaps() for pair in one.items()):
            try:
                json.dumps(None if isinstance(value, MLWritable) else value)
            except TypeError as cause:
                raise ConfigError(
                    f"estimatorParamMaps holds {param.name}={value!r}, and Spark writes grids as JSON ({cause}): save "
                    "the estimator and the best model instead"
                ) from cause

    def saveImpl(self, path: str) -> None:
        """Write estimator, evaluator and grid."""
        tuning.CrossValidatorWriter(self._instance).session(self.sparkSession).saveImpl(path)


class _SearchReader(tuning.CrossValidatorReader):
    """Reads a search as Spark does; Spark itself takes a class outside of pyspark.ml for one that the JVM has saved."""

    def load(self, path: str) -> CrossValidator:
        """Read it from below ``path``."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        _, estimator, evaluator, maps = tuning._ValidatorSharedReadWrite.load(
            path, self.sparkSession, {**metadata, "class": "pyspark.ml.tuning.CrossValidator"}
        )
        search = cast(CrossValidator, self.cls(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator))
        search._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(search, metadata, skipParams=["estimatorParamMaps"])
        return search


class _Search:
    """One search: the queue, the results so far, and the final fit."""

    def __init__(self, owner: CrossValidator, dataset: DataFrame, folds: list[Fold]) -> None:
        self._estimator: Estimator[Any] = owner.getEstimator()
        self._maps, self._evaluator = owner.getEstimatorParamMaps(), owner.getEvaluator()
        self._spark = dataset.sparkSession
        frames: list[tuple[DataFrame, DataFrame | None]] = [*folds, (dataset, None)]
        *self._folds, self._last = [_FoldFits(self._estimator, self._maps, *frame) for frame in frames]
        self._keep = owner.getCollectSubModels()
        shape = (len(folds), len(self._maps))
        self.metrics, self._known = np.zeros(shape), np.zeros(shape, dtype=bool)
        self.models: list[list[Model | None]] = [[None] * shape[1] for _ in folds]
        self._undealt = [list(range(len(self._maps))) for _ in folds]
        self._workers = min(owner.getParallelism(), self._left())
        # Folds that are dealt together: two at the end, if another one has ranked the candidates before.
        self._apart = len(folds) - (2 if len(folds) > 2 else 1)
        # Fits of the grid that the other workers get done while one makes the final fit, on k / (k - 1) as many rows.
        self._last_call = (self._workers - 1) * len(folds) / max(1, len(folds) - 1)
        self._lock = threading.Lock()
        self._ahead: tuple[int, Any] | None = None  # candidate, and its final fit or the error of it
        self._judge: Callable[[tuple[int, int, Model]], Future[None]]
        self._prepare: Callable[[_FoldFits], Future[None]]
        self._tag = f"sparkdl-search-{uuid.uuid4().hex}"
        self._stopped = False

    def run(self, check: Callable[[], None]) -> tuple[Model, list[float], list[float]]:
        """Make all fits; return the final model, and mean and deviation of each candidate's metric.

        Args:
            check: raises if the folds are not what they should be; no fit starts before it has returned.
        """
        from pyspark import inheritable_thread_target

        inheriting = inheritable_thread_target(self._spark)
        with ExitStack() as stack:
            for fits in (*self._folds, self._last):
                stack.callback(fits.close)
            judges = stack.enter_context(ThreadPoolExecutor(self._workers + 1, thread_name_prefix="sparkdl-evaluate"))
            evaluate = inheriting(self._evaluate)
            self._judge = lambda made: judges.submit(evaluate, made)
            self._prepare = lambda fits: judges.submit(inheriting(fits.begin))
            if self._workers > 1:
                self._prepare(self._folds[0])
            check()
            pool = stack.enter_context(ThreadPoolExecutor(self._workers, thread_name_prefix="sparkdl-search"))
            stack.callback(self._stop)
            workers = [pool.submit(inheriting(self._work)) for _ in range(self._workers)]
            for worker in workers:
                worker.result()
            best = self._best(self.metrics)
            if self._ahead is not None and self._ahead[0] != best:
                logger.info("map %d overtook map %d at the end: its final fit is made now", best, self._ahead[0])
                self._ahead = None
            final = self._ahead[1] if self._ahead is not None else self._last.fit(best)
        if isinstance(final, BaseException):
            raise final
        return final, list(self.metrics.mean(axis=0)), list(self.metrics.std(axis=0))

    def _best(self, metrics: Any) -> int:
        """The candidate that Spark would choose."""
        means = metrics.mean(axis=0)
        return int(np.argmax(means) if self._evaluator.isLargerBetter() else np.argmin(means))

    def _work(self) -> None:
        """Take fits until there are none; an evaluation goes on beside the next fit, and one at most is behind."""
        _tagged(self._spark, self._tag)
        pending: Future[None] | None = None
        try:
            while True:
                if pending is not None and self._must_know():
                    pending.result()
                job = self._next()
                made = job() if job is not None else None
                if pending is not None:
                    pending.result()
                if job is None:
                    return
                pending = None if made is None else self._judge(made)
        except BaseException:
            self._stop()
            raise

    def _left(self) -> int:
        """How many fits of the grid are still to be dealt."""
        return sum(map(len, self._undealt))

    def _must_know(self) -> bool:
        """Whether the next thing to do depends on the metric of the last one."""
        with self._lock:
            final_call = self._ahead is None and self._left() <= self._last_call
            return self._workers < 2 or (final_call and self._leader() is None)

    def _next(self) -> Callable[[], tuple[int, int, Model] | None] | None:
        with self._lock:
            if self._stopped:
                return None
            leader = self._leader() if self._ahead is None and self._left() <= self._last_call else None
            if leader is not None:
                self._ahead = (leader, None)
                return lambda: self._finish_ahead(leader)
            if not self._left():
                return None
            fold, index = self._deal()
            if self._workers > 1:
                self._prepare_ahead(fold)
            return lambda: (fold, index, self._folds[fold].fit(index))

    def _leader(self) -> int | None:
        """The candidate to bet on: the best so far, its metric known in every fold; None while none is."""
        counts = self._known.sum(axis=0)
        if self._workers < 2 or counts.min() < max(1, len(self._folds) - 2) or np.isnan(self.metrics).any():
            return None
        best = self._best(self.metrics.sum(axis=0, keepdims=True) / counts)
        return best if counts[best] == len(self._folds) else None

    def _deal(self) -> tuple[int, int]:
        """Fold and candidate of the next fit: the grid in its order, but the best so far first in the last folds."""
        fold = next(fold for fold, left in enumerate(self._undealt) if left)
        if fold < self._apart:
            return fold, self._undealt[fold].pop(0)
        counts, sign = self._known.sum(axis=0), 1 if self._evaluator.isLargerBetter() else -1
        means = sign * self.metrics.sum(axis=0) / np.maximum(counts, 1)
        left = {index for undealt in self._undealt[fold:] for index in undealt}
        index = max(sorted(left), key=lambda one: (counts[one] > 0, means[one]))
        fold = next(one for one, undealt in enumerate(self._undealt) if index in undealt)
        self._undealt[fold].remove(index)
        return fold, index

    def _prepare_ahead(self, fold: int) -> None:
        """Write shards that will soon be needed beside the fits that come before; to be called once a fit dealt."""
        left = self._left()
        if fold < self._apart and len(self._undealt[fold]) == min(self._workers, len(self._maps)) - 1:
            together = slice(fold + 1, None if fold + 1 == self._apart else fold + 2)
            for fits in self._folds[together]:
                self._prepare(fits)
        if left == min(len(self._maps), self._workers + 1) and fold >= self._apart:
            self._prepare(self._last)

    def _evaluate(self, made: tuple[int, int, Model]) -> None:
        fold, index, model = made
        _tagged(self._spark, self._tag)
        metric = self._evaluator.evaluate(model.transform(self._folds[fold].validation, self._maps[index]))
        with self._lock:
            self.metrics[fold, index], self._known[fold, index] = metric, True
            if self._keep:
                self.models[fold][index] = model
            done = self._known[fold].all()
        if done:
            self._folds[fold].close()

    def _finish_ahead(self, index: int) -> None:
        try:
            made: Any = self._last.fit(index)
        except Exception as error:  # counts only if the candidate wins
            made = error
        self._ahead = (index, made)

    def _stop(self) -> None:
        """Deal no more, and end the fits that run: after an error, or Ctrl-C."""
        with self._lock:
            running = not self._stopped and (self._left() > 0 or not self._known.all())
            self._stopped = True
        if running:
            _cancel(self._spark, self._tag)


class _FoldFits:
    """The fits on one frame: of a fold, or the final ones.

    A TorchEstimator reads its rows once, whatever the size of the grid, and can do so ahead; other estimators read them
    once a fit, from a cache.
    """

    def __init__(self, estimator: Estimator[Any], maps: Any, train: DataFrame, validation: DataFrame | None) -> None:
        self._estimator, self._maps, self._train = estimator, maps, train
        self.validation: Any = validation
        self._lock = threading.Lock()
        self._fits: GridFits | None = None
        self._cached: list[DataFrame] = []
        self._open = True

    def begin(self) -> None:
        """Write shards, or mark what is to be cached; the first call does."""
        with self._lock:
            if not self._open or self._cached or self._fits is not None:
                return
            if self.validation is not None:
                self._cached = [self.validation.persist()]
            if isinstance(self._estimator, TorchEstimator):
                self._fits = cast(GridFits, self._estimator.fitMultiple(self._train, self._maps))
            elif self.validation is not None:  # the final fit reads its frame once
                self._cached.append(self._train.persist())
        if self._fits is not None:
            self._fits.write_ahead()

    def fit(self, index: int) -> Model:
        """Make one fit."""
        self.begin()
        made: Model = self._fits.fit(index) if self._fits else self._estimator.fit(self._train, self._maps[index])
        return made

    def close(self) -> None:
        """Drop shards and caches; idempotent."""
        with self._lock:
            self._open = False
            if self._fits is not None:
                self._fits.close()
            for frame in self._cached:
                frame.unpersist()
            self._cached = []


def _tagged(spark: Any, tag: str) -> None:
    """Mark the jobs that this thread will start."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def _cancel(spark: Any, tag: str) -> None:
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)
