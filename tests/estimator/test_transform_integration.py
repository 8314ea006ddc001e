"""The fitted model as a transformer: schemas, types, streams, pipelines, searches."""

import gc
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F
from torch import nn

import sparkdl
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.estimator import CrossValidator as OneQueue
from sparkdl.estimator import TorchEstimator, TorchModel
from sparkdl.estimator.model import signature_for
from sparkdl.scoring.temporary_files import process_folder
from sparkdl.storage import Storage


@pytest.fixture(scope="module")
def frame(spark):
    generator = np.random.default_rng(5)
    x = generator.normal(size=(300, 3))
    table = pd.DataFrame(x.astype("float32"), columns=list("abc"))
    table["n"] = generator.integers(0, 5, size=300).astype("int32")
    table["y"] = (x.sum(1)).astype("float32")
    table["k"] = np.digitize(x[:, 0], [-0.5, 0.5]).astype("int64")
    df = spark.createDataFrame(table).repartition(2).cache()
    df.count()
    yield df
    df.unpersist()


def around(net, **params):
    given = {"feature_columns": list("abc"), "label_columns": ["y"], **params}
    return TorchModel(model=net, **given)


def expected(net, frame, columns="abc"):
    rows = frame.select(*columns).toPandas().to_numpy().astype("float32")
    with torch.no_grad():
        return net(torch.from_numpy(rows))


def types(df):
    return {name: kind for name, kind in df.dtypes if name not in "abcnyk"}


def test_the_schema_is_known_and_no_job_runs_before_an_action(spark, frame):
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("transform", "no job")
    out = around(nn.Linear(3, 1)).transform(frame)
    assert types(out) == {"y__output": "float"}
    assert list(tracker.getJobIdsForGroup("transform")) == []
    spark.sparkContext.setJobGroup(None, None)


def test_numbers_vectors_and_several_heads_are_what_the_model_says(frame):
    single = nn.Linear(3, 1)
    out = around(single).transform(frame).toPandas()
    assert np.allclose(out["y__output"], expected(single, frame)[:, 0], atol=1e-5)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.three = nn.Linear(3, 1), nn.Linear(3, 3)

        def forward(self, x):
            return self.one(x), self.three(x)

    two = Two()
    model = around(two, label_columns=["y", "k"]).setOutputCols(["value", "scores"])
    scored = model.transform(frame)
    assert types(scored) == {"value": "float", "scores": "array<float>"}
    found = scored.toPandas()
    value, scores = expected(two, frame)
    assert np.allclose(found["value"], value[:, 0], atol=1e-5)
    assert np.allclose(np.stack(found["scores"]), scores, atol=1e-5)


def test_sparks_columns_have_sparks_types_and_meaning(frame):
    net = nn.Linear(3, 3)
    named = {"predictionCol": "prediction", "probabilityCol": "probability", "rawPredictionCol": "raw"}
    scored = around(net, label_columns=["k"], **named).transform(frame)
    assert types(scored) == {"prediction": "double", "probability": "vector", "raw": "vector"}
    row = scored.first()
    assert isinstance(row["probability"], DenseVector)
    assert row["probability"].toArray().sum() == pytest.approx(1)
    assert row["prediction"] == int(np.argmax(row["raw"].toArray()))
    beside = around(net, label_columns=["k"], probabilityCol="p").transform(frame)
    assert types(beside) == {"k__output": "array<float>", "p": "vector"}
    assert np.allclose(beside.first()["p"].toArray(), row["probability"].toArray())
    assert types(around(nn.Linear(3, 1), predictionCol="prediction").transform(frame)) == {"prediction": "float"}


def test_an_integer_label_does_not_round_scores_and_the_rows_stay(frame):
    net = nn.Linear(4, 1)
    model = TorchModel(model=net, feature_columns=["n", *"abc"], label_columns=["k"], transform_batch_size=7)
    out = model.transform(frame).toPandas()
    assert not np.allclose(out["k__output"], np.round(out["k__output"]))
    assert list(out.columns) == [*frame.columns, "k__output"]
    assert np.allclose(out["k__output"], expected(net, frame, ["n", *"abc"])[:, 0], atol=1e-5)


