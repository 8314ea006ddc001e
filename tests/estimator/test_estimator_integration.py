"""The estimator on a real Spark session: shards, ranks and all."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F_
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sparkdl
from sparkdl.errors import (
    BundleError,
    ConfigError,
    DataError,
    IntegrityError,
    PreflightError,
    SchemaError,
    StorageError,
)
from sparkdl.estimator import Store, TorchEstimator, TorchModel
from sparkdl.shards.write import write_shards

TRUE = np.array([1.0, -2.0, 3.0, 0.5])


@pytest.fixture(scope="module")
def frame(spark):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 4))
    table = pd.DataFrame(x.astype("float32"), columns=list("abcd"))
    table["y"] = (x @ TRUE + 0.05 * generator.normal(size=600)).astype("float32")
    table["k"] = (table["y"] > 0).astype("int64") + (table["y"] > 2).astype("int64")
    table["w"] = generator.uniform(0.5, 1.5, size=600).astype("float32")
    table["held_out"] = generator.random(600) < 0.25
    df = spark.createDataFrame(table).repartition(3).cache()
    df.count()
    yield df
    df.unpersist()


def regression(**params):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss": nn.MSELoss(),
        "feature_cols": list("abcd"),
        "label_cols": ["y"],
        "batch_size": 32,
        "epochs": 3,
        "num_proc": 2,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **params})


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.getModel().state_dict().values()])


def test_a_model_is_fitted_and_the_users_own_objects_stay_as_they_were(frame):
    estimator = regression(validation="held_out", metrics=[nn.L1Loss()])
    before = estimator.getModel().weight.detach().clone()
    model = estimator.fit(frame)
    assert np.allclose(model.getModel().weight.detach().numpy()[0], TRUE, atol=0.1)
    assert torch.equal(estimator.getModel().weight, before)
    assert not model.getModel().training
    assert model.getOptimizer().param_groups[0]["params"][0] is model.getModel().weight
    history = model.history
    assert list(history["epoch"]) == [0, 1, 2]
    assert history["val_loss"].iloc[-1] < history["val_loss"].iloc[0]
    assert model.summary.training_rows + model.summary.validation_rows == 600
    assert model.summary.num_proc == 2
    assert model.getHistory()[2]["validation"]["loss"] == history["val_loss"].iloc[-1]
    assert len(model.plot_history().axes) >= 1


def test_the_split_by_fraction_depends_on_seed_and_rows_and_on_no_partitioning(frame):
    def counts(df, seed):
        summary = regression(validation=0.3, random_seed=seed, epochs=1, num_proc=1).fit(df).summary
        return summary.validation_rows, summary.metrics["val_loss"]

    one = counts(frame, 1)
    assert 0.2 * 600 < one[0] < 0.4 * 600
    rows, loss = counts(frame.repartition(5), 1)
    assert rows == one[0]
    assert loss != pytest.approx(0.0)
    assert counts(frame, 2)[0] != one[0]


def test_a_grid_gives_one_model_a_map_in_order_and_writes_shards_once(frame, tmp_path, monkeypatch):
    from sparkdl.estimator import data

    written = []
    monkeypatch.setattr(data, "write_shards", lambda *a, **k: written.append(1) or write_shards(*a, **k))
    estimator = regression(num_proc=1, store=str(tmp_path))
    models = estimator.fit(frame, [{estimator.epochs: 1}, {estimator.epochs: 2}, {estimator.batch_size: 300}])
    assert [model.summary.epochs for model in models] == [1, 2, 3]
    assert [model.summary.steps for model in models] == [19, 38, 6]
    assert len(written) == 1
    assert not list((tmp_path / "shards").iterdir())


@pytest.mark.slow
def test_parametrized_layers_are_fitted_scored_saved_and_published_with_the_same_numbers(frame, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.ReLU(), spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 1))
    given = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.02), "epochs": 2}
    alone = regression(**given, num_proc=1, batch_size=64).fit(frame)
    fitted = regression(**given, num_proc=2, batch_size=32).fit(frame)
    assert list(fitted.getModel().state_dict()) == list(net.state_dict())
    assert fitted.getOptimizer().param_groups[0]["params"][1] is fitted.getModel()[0].parametrizations.weight.original0
    assert torch.allclose(weights(fitted), weights(alone), atol=1e-5)
    rows = frame.select("a", "b", "c", "d").limit(50).toPandas()
    wanted = fitted.predict(rows)["y__output"].to_numpy()
    fitted.write().save(str(tmp_path / "saved"))
    fitted.publish(str(tmp_path / "registry"), "normed")
    for model in (
        fitted,
        TorchModel.load(str(tmp_path / "saved")),
        sparkdl.load_model("normed@champion", str(tmp_path / "registry")),
    ):
        found = model.transform(frame.sparkSession.createDataFrame(rows)).toPandas()["y__output"].to_numpy()
        assert np.allclose(found, wanted, atol=1e-6)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.value = nn.Linear(8, 1)
        self.kind = nn.Linear(8, 3)

    def forward(self, id, dense):
        joined = torch.cat([self.table(id.long()), dense], dim=1)
        return self.value(joined), self.kind(joined)


def test_several_inputs_outputs_losses_and_sample_weights(frame):
    vectors = VectorAssembler(inputCols=list("abcd"), outputCol="dense").transform(frame).withColumn("id", frame["k"])
    net = TwoTower()
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
        loss=[lambda o, y, reduction="mean": F.mse_loss(o, y, reduction=reduction), nn.CrossEntropyLoss()],
        loss_weights=[0.7, 0.3],
        feature_cols=["id", "dense"],
        input_shapes=[[-1], [-1, 4]],
        label_cols=["y", "k"],
        sample_weight_col="w",
        validation=0.2,
        batch_size=50,
        epochs=4,
        num_proc=2,
        verbose=0,
    ).fit(vectors)
    history = model.history
    assert history["loss"].iloc[-1] < 0.5 * history["loss"].iloc[0]
    assert {"val_y_loss", "val_k_loss"} <= set(history.columns)


def bad(frame, estimator, error, message):
    with pytest.raises(error, match=message):
        estimator.fit(frame)


def test_a_validation_column_holds_out_no_row_where_it_is_nan(frame):
    marked = frame.withColumn("v", F_.expr("if(held_out, 1d, if(c > 0, double('nan'), 0d))"))
    summaries = [regression(validation=name, epochs=1).fit(marked).summary for name in ("held_out", "v")]
    assert summaries[0].validation_rows == summaries[1].validation_rows


def test_what_cannot_work_is_refused_before_a_rank_starts(frame, monkeypatch):
    from sparkdl.estimator import fit

    monkeypatch.setattr(fit, "run", lambda *a, **k: pytest.fail("ranks were started"))
    bad(pd.DataFrame({"a": [1.0]}), regression(), SchemaError, r"not a pandas.*createDataFrame")
    other = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    bad(frame, regression(optimizer=other), ConfigError, "2 parameters of the optimizer are not among the 2 of")
    frozen = nn.Linear(4, 1).requires_grad_(False)
    bad(frame, regression(model=frozen, optimizer=torch.optim.SGD), ConfigError, "0 of the model's 2 parameters")
    everything = frame.withColumn("all", F_.lit(True))
    bad(everything, regression(validation="all"), DataError, r"training data has 0 rows.*validation column")
    bad(frame, regression(monitor="accuracy"), ConfigError, r"monitor='accuracy' is no column .* \['loss'\]")
    bad(frame, regression(monitor="val_loss"), ConfigError, "needs validation data")
    bad(frame, regression(num_proc=3), PreflightError, "num_proc=3 ranks do not fit the cluster's 2")
    bad(frame, regression(min_num_proc=1), ConfigError, "max_failures=0 allows none")
    bad(frame, regression(loss=[nn.MSELoss()] * 2), ConfigError, "2 entries for 1 labels")
    bad(frame, regression(feature_cols=["a", "zz"]), SchemaError, "'zz' is missing")
    bad(frame, regression(feature_cols=["a", "b"]), ConfigError, r"cannot be called with features \(-1, 2\)")
    bad(frame, regression(loss=None), ConfigError, "loss is not given")
    bad(frame, regression(num_proc=2).setModel(None), ConfigError, "model is not given")
    bad(frame.limit(1), regression(), DataError, "1 training rows cannot be dealt to 2 ranks")
    bad(frame.where("a > 1e9"), regression(), DataError, "no rows|0 rows")
    bad(frame, regression(validation="held_out").setFeatureCols(["a"]), ConfigError, "Linear")
    bad(frame.limit(20), regression(validation=0.0001), DataError, "leaves 0 rows to validate on")
    bad(
        frame.selectExpr("*", "if(a > 0, double('NaN'), a) as n"),
        regression(feature_cols=["n", *"abc"]),
        DataError,
        "NaN",
    )
    bad(frame.selectExpr("*", "if(a > 0, null, y) as z"), regression(label_cols=["z"]), DataError, "null")
    classifier = {"model": nn.Linear(4, 2), "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}
    bad(frame, regression(loss=nn.CrossEntropyLoss(), label_cols=["k"], **classifier), DataError, r"classes 0\.\.2")
    shapes = [[-1, 1], [-1, 1], [-1, 1], [-1, 2]]
    bad(frame, regression(input_shapes=shapes), ConfigError, r"\[-1, 2\] for 'd', whose rows have shape \[\]")


def test_estimator_model_and_pipeline_are_saved_and_loaded(frame, tmp_path):
    estimator = regression(epochs=1, metrics={"mae": nn.L1Loss()})
    estimator.write().overwrite().save(str(tmp_path / "estimator"))
    again = TorchEstimator.load(str(tmp_path / "estimator"))
    assert again.uid == estimator.uid
    assert again.getOptimizer().param_groups[0]["params"][0] is again.getModel().weight
    assert not list(tmp_path.rglob("*.pkl"))
    assert torch.equal(weights(again.fit(frame)), weights(estimator.fit(frame)))

    fitted = Pipeline(stages=[VectorAssembler(inputCols=list("abcd"), outputCol="x"), estimator]).fit(frame)
    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    back = PipelineModel.load(str(tmp_path / "pipeline")).stages[1]
    assert isinstance(back, TorchModel)
    assert torch.equal(weights(back), weights(fitted.stages[1]))
    assert list(back.history["loss"]) == list(fitted.stages[1].history["loss"])
    assert back.getOptimizer().param_groups[0]["params"][0] is back.getModel().weight
    assert list((tmp_path / "pipeline").rglob("*.safetensors"))
    with pytest.raises(OSError, match="overwrite"):
        fitted.stages[1].save(str(tmp_path / "estimator"))
    with pytest.raises(ConfigError, match=r"holds a saved TorchEstimator, not a TorchModel: call TorchEstimator.load"):
        TorchModel.load(str(tmp_path / "estimator"))
    with pytest.raises(StorageError, match="holds no saved TorchEstimator"):
        TorchEstimator.load(str(tmp_path / "nothing"))


@pytest.mark.parametrize("file", ["weights.safetensors", "objects.json", "code.pkl", "bundle.json"])
def test_a_saved_model_whose_files_were_altered_is_refused(spark, tmp_path, file):
    given = {"feature_columns": ["a", "b"], "label_columns": ["y"], "loss": lambda output, label: output}
    model = TorchModel(model=nn.Linear(2, 1), **given)
    model.save(str(tmp_path / "m"))
    target = next((tmp_path / "m").rglob(file))
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    with pytest.raises(IntegrityError):
        TorchModel.load(str(tmp_path / "m"))


def test_a_fitted_optimizer_brings_its_moments_and_keeps_them_through_saving(frame, tmp_path):
    net = nn.Linear(4, 1)
    model = regression(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.1)).fit(frame)
    weight = model.getModel().weight
    state = model.getOptimizer().state[weight]
    assert state["step"] == model.summary.steps
    assert state["exp_avg"].abs().max() > 0
    model.save(str(tmp_path / "m"))
    back = TorchModel.load(str(tmp_path / "m"))
    again = back.getOptimizer().state[back.getModel().weight]
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert not list(tmp_path.rglob("*.pkl"))
    made = regression(optimizer=lambda model: torch.optim.Adam(model.parameters())).fit(frame)
    assert made.getOptimizer().state[made.getModel().weight]["step"] == made.summary.steps


def test_a_save_that_fails_midway_leaves_the_saved_model_as_it_was(spark, tmp_path, monkeypatch):
    from sparkdl.estimator.saving import persistence

    path = str(tmp_path / "m")
    old = TorchModel(model=nn.Linear(2, 1), feature_columns=["a", "b"], label_columns=["y"])
    old.save(path)
    before = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(*_, **__):
        raise StorageError("cannot write: the device is full")

    monkeypatch.setattr(persistence.DefaultParamsWriter, "_get_metadata_to_save", full)
    other = TorchModel(model=nn.Linear(2, 1), feature_columns=["a", "b"], label_columns=["y"])
    with pytest.raises(StorageError, match="the device is full"):
        other.write().overwrite().save(path)
    with pytest.raises(StorageError, match="the device is full"):
        other.save(str(tmp_path / "new"))
    assert {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    monkeypatch.undo()
    assert torch.equal(weights(TorchModel.load(path)), weights(old))
    other.write().overwrite().save(path)
    assert torch.equal(weights(TorchModel.load(path)), weights(other))
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


class Loose(nn.Module):
    """Of this file, which nobody can import."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


