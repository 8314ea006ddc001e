"""What Horovod's own tests of its estimator do (its test_spark_torch.py), with the imports changed and nothing else."""

import signal

import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from torch import nn
from torch.nn import functional as F

import sparkdl as hvd_spark
from sparkdl.errors import ConfigError, SchemaError, WorldSizeError
from sparkdl.estimator import LocalStore, TorchModel, prepare_data


class XOR(nn.Module):
    def __init__(self, input_dim=2, output_dim=1):
        super().__init__()
        self.lin1 = nn.Linear(input_dim, 8)
        self.lin2 = nn.Linear(8, output_dim)

    def forward(self, features):
        x = torch.tanh(self.lin1(features.float()))
        return torch.sigmoid(self.lin2(x))


class CallbackBackend:
    """Horovod's tests run the rank in the driver's own process, where breakpoints work."""

    def run(self, fn, args=(), kwargs={}, env={}):  # noqa: B006
        return [fn(*args, **kwargs)] * self.num_processes()

    def num_processes(self):
        return 1


@pytest.fixture
def df(spark):
    rows = [(0, 0, 0.0, 0.1), (0, 1, 1.0, 0.2), (1, 0, 1.0, 0.3), (1, 1, 0.0, 0.4)]
    raw = spark.createDataFrame(rows, "x1 int, x2 int, y float, weight float")
    return VectorAssembler(inputCols=["x1", "x2"], outputCol="features").transform(raw)


def estimator(store, **given):
    torch.manual_seed(0)
    model = XOR()
    settings = {
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.BCELoss(),
        "input_shapes": [[2]],
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "batch_size": 1,
        "epochs": 3,
        "verbose": 2,
    }
    return hvd_spark.TorchEstimator(**{**settings, **given})


def test_fit_model(df, tmp_path):
    loss = F.binary_cross_entropy
    torch_model = estimator(LocalStore(str(tmp_path)), num_proc=2, loss=loss, sample_weight_col="weight").fit(df)
    pred = torch_model.getModel()(torch.ones([1, 2], dtype=torch.int32))
    assert pred.shape == (1, 1)
    assert pred.dtype == torch.float32
    assert torch_model.getInputShapes() == [[-1, 2]]


def test_restore_from_checkpoint(df, tmp_path):
    store, run_id = LocalStore(str(tmp_path)), "run01"
    own = estimator(store, backend=CallbackBackend(), epochs=1, run_id=run_id)
    path = store.get_checkpoint_path(run_id)
    assert not store.exists(path)
    own.fit(df)
    assert store.exists(path)
    assert len(store.get_checkpoints(run_id)) == 1
    assert len(own.fit(df).getHistory()) == 1, "which goes on from the checkpoint, and has nothing left to do"


def test_transform_multi_class(df):
    columns = {"feature_columns": ["features"], "label_columns": ["y"], "input_shapes": [[2]]}
    out = TorchModel(history=None, model=XOR(output_dim=2), **columns).transform(df)
    assert [len(row["y__output"]) for row in out.collect()] == [2] * 4


@pytest.mark.parametrize("idx", [pytest.param(None, marks=pytest.mark.slow), 0])
def test_torch_direct_parquet_train(df, tmp_path, idx):
    store, backend = LocalStore(str(tmp_path)), CallbackBackend()
    columns = {"feature_columns": ["features"], "label_columns": ["y"]}
    if idx is None:
        df.write.parquet(store.get_train_data_path())
        fitted = estimator(store, backend=backend, loss=None).setLoss(nn.BCELoss()).fit_on_parquet()
    else:
        with prepare_data(backend.num_processes(), store, df, **columns) as first:
            fitted = estimator(store, backend=backend).fit_on_parquet(dataset_idx=first)
        with prepare_data(1, store, df, **columns, validation=0.5, sample_weight_col="weight") as second:
            assert (first, second) == (0, 1)
            both = [store.get_train_data_path(second), store.get_val_data_path(second)]
            rows = [df.sparkSession.read.parquet(path) for path in both]
            assert sum(part.count() for part in rows) == 4
            assert rows[0].columns == ["features", "y", "weight"]
    assert fitted.transform(df).count() == 4


def test_prepare_data_writes_each_column_once_and_refuses_a_share_that_is_none(df, tmp_path):
    store = LocalStore(str(tmp_path))
    columns = {"feature_columns": ["features", "y", "weight"], "label_columns": ["y"], "sample_weight_col": "weight"}
    with prepare_data(1, store, df, **columns) as idx:
        rows = df.sparkSession.read.parquet(store.get_train_data_path(idx))
    assert rows.columns == ["features", "y", "weight"]
    with (
        pytest.raises(ConfigError, match="validation=5 does not lie in"),
        prepare_data(1, store, df, **columns, validation=5),
    ):
        pass
    with pytest.raises(SchemaError, match="no column 'label'"), prepare_data(1, store, df, "label", "features"):
        pass


def test_a_backend_of_ones_own_trains_what_sparks_ranks_train(df, tmp_path):
    mine = estimator(LocalStore(str(tmp_path)), backend=CallbackBackend(), batch_size=2).fit(df)
    ours = estimator(None, num_proc=1, batch_size=2).fit(df)
    for one, other in zip(mine.getModel().parameters(), ours.getModel().parameters(), strict=True):
        assert torch.equal(one, other)


def test_ranks_of_a_backend_that_do_not_know_of_each_other_are_refused(df):
    class Two(CallbackBackend):
        def num_processes(self):
            return 2

    with pytest.raises(
        WorldSizeError, match=r"num_processes\(\) of the backend is 2, and the process .* one of 1: let"
    ):
        estimator(None, backend=Two()).fit(df)

    class Silent(CallbackBackend):
        def run(self, fn, args=(), kwargs={}, env={}):  # noqa: B006
            fn(*args, **kwargs)

    with pytest.raises(
        ConfigError, match=r"run\(\) of the backend, a Silent of 1 processes, returned None: return what"
    ):
        estimator(None, backend=Silent()).fit(df)


@pytest.fixture
def own_handlers():
    """Horovod's launcher replaces the handlers of the process that it runs in, and leaves its own: Ctrl-C is lost."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("own_handlers")
def test_a_backend_that_launches_with_horovod_trains_what_two_ranks_of_ours_train(df, tmp_path):
    horovod = pytest.importorskip("horovod")

    class Launches:
        def run(self, fn, args=(), kwargs={}, env={}):  # noqa: B006
            return horovod.run(fn, args, kwargs, num_proc=2, use_gloo=True)

        def num_processes(self):
            return 2

    theirs = estimator(LocalStore(str(tmp_path)), backend=Launches()).fit(df)
    ours = estimator(LocalStore(str(tmp_path)), num_proc=2).fit(df)
    assert theirs.summary.backend.startswith("horovod")
    for one, other in zip(theirs.getModel().parameters(), ours.getModel().parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