def test_names_with_dots_are_names(frame):
    dotted = frame.select(*(F.col(name).alias(f"t.{name}") for name in "abny"))
    net = nn.Linear(3, 1)
    vectors = dotted.withColumn("t.v", F.array("`t.a`", "`t.b`"))
    model = TorchModel(model=net, feature_columns=["t.a", "t.b", "t.n"], label_columns=["t.y"])
    out = model.transform(vectors).toPandas()
    assert list(out.columns) == [*vectors.columns, "t.y__output"]
    assert np.allclose(out["t.y__output"], expected(net, frame, "abn")[:, 0], atol=1e-5)
    assert [list(row) for row in out["t.v"]] == out[["t.a", "t.b"]].to_numpy().tolist()


def test_wrong_columns_are_refused_at_once(frame):
    with pytest.raises(SchemaError, match="'zz' is missing"):
        around(nn.Linear(1, 1), feature_columns=["zz"]).transform(frame)
    with pytest.raises(SchemaError, match=r"twice.*outputCols"):
        around(nn.Linear(3, 1)).setOutputCols(["a"]).transform(frame)
    with pytest.raises(ConfigError, match="2 columns for 1 outputs"):
        around(nn.Linear(3, 1)).setOutputCols(["p", "q"]).transform(frame)
    with pytest.raises(ConfigError, match="wants a vector"):
        around(nn.Linear(3, 1), probabilityCol="p").transform(frame)
    with pytest.raises(ConfigError, match="feature_columns and label_columns"):
        TorchModel(model=nn.Linear(3, 1)).transform(frame)
    vectors = VectorAssembler(inputCols=list("abc"), outputCol="v").transform(frame)
    with pytest.raises(ConfigError, match="input_shapes"):
        around(nn.Linear(3, 1), feature_columns=["v"]).transform(vectors)


def test_a_vector_of_another_size_is_refused_when_transform_is_called(frame):
    three = VectorAssembler(inputCols=list("abc"), outputCol="v").transform(frame)
    two = VectorAssembler(inputCols=list("ab"), outputCol="v").transform(frame)
    model = around(nn.Linear(3, 1), feature_columns=["v"], input_shapes=[[-1, 3]])
    signature = signature_for(model, model.getModel(), three)
    known = TorchModel(model=nn.Linear(3, 1), signature=signature, feature_columns=["v"], label_columns=["y"])
    assert known.transform(three)
    with pytest.raises(SchemaError, match=r"gets 2 numbers a row from \['v'\], its shape \(3,\) holds 3"):
        known.transform(two)


def test_nulls_are_refused_by_what_the_caller_of_transform_can_do(frame):
    holes = frame.withColumn("a", F.when(F.col("n") % 2 == 0, F.col("a")))
    with pytest.raises(DataError, match=r"have a null among .*: fill them or drop these rows before") as told:
        around(nn.Linear(3, 1)).transform(holes).collect()
    assert "nulls=" not in str(told.value)