def absolute(output, label):
    return (output - label).abs().mean()


def test_a_pickle_is_loaded_only_for_those_who_allow_it(spark, tmp_path, monkeypatch):
    path = str(tmp_path / "m")
    columns = {"feature_columns": ["a", "b"], "label_columns": ["y"]}
    TorchModel(model=Loose(), **columns).save(path)
    with pytest.raises(BundleError, match=r"allow_pickle\(\).*spark.sparkdl.allowPickle=true.*SPARKDL_ALLOW_PICKLE=1"):
        TorchModel.load(path)
    with sparkdl.allow_pickle():
        assert isinstance(TorchModel.load(path).getModel().layer, nn.Linear)
        PipelineModel([TorchModel.load(path)]).write().overwrite().save(str(tmp_path / "p"))
    with pytest.raises(BundleError, match="saved as a pickle"):
        PipelineModel.load(str(tmp_path / "p"))
    spark.conf.set("spark.sparkdl.allowPickle", "true")
    try:
        assert isinstance(PipelineModel.load(str(tmp_path / "p")).stages[0].getModel().layer, nn.Linear)
    finally:
        spark.conf.unset("spark.sparkdl.allowPickle")
    monkeypatch.setenv("SPARKDL_ALLOW_PICKLE", "1")
    assert isinstance(TorchModel.load(path).getModel().layer, nn.Linear)


