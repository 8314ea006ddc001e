"""Our CrossValidator: Spark's metrics and model, whatever the order in which fits are dealt."""

import threading
import time

import pytest
import torch
from pyspark.ml import Estimator, Model, Pipeline
from pyspark.ml.evaluation import Evaluator, RegressionEvaluator
from pyspark.ml.param import Param, Params
from pyspark.ml.tuning import CrossValidator as SparksOwn
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import CrossValidator, TorchEstimator

FITS, LOCK = [], threading.Lock()


class Answer(Model):
    """Says how good it is; no row is read."""

    def __init__(self, index, fold):
        super().__init__()
        self.index, self.fold = index, fold

    def _transform(self, dataset):
        dataset.answer = (self.index, dataset.fold_number)
        return dataset


class Guess(Estimator):
    """Fits of the time that ``seconds`` says; notes which fits were made, in their order."""

    index = Param(Params._dummy(), "index", "which candidate")

    def __init__(self, seconds=0.01):
        super().__init__()
        self.seconds = seconds

    def _fit(self, dataset):
        fold = getattr(dataset, "fold_number", "all")
        with LOCK:
            FITS.append((fold, self.getOrDefault("index")))
        time.sleep(self.seconds)
        if self.getOrDefault("index") == 99:
            raise ArithmeticError("this candidate cannot be fitted")
        return Answer(self.getOrDefault("index"), fold)


class Quality(Evaluator):
    """A table from (candidate, fold) to its metric."""

    def __init__(self, table, larger=True):
        super().__init__()
        self.table, self.larger = table, larger

    def _evaluate(self, dataset):
        index, fold = dataset.answer
        return self.table[index][fold]

    def isLargerBetter(self):
        return self.larger


@pytest.fixture(scope="module")
def rows(spark):
    return spark.range(30).withColumn("fold", F.col("id") % 3).cache()


@pytest.fixture
def search(rows, monkeypatch):
    """A search whose frames know their fold."""

    def make(table, parallelism, larger=True, kind=CrossValidator, seconds=0.01, **more):
        FITS.clear()
        frames = {}

        def folds(self, dataset):
            for number in range(3):
                frames[number] = rows.filter(F.col("fold") != number), rows.filter(F.col("fold") == number)
                frames[number][0].fold_number = frames[number][1].fold_number = number
            return list(frames.values())

        monkeypatch.setattr(CrossValidator, "_folds", folds)
        estimator = Guess(seconds)
        maps = [{estimator.index: index} for index in range(len(table))]
        evaluator = Quality(table, larger)
        return kind(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator, parallelism=parallelism, **more)

    return make


STEADY = [[0.5, 0.5, 0.5], [0.9, 0.8, 0.9], [0.1, 0.2, 0.1], [0.7, 0.7, 0.7]]
TURNED = [[0.5, 0.5, 0.5], [0.6, 0.6, 0.6], [0.5, 0.5, 5.0], [0.1, 0.1, 0.1]]


@pytest.mark.parametrize("parallelism", [1, 2, 5])
@pytest.mark.parametrize(("table", "larger", "best"), [(STEADY, True, 1), (STEADY, False, 2), (TURNED, True, 2)])
def test_every_fit_is_made_once_and_the_best_candidate_wins(search, rows, parallelism, table, larger, best):
    model = search(table, parallelism, larger, collectSubModels=True).fit(rows)
    assert model.avgMetrics == pytest.approx([sum(row) / 3 for row in table])
    assert model.bestModel.index == best
    assert [[one.index for one in fold] for fold in model.subModels] == [[0, 1, 2, 3]] * 3
    grid = [fit for fit in FITS if fit[0] != "all"]
    assert sorted(grid) == [(fold, index) for fold in range(3) for index in range(4)]
    final = [index for fold, index in FITS if fold == "all"]
    assert final[-1] == best
    assert len(final) <= 2


def test_the_final_fit_of_the_leader_starts_beside_the_also_rans(search, rows):
    search(STEADY, 2, seconds=0.1).fit(rows)
    last = [index for fold, index in FITS if fold == 2]
    assert last[0] == 1  # the best so far is dealt first
    assert [index for fold, index in FITS if fold != "all"][-2:] == [2, 2]  # and the worst last, in both folds
    assert FITS.index(("all", 1)) < FITS.index((2, last[-1])) + 1
    assert [fit for fit in FITS if fit[0] == "all"] == [("all", 1)]


def test_one_at_a_time_nothing_is_done_in_advance(search, rows):
    search(TURNED, 1).fit(rows)
    assert FITS[-1] == ("all", 2)
    assert len(FITS) == 13


def test_an_error_of_a_fit_ends_the_search(search, rows):
    validator = search(STEADY, 2, seconds=0.05)
    maps = validator.getEstimatorParamMaps()
    maps[1] = {next(iter(maps[1])): 99}
    with pytest.raises(ArithmeticError, match="cannot be fitted"):
        validator.setEstimatorParamMaps(maps).fit(rows)
    assert len(FITS) < 6


def test_folds_are_those_of_spark_and_bad_ones_are_refused(rows):
    validator = CrossValidator(numFolds=3, foldCol="fold")
    validator._check_folds(rows)
    mine, sparks = list(validator._folds(rows)), SparksOwn(numFolds=3, foldCol="fold")._kFold(rows)
    for one, other in zip(mine, sparks, strict=True):
        assert [frame.orderBy("id").collect() for frame in one] == [frame.orderBy("id").collect() for frame in other]
    with pytest.raises(DataError, match=r"holds 7, allowed are 0\.\.2"):
        validator._check_folds(rows.withColumn("fold", F.lit(7)))
    with pytest.raises(DataError, match="fold 0"):
        validator._check_folds(rows.withColumn("fold", F.lit(0)))
    with pytest.raises(DataError, match="fold 1"):
        validator._check_folds(rows.where("fold != 1"))
    with pytest.raises(ConfigError, match="has no estimator"):
        validator.fit(rows)


def test_a_search_is_saved_and_loaded_before_it_was_fitted(spark, tmp_path):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    estimator = TorchEstimator(model=net, optimizer=optimizer, loss=nn.MSELoss(), feature_cols=["a", "b"], epochs=3)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).addGrid(estimator.feature_cols, [["a"]]).build()
    search = CrossValidator(
        estimator=Pipeline(stages=[estimator]),
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=4,
        parallelism=2,
    )
    search.save(str(tmp_path / "search"))
    search.write().overwrite().save(str(tmp_path / "search"))
    again = CrossValidator.load(str(tmp_path / "search"))
    assert type(again) is CrossValidator
    assert (again.uid, again.getNumFolds(), again.getParallelism()) == (search.uid, 4, 2)
    (stage,) = again.getEstimator().getStages()
    assert torch.equal(stage.getModel().weight, net.weight)
    assert again.getEstimatorParamMaps() == grid
    assert stage.copy(again.getEstimatorParamMaps()[1]).getEpochs() == 2
    whole = Pipeline(stages=[search])
    whole.save(str(tmp_path / "pipeline"))
    assert Pipeline.load(str(tmp_path / "pipeline")).getStages()[0].getNumFolds() == 4
    grid[0][estimator.loss] = nn.L1Loss()
    with pytest.raises(ConfigError, match=r"loss=L1Loss\(\), and Spark writes grids as JSON"):
        search.setEstimatorParamMaps(grid).save(str(tmp_path / "other"))
