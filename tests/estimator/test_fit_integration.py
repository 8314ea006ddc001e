"""Fits that fail, run side by side, or bring code that no worker has."""

import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from sparkdl.compat.spark_errors import task_errors
from sparkdl.errors import ConfigError, DataError, PreflightError, RankFailedError, SchemaError
from sparkdl.estimator import SparkBackend, TorchEstimator
from sparkdl.train.callbacks import Callback


@pytest.fixture(scope="module")
def frame(spark):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(400, 3))
    table = pd.DataFrame(x.astype("float32"), columns=list("abc"))
    table["y"] = (x.sum(1)).astype("float32")
    df = spark.createDataFrame(table).cache()
    df.count()
    yield df
    df.unpersist()


def estimator(net=None, **params):
    torch.manual_seed(0)
    net = net or nn.Linear(3, 1)
    given = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.05),
        "loss": nn.MSELoss(),
        "feature_cols": list("abc"),
        "label_cols": ["y"],
        "batch_size": 50,
        "epochs": 3,
        "num_proc": 2,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **params})


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.getModel().state_dict().values()])


@pytest.mark.slow
def test_a_fit_that_learns_nothing_says_so_in_the_log_and_in_its_summary(spark, caplog):
    x = np.random.default_rng(0).normal(size=(3000, 3)).astype("float32")
    table = pd.DataFrame(x, columns=list("abc")).assign(y=x.sum(1) + 5)
    df = spark.createDataFrame(table)
    net = nn.Linear(3, 1)
    still = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=1e-9), "epochs": 1, "num_proc": 1}
    with caplog.at_level("WARNING", logger="sparkdl"):
        model = estimator(**still, validation=0.3).fit(df)
    (said,) = model.summary.warnings
    assert said in caplog.text
    assert said.startswith("beats the baseline: no. val_loss is ")
    caplog.clear()
    with caplog.at_level("WARNING", logger="sparkdl"):
        assert estimator(validation=0.3, num_proc=1).fit(df).summary.warnings == ()
    assert "baseline" not in caplog.text


class FailsOnce(Callback):
    """Raises on rank 1 in the second epoch, if it finds its marker, and removes it."""

    def __init__(self, marker):
        self.marker = marker

    def on_epoch_start(self, run):
        if run.epoch == 1 and run.world.rank == run.world.size - 1 and Path(self.marker).exists():
            Path(self.marker).unlink()
            raise OSError("the disk of this host is gone")


def test_a_failed_attempt_is_followed_by_one_that_ends_with_the_same_weights(frame, tmp_path, caplog):
    marker = tmp_path / "marker"
    marker.touch()
    undisturbed = estimator().fit(frame)
    with pytest.raises(RankFailedError, match="the disk of this host is gone"):
        estimator(callbacks=[FailsOnce(str(marker))], num_proc=1).fit(frame)
    marker.touch()
    with caplog.at_level("WARNING", logger="sparkdl"):
        recovered = estimator(callbacks=[FailsOnce(str(marker))], max_failures=1, keep_checkpoints=1).fit(frame)
    assert "attempt 1 of 2 failed" in caplog.text
    assert torch.equal(weights(recovered), weights(undisturbed))
    assert list(recovered.history["epoch"]) == [0, 1, 2]


class Refuses(Callback):
    def on_epoch_start(self, run):
        raise ConfigError("never on this cluster")


class Misspelt(Callback):
    def on_epoch_start(self, run):
        runn.stop()  # noqa: F821


def test_what_would_fail_again_is_not_tried_again(frame, caplog):
    with (
        caplog.at_level("WARNING", logger="sparkdl"),
        pytest.raises(ConfigError, match="never on this cluster") as ours,
    ):
        estimator(callbacks=[Refuses()], max_failures=3, num_proc=1).fit(frame)
    assert str(ours.value) == "never on this cluster"
    assert isinstance(ours.value.__cause__, RankFailedError)
    with caplog.at_level("WARNING", logger="sparkdl"), pytest.raises(RankFailedError) as users:
        estimator(callbacks=[Misspelt()], max_failures=3, num_proc=1).fit(frame)
    assert str(users.value) == "rank 0 failed: NameError: name 'runn' is not defined"
    assert isinstance(users.value.__cause__, NameError)
    assert "on_epoch_start" in users.value.rank_traceback
    assert "attempt" not in caplog.text