def test_a_model_that_can_be_rebuilt_scores_without_its_pickled_loss(spark, tmp_path):
    path = str(tmp_path / "m")
    columns = {"feature_columns": ["a", "b"], "label_columns": ["y"]}
    TorchModel(model=nn.Linear(2, 1), loss=absolute, **columns).save(path)
    model = TorchModel.load(path)
    assert model.transform(spark.sql("select 1.0f a, 2.0f b")).count() == 1
    with pytest.raises(BundleError, match=r"loss of .* saved as a pickle"):
        model.getLoss()
    with pytest.raises(BundleError, match=r"drop it with setLoss\(None\)"):
        model.write().overwrite().save(path)
    model.setLoss(None).save(str(tmp_path / "again"))
    with sparkdl.allow_pickle():
        assert TorchModel.load(path).getLoss()(torch.ones(2), torch.zeros(2)) == 1


def test_an_estimator_of_loose_parts_needs_the_same_word(tmp_path):
    path = str(tmp_path / "e")
    estimator = regression(loss=absolute, model=Loose())
    estimator.setOptimizer(torch.optim.SGD(estimator.getModel().parameters(), lr=0.1)).save(path)
    with pytest.raises(BundleError, match="loss, model, optimizer of"):
        TorchEstimator.load(path)
    with sparkdl.allow_pickle():
        again = TorchEstimator.load(path)
    assert again.getOptimizer().param_groups[0]["params"][0] is again.getModel().layer.weight


