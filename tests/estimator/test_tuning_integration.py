"""Searches over a TorchEstimator: Spark's own classes, with shards that the fits of a fold share."""

import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator as SparksOwn
from pyspark.ml.tuning import CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.estimator import CrossValidator, TorchEstimator, data
from sparkdl.estimator.fit import Fit
from sparkdl.estimator.tuning import SharedShards
from sparkdl.shards.write import write_shards


def mean_error():
    return RegressionEvaluator(labelCol="y", predictionCol="y__output", metricName="mae")


@pytest.fixture(scope="module")
def rows(spark):
    columns = [(F.randn(seed) * 1).cast("float").alias(name) for seed, name in enumerate("ab")]
    df = spark.range(0, 200, 1, 2).select(*columns, (F.col("id") % 2).alias("fold"))
    return df.withColumn("y", (F.col("a") - 2 * F.col("b")).cast("float")).cache()


def linear(store, **params):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    given = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.3), "loss": nn.MSELoss()}
    given |= {"feature_cols": ["a", "b"], "label_cols": ["y"], "num_proc": 1, "verbose": 0}
    return TorchEstimator(**given, store=store and str(store), **params)


def count_sets(monkeypatch):
    written = []
    monkeypatch.setattr(data, "write_shards", lambda *a, **k: written.append(1) or write_shards(*a, **k))
    return written


@pytest.mark.slow
def test_the_fits_of_a_fold_share_its_shards_and_the_metrics_are_those_of_sparks_own_class(rows, tmp_path, monkeypatch):
    estimator = linear(tmp_path)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build()
    given = {
        "estimator": estimator,
        "estimatorParamMaps": grid,
        "evaluator": mean_error(),
        "numFolds": 2,
        "foldCol": "fold",
    }
    written = count_sets(monkeypatch)
    ours = CrossValidator(**given, parallelism=2).fit(rows)
    assert len(written) == 3  # one set a fold, and one of all rows for the best candidate
    assert ours.avgMetrics == SparksOwn(**given).fit(rows).avgMetrics
    assert ours.avgMetrics[1] < ours.avgMetrics[0]
    assert ours.bestModel.summary.epochs == 4
    assert not list((tmp_path / "shards").iterdir())
    ours.save(str(tmp_path / "search"))
    again = CrossValidatorModel.load(str(tmp_path / "search"))
    assert again.avgMetrics == ours.avgMetrics
    assert torch.equal(again.bestModel.getModel().weight, ours.bestModel.getModel().weight)


def test_a_split_into_training_and_validation_shares_its_shards_too(rows, tmp_path, monkeypatch):
    estimator = linear(tmp_path)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build()
    written = count_sets(monkeypatch)
    split = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=mean_error(), seed=3, parallelism=2
    )
    model = split.fit(rows)
    assert len(written) == 2
    assert model.validationMetrics[1] < model.validationMetrics[0]
    assert model.bestModel.summary.epochs == 4


def test_a_search_that_fails_leaves_no_shards(rows, tmp_path):
    estimator = linear(tmp_path)
    maps = [{estimator.epochs: 1}, {estimator.train_steps_per_epoch: 10_000}, {estimator.epochs: 2}]
    search = CrossValidator(estimator=estimator, estimatorParamMaps=maps, evaluator=mean_error(), numFolds=2)
    with pytest.raises(ConfigError, match="train_steps_per_epoch=10000 exceeds the"):
        search.fit(rows)
    assert not list((tmp_path / "shards").iterdir())
    with pytest.raises(ConfigError, match="has no estimator"):
        CrossValidator(numFolds=2).fit(rows)
    with pytest.raises(SchemaError, match=r"fit takes a Spark DataFrame, not a builtins\.list"):
        search.fit([1, 2])


@pytest.mark.slow
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


def test_a_fit_that_could_not_write_the_shards_leaves_no_folder_of_its_own_while_the_next_one_does(rows):
    shared = SharedShards(("key",), None)
    shared.fits_to_come = 2
    fits = [Fit(linear(None), rows.sparkSession) for _ in range(2)]
    with pytest.raises(DataError, match="'y' has 200 nulls"):
        shared.prepared(fits[0], rows.withColumn("y", F.when(F.rand() > 2, F.col("y"))))
    shared.leave(fits[0])
    assert shared.prepared(fits[1], rows).train.rows == 200
    shared.leave(fits[1])
    assert not [fit.store.prefix_path for fit in fits if fit.store.root.exists()]