@pytest.mark.slow
def test_fits_that_each_need_every_slot_queue(frame):
    results, errors = {}, []
    estimators = {seed: estimator(random_seed=seed, epochs=1) for seed in (1, 2)}  # torch's seed is the process's

    def fit(seed):
        try:
            results[seed] = weights(estimators[seed].fit(frame))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fit, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed in (1, 2):
        assert torch.equal(results[seed], weights(estimator(random_seed=seed, epochs=1).fit(frame)))


class Doubled(nn.Module):
    """A class that no worker can import."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return double(self.layer(x))[:, 0]


def double(x):
    return 2 * x


def test_code_of_a_loose_module_travels_along_and_factories_are_made_on_the_ranks(frame):
    by_instance = estimator(Doubled(), num_proc=1).fit(frame)
    assert by_instance.summary.metrics["loss"] < 1
    by_factory = estimator(model=Doubled, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.05)).fit(
        frame
    )
    assert isinstance(by_factory.getModel(), Doubled)
    assert by_factory.getOptimizer().param_groups[0]["params"][0] is by_factory.getModel().layer.weight


def test_parameter_groups_schedulers_and_the_learning_rate_are_what_they_were(frame):
    net = nn.Linear(3, 1)
    groups = [{"params": [net.weight], "lr": 0.05}, {"params": [net.bias], "lr": 0.0}]
    bias = net.bias.detach().clone()
    model = estimator(
        net,
        optimizer=torch.optim.SGD(groups, lr=1.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        backend=SparkBackend(2, env={"MINE": "1"}),
        num_proc=None,
    ).fit(frame)
    assert torch.equal(model.getModel().bias.detach(), bias)
    assert list(model.history["lr"]) == [0.05, 0.025, 0.0125]
    assert model.summary.num_proc == 2
    with pytest.raises(ConfigError, match="give one of them"):
        estimator(backend=SparkBackend(2)).fit(frame)


def test_columns_in_horovods_shapes_train_as_one_packed_tensor_does(frame):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

        def forward(self, a, b, c):
            return self.layer(torch.cat([a, b, c], dim=1))

    packed = weights(estimator(epochs=1).fit(frame))
    net = Stack()
    apart = estimator(net, epochs=1, input_shapes=[[-1, 1]] * 3, optimizer=torch.optim.Adam(net.parameters(), lr=0.05))
    assert torch.allclose(weights(apart.fit(frame)), packed, atol=1e-6)


@pytest.mark.slow
def test_transformations_are_applied_before_rows_become_shards(frame):
    def scaled(rows):
        rows["a"] = rows["a"] * 10
        rows["wide"] = [[value, value] for value in rows["b"]]
        return rows.drop(columns=["c"])

    given = {
        "transformation_fn": scaled,
        "transformation_edit_fields": [("wide", np.float32, (2,), False)],
        "transformation_removed_fields": ["c"],
        "feature_cols": ["a", "wide"],
        "input_shapes": [[-1, 1], [-1, 2]],
    }

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, a, wide):
            return self.layer(torch.cat([a / 10, wide], dim=1))

    dotted = frame.withColumn("not.used", frame["a"])
    assert estimator(Net(), num_proc=1, **given).fit(dotted).summary.metrics["loss"] < 3
    with pytest.raises(ConfigError, match="give one, too"):
        estimator(transformation_removed_fields=["c"]).fit(frame)
    with pytest.raises(SchemaError, match=r"removed_fields names \['z'\], the frame has"):
        estimator(transformation_fn=scaled, transformation_removed_fields=["z"]).fit(frame)
    with pytest.raises(ConfigError, match=r"^transformation_fn raised KeyError: 'nope' at .*: correct it$"):
        estimator(transformation_fn=lambda rows: rows["nope"]).fit(frame)

    def misnamed(rows):
        raise OSError("no file caf\udce9")

    with pytest.raises(ConfigError, match=r"^transformation_fn raised OSError: no file caf\\udce9 at .*: correct it$"):
        estimator(transformation_fn=misnamed).fit(frame)  # Spark would wait for ever for a text that is no UTF-8
    with pytest.raises(SchemaError, match=r"^transformation_fn returned \['b', 'y'\] without \['a', 'c'\]"):
        estimator(transformation_fn=lambda rows: rows[["b", "y"]]).fit(frame)


@pytest.mark.slow
def test_a_transformation_that_returns_something_else_than_it_is_said_to_is_refused_in_a_sentence(frame):
    def halved(rows):
        return rows.assign(n=rows["n"] / 2)

    counted = frame.withColumn("n", F.lit(3))
    given = {"transformation_fn": halved, "feature_cols": ["a", "b", "n"]}
    refused = r"^transformation_fn returned 'n' as float64, which is not its type int32 \(.* 1\.5.*\): convert it"
    with pytest.raises(SchemaError, match=refused):
        estimator(**given).fit(counted)
    halves = estimator(**given, transformation_edit_fields=[("n", np.float64, (), False)]).fit(counted)
    assert torch.equal(weights(halves), weights(estimator(**given).fit(frame.withColumn("n", F.lit(3.0)))))
    assert estimator(**given).fit(frame.withColumn("n", F.lit(4))).summary.training_rows == frame.count()
    with pytest.raises(SchemaError, match=r"^transformation_fn returned a NoneType: let it return a pandas DataFrame"):
        estimator(transformation_fn=lambda rows: None).fit(frame)
    made = {"transformation_fn": lambda rows: rows.assign(z=rows["a"]), "feature_cols": ["a", "b", "z"]}
    with pytest.raises(SchemaError, match=r"^column 'z' is neither in the frame, .*, nor in transformation_edit_fi"):
        estimator(**made).fit(frame)
    with pytest.raises(SchemaError, match=r"^column 'c' is to be trained on, and transformation_removed_fields"):
        estimator(transformation_fn=lambda rows: rows, transformation_removed_fields=["c"]).fit(frame)


def test_a_package_that_only_the_driver_has_is_named_before_a_rank_starts(frame, tmp_path, monkeypatch):
    from sparkdl.estimator import fit, user_code

    (tmp_path / "driver_only_net.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    facts = tmp_path / "driver_only_net-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: driver_only_net\nVersion: 1.0\n")
    (facts / "top_level.txt").write_text("driver_only_net\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    user_code._distributed.cache_clear()
    monkeypatch.setattr(fit, "run", lambda *a, **k: pytest.fail("ranks were started"))
    try:
        import driver_only_net

        with pytest.raises(ConfigError, match=r"needs 'driver_only_net', which workers cannot import: install it"):
            estimator(driver_only_net.Net(3, 1)).fit(frame)
    finally:
        user_code._distributed.cache_clear()


def test_after_a_failure_as_many_ranks_go_on_as_there_are_slots_but_not_fewer_than_the_least(spark):
    from sparkdl.estimator.elastic import slots_left

    assert slots_left(spark, 1, 1, 5) == 1
    assert slots_left(spark, 4, 2, 5) == 2
    with pytest.raises(PreflightError, match=r"2 slots are left for at least 3 ranks: add workers or lower"):
        slots_left(spark, 4, 3, 5)


class Mean(nn.Module):
    """The mean of the elements of a row, of any length."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, values, v_mask):
        return self.scale * (values.float() * v_mask).sum(1) / v_mask.sum(1).clamp(min=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ragged", "bytes"])
def test_rows_of_varying_length_reach_a_model_with_their_mask(spark, kind):
    lengths = [1, 2, 3, 5, 8, 4] * 8
    if kind == "ragged":
        rows = [([float(n)] * n, 2.0 * n) for n in lengths]
        df = spark.createDataFrame(rows, "v array<float>, y float")
    else:
        df = spark.createDataFrame([(bytes([n]) * n, 2.0 * n) for n in lengths], "v binary, y float")
    net = Mean()
    given = {"feature_cols": ["v"], "optimizer": torch.optim.SGD(net.parameters(), lr=1e-3)}
    model = estimator(net, batch_size=7, epochs=8, num_proc=1, **given).fit(df)
    scale = model.getModel().scale.item()
    assert model.history["loss"].iloc[-1] < model.history["loss"].iloc[0]
    for batch_rows in (1, 4096):
        for row in model.setTransformBatchSize(batch_rows).transform(df).collect():
            assert row["y__output"] == pytest.approx(scale * sum(row["v"]) / len(row["v"]), rel=1e-5)
    if kind == "ragged":
        two = estimator(net, batch_size=4, epochs=8, num_proc=2, shuffle=False, **given).fit(df).getModel().scale.item()
        one = estimator(net, batch_size=8, epochs=8, num_proc=1, shuffle=False, **given).fit(df).getModel().scale.item()
        assert two == pytest.approx(one, rel=1e-6)


def test_a_model_without_a_mask_is_refused_before_a_shard_is_written_where_lengths_are_said_to_differ(spark, tmp_path):
    df = spark.createDataFrame([([1.0, 2.0], 1.0)] * 8, "v array<float>, y float")
    net = nn.Linear(2, 1)
    given = {"feature_cols": ["v"], "optimizer": torch.optim.SGD(net.parameters(), lr=1e-4), "num_proc": 1}
    with pytest.raises(ConfigError, match=r"'v' may differ in length.*v_mask.*\[-1, n\] in input_shapes"):
        estimator(net, store=str(tmp_path), input_shapes=[[-1, -1]], **given).fit(df)
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.slow
def test_arrays_of_one_length_work_undeclared_and_scoring_refuses_another(spark):
    df = spark.createDataFrame([([float(i % 5)] * 64, float(i % 5)) for i in range(16)], "v array<float>, y float")
    net = nn.Linear(64, 1)
    given = {"feature_cols": ["v"], "optimizer": torch.optim.SGD(net.parameters(), lr=1e-4), "num_proc": 1}
    model = estimator(net, validation=0.3, **given).fit(df)
    row = model.transform(df).first()
    assert row["y__output"] == pytest.approx(model.getModel()(torch.tensor([row["v"]])).item(), rel=1e-5)
    for lengths, told in (([63], "63 numbers a row.*64"), ([64, 63], "rows of 63 and of 64 elements")):
        shorter = spark.createDataFrame([([0.0] * n,) for n in lengths], "v array<float>").coalesce(1)
        with pytest.raises(DataError, match=told), task_errors():
            model.transform(shorter).collect()


def test_arrays_of_several_lengths_are_refused_without_a_mask_with_both_lengths(spark):
    df = spark.createDataFrame([([1.0] * (1 + i % 2), 1.0) for i in range(16)], "v array<float>, y float")
    net = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"'v' have 1 to 2 elements, and forward\(input\) of Linear"):
        estimator(net, feature_cols=["v"], optimizer=torch.optim.SGD(net.parameters(), lr=0.1), num_proc=1).fit(df)


def test_a_model_learns_columns_that_are_features_as_well(frame):
    net = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    model = estimator(net, optimizer=optimizer, label_cols=["b"], sample_weight_col="w", num_proc=1, epochs=4).fit(
        frame.withColumn("w", frame["a"] * 0 + 2)
    )
    assert torch.allclose(model.getModel().weight, torch.tensor([[0.0, 1.0, 0.0]]), atol=0.05)
    row = model.transform(frame).first()
    assert row["b__output"] == pytest.approx(row["b"], abs=0.2)