def test_parquet_shards_and_a_run_that_resumes(frame, spark, tmp_path):
    store = Store.create(str(tmp_path))
    with pytest.raises(StorageError, match=r"there is nothing at .*intermediate_train_data"):
        regression(store=store).fit_on_parquet()
    frame.write.parquet(store.get_train_data_path())
    frame.limit(50).write.parquet(store.get_val_data_path())
    label = F_.when(F_.rand() > 2, F_.col("y")).alias("y")
    frame.select(*"abcd", label).write.parquet(store.get_train_data_path(1))
    frame.limit(50).write.parquet(store.get_val_data_path(1))
    with pytest.raises(DataError, match="'y' has 600 nulls"):
        regression(store=store, num_proc=1).fit_on_parquet(dataset_idx=1)
    assert not list((tmp_path / "shards").iterdir())
    estimator = regression(store=store, run_id="r1", epochs=1, num_proc=1)
    first = estimator.fit_on_parquet()
    assert (first.summary.training_rows, first.summary.validation_rows) == (600, 50)
    assert list((tmp_path / "runs" / "r1" / "checkpoints").iterdir())
    more = estimator.fit_on_parquet({estimator.epochs: 3})
    assert list(more.history["epoch"]) == [0, 1, 2]
    assert more.history["loss"].iloc[0] == first.history["loss"].iloc[0]

    from sparkdl.columns.layout import Layout

    layout = Layout(pack={"features": list("abcd")})
    manifest = write_shards(frame.select(*"abcdy"), str(tmp_path / "set"), labels=["y"], layout=layout)
    by_shards = regression(epochs=1, num_proc=1).fit_on_shards(manifest.uri)
    assert torch.equal(weights(by_shards), weights(regression(epochs=1, num_proc=1).fit_on_shards(manifest.uri)))
    with pytest.raises(SchemaError, match="holds no column 'k'"):
        regression(label_cols=["k"]).fit_on_shards(manifest.uri)