class MeanOfRow(nn.Module):
    """The mean of the elements of a row, of any length."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, row, v_mask):
        return self.scale * (row * v_mask).sum(1) / v_mask.sum(1).clamp(min=1)


@pytest.mark.slow
def test_rows_of_varying_length_are_scored_alike_after_saving_and_loading(spark, tmp_path):
    rows = [([float(n)] * n, float(n)) for n in (1, 2, 3, 5, 8, 4)]
    df = spark.createDataFrame(rows * 4, "v array<float>, y float")
    net = MeanOfRow()
    fitted = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-3),
        loss=nn.MSELoss(),
        feature_cols=["v"],
        label_cols=["y"],
        batch_size=8,
        epochs=1,
        num_proc=1,
        verbose=0,
    ).fit(df)
    fitted.write().overwrite().save(str(tmp_path / "m"))
    with sparkdl.allow_pickle(), sparkdl.allow_imports(__name__):
        loaded = TorchModel.load(str(tmp_path / "m"))
    scale = fitted.getModel().scale.item()
    other = spark.createDataFrame([([1.0] * n,) for n in (7, 1, 9)], "v array<float>").coalesce(1)
    for batch_rows in (1, 4096):
        found = [row["y__output"] for row in loaded.setTransformBatchSize(batch_rows).transform(other).collect()]
        assert found == pytest.approx([scale] * 3, rel=1e-5)


def test_columns_in_horovods_shapes_are_scored_as_they_were_trained(frame):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, v, *columns):
            return self.layer(torch.cat([v, *columns], dim=1))

    net = Stack()
    vectors = VectorAssembler(inputCols=list("abc"), outputCol="v").transform(frame)
    shapes = [[-1, 3], [-1, 1], [-1, 1], [-1, 1]]
    model = TorchModel(model=net, feature_columns=["v", *"abc"], label_columns=["y"], input_shapes=shapes)
    out = model.transform(vectors).toPandas()
    rows = torch.from_numpy(out[list("abc")].to_numpy())
    assert np.allclose(out["y__output"], net(rows, *rows.split(1, dim=1)).detach()[:, 0], atol=1e-5)


def test_a_stream_is_scored(spark, frame, tmp_path):
    net = nn.Linear(2, 1)
    model = TorchModel(model=net, feature_columns=["u", "v"], label_columns=["y"])
    source, target = tmp_path / "in", str(tmp_path / "out")
    table = spark.range(50).selectExpr("cast(id as float) u", "cast(1 as float) v")
    table.write.parquet(str(source))
    stream = spark.readStream.schema(table.schema).parquet(str(source))
    scored = model.transform(stream)
    assert scored.isStreaming
    query = (
        scored.writeStream.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start(target)
    )
    assert query.awaitTermination(60)
    found = spark.read.parquet(target).orderBy("u").toPandas()
    rows = torch.tensor([[float(i), 1.0] for i in range(50)])
    assert np.allclose(found["y__output"], net(rows).detach()[:, 0], rtol=1e-4)


def classifier(**params):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    given = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.05),
        "loss": nn.CrossEntropyLoss(),
        "featuresCol": "x",
        "labelCol": "k",
        "predictionCol": "prediction",
        "batch_size": 32,
        "epochs": 4,
        "num_proc": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **params})


@pytest.fixture(scope="module")
def vectors(frame):
    return VectorAssembler(inputCols=list("abc"), outputCol="x").transform(frame)


def test_a_fitted_pipeline_scores_the_same_after_saving(frame, tmp_path):
    assembler = VectorAssembler(inputCols=list("abc"), outputCol="x")
    fitted = Pipeline(stages=[assembler, classifier(probabilityCol="p")]).fit(frame)
    accuracy = MulticlassClassificationEvaluator(labelCol="k", metricName="accuracy")
    before = fitted.transform(frame)
    assert accuracy.evaluate(before) > 0.8
    fitted.write().overwrite().save(str(tmp_path / "p"))
    after = PipelineModel.load(str(tmp_path / "p")).transform(frame)
    assert after.schema == before.schema
    keys = ["a", "b", "c"]
    assert after.sort(keys).select("prediction").collect() == before.sort(keys).select("prediction").collect()


@pytest.mark.slow
def test_searches_give_the_same_metrics_side_by_side_as_one_by_one(vectors, tmp_path):
    estimator = classifier()
    grid = ParamGridBuilder().addGrid(estimator.batch_size, [16, 64]).addGrid(estimator.epochs, [1, 3]).build()
    accuracy = MulticlassClassificationEvaluator(labelCol="k", metricName="accuracy")
    folded = vectors.withColumn("fold", F.pmod(F.xxhash64("a"), F.lit(2)).cast("int")).cache()
    common = {"estimator": estimator, "estimatorParamMaps": grid, "evaluator": accuracy}
    found = [
        kind(**common, numFolds=2, foldCol="fold", parallelism=parallelism).fit(folded)
        for kind, parallelism in ((CrossValidator, 1), (CrossValidator, 2), (OneQueue, 1), (OneQueue, 2))
    ]
    assert all(one.avgMetrics == found[0].avgMetrics for one in found)
    assert all(one.stdMetrics == found[0].stdMetrics for one in found)
    assert len(set(found[0].avgMetrics)) > 1
    best = [one.bestModel for one in found]
    assert all(isinstance(model, TorchModel) for model in best)
    assert all(torch.equal(model.getModel()[0].weight, best[0].getModel()[0].weight) for model in best)
    found[-1].write().overwrite().save(str(tmp_path / "search"))
    again = CrossValidatorModel.load(str(tmp_path / "search"))
    assert again.avgMetrics == found[0].avgMetrics
    assert torch.equal(again.bestModel.getModel()[0].weight, best[0].getModel()[0].weight)
    split = TrainValidationSplit(**common, trainRatio=0.7, seed=1, parallelism=2).fit(vectors)
    assert len(split.validationMetrics) == 4


@pytest.mark.slow
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
def test_a_binary_classifier_is_judged_by_sparks_evaluators_without_a_cast(vectors, loss, tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(3, 1) if isinstance(loss, nn.BCEWithLogitsLoss) else nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
    rows = vectors.withColumn("z", (F.col("y") > 0).cast("int"))
    columns = {"predictionCol": "prediction", "probabilityCol": "probability", "rawPredictionCol": "rawPrediction"}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    estimator = classifier(model=net, optimizer=optimizer, loss=loss, labelCol="z", **columns)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build()
    area = BinaryClassificationEvaluator(labelCol="z")
    if isinstance(loss, nn.BCEWithLogitsLoss):
        search = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=area, numFolds=2)
        fitted = search.fit(rows).bestModel
    else:
        fitted = estimator.fit(rows)
    scored = fitted.transform(rows)
    assert types(scored.drop("x", "z")) == {"prediction": "double", "probability": "vector", "rawPrediction": "vector"}
    assert area.evaluate(scored) > 0.95
    assert MulticlassClassificationEvaluator(labelCol="z", metricName="accuracy").evaluate(scored) > 0.85
    row = scored.first()
    assert row.rawPrediction[0] == -row.rawPrediction[1]
    assert row.probability[1] == pytest.approx(1 / (1 + np.exp(-row.rawPrediction[1])))
    assert row.prediction == float(row.probability[1] > 0.5)
    fitted.save(str(tmp_path / "m"))
    assert TorchModel.load(str(tmp_path / "m")).transform(rows).schema == scored.schema


def test_a_column_that_the_loss_forbids_is_refused_before_a_shard_is_written(vectors, tmp_path):
    with pytest.raises(ConfigError, match="probabilityCol wants a vector of classes"):
        classifier(loss=nn.MSELoss(), labelCol="y", probabilityCol="p", store=str(tmp_path)).fit(vectors)
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_regression_through_sparks_names(frame):
    net = nn.Linear(3, 1)
    weighted = frame.withColumn("w", F.lit(1.0)).withColumn("held", F.col("n") == 0)
    rows = VectorAssembler(inputCols=list("abc"), outputCol="features").transform(weighted)
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        labelCol="y",
        weightCol="w",
        validationIndicatorCol="held",
        predictionCol="prediction",
        epochs=5,
        num_proc=2,
        verbose=0,
    )
    model = estimator.fit(rows)
    assert model.summary.validation_rows == frame.where("n = 0").count()
    assert RegressionEvaluator(labelCol="y", metricName="r2").evaluate(model.transform(rows)) > 0.95


def test_sparse_and_dense_vectors_are_one_to_the_model(spark):
    rows = [
        (Vectors.dense([1.0, 0.0, 2.0]), 1.0),
        (Vectors.sparse(3, {1: 3.0}), 0.0),
        (Vectors.sparse(3, {}), 0.0),
    ] * 10
    df = spark.createDataFrame(rows, ["x", "y"])
    net = nn.Linear(3, 1)
    model = TorchModel(model=net, feature_columns=["x"], label_columns=["y"], input_shapes=[[-1, 3]])
    out = model.transform(df).toPandas()
    dense = torch.tensor(np.stack([x.toArray() for x in out["x"]]), dtype=torch.float32)
    assert np.allclose(out["y__output"], net(dense).detach()[:, 0], atol=1e-6)


def test_the_file_of_a_model_stays_for_every_frame_that_may_read_it_and_lies_there_once(spark, frame):
    net = nn.Linear(3, 1)
    folder = Path(process_folder(Storage.of(tempfile.gettempdir())).uri)
    before = set(folder.iterdir())
    derived = around(net, predictionCol="p").transform(frame).select("p").where("p is not null")
    around(net, predictionCol="q").transform(frame)
    (mine,) = set(folder.iterdir()) - before
    gc.collect()
    assert derived.count() == 300
    around(nn.Linear(3, 1)).transform(frame)
    assert mine.exists()
    assert derived.count() == 300