def test_a_table_version_is_pinned_and_its_shards_are_used_again(frame, spark, tmp_path):
    from sparkdl.tables.table import Table

    table = Table(str(tmp_path / "table"))
    table.write(frame.select(*"abcdy"))
    estimator = regression(store=str(tmp_path / "store"), epochs=1, num_proc=1, validation=0.2)
    first = estimator.fit_on_table(table.uri)
    sets = sorted(path.name for path in (tmp_path / "store" / "shards").iterdir())
    second = estimator.fit_on_table(table, version=0)
    assert sorted(path.name for path in (tmp_path / "store" / "shards").iterdir()) == sets
    assert len(sets) == 2
    assert torch.equal(weights(first), weights(second))
    shutil.rmtree(table.uri)
    table.write(frame.selectExpr(*"abcd", "-y as y"))
    other = estimator.fit_on_table(table.uri)
    assert len([*(tmp_path / "store" / "shards").iterdir()]) == 4
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("mark", [".", "`"])
def test_columns_are_called_what_their_owner_likes(frame, mark):
    """A dot is no path into a struct, and a backtick no quote, in any part that a column plays."""
    name = {one: f"{one}{mark}{one}" for one in ("a", "y", "w", "held_out", "list")}
    array = F_.array(F_.col("c"), F_.col("d"))
    rows = frame.withColumn("list", array).select(*(F_.col(old).alias(new) for old, new in name.items()))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, a, both):
            return self.layer(torch.cat([a, both], dim=1))

    net = Net()
    model = regression(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        feature_cols=[name["a"], name["list"]],
        input_shapes=[[-1, 1], [-1, 2]],
        label_cols=[name["y"]],
        sample_weight_col=name["w"],
        validation=name["held_out"],
        predictionCol=f"p{mark}p",
        num_proc=1,
        epochs=1,
    ).fit(rows)
    assert model.summary.validation_rows > 0
    assert all(isinstance(row[f"p{mark}p"], float) for row in model.transform(rows).head(3))
