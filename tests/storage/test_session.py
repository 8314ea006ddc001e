"""What the Spark session of the process makes of plain paths: asked once, held by whoever asked, never asked again."""

import pickle

import pytest
import torch

from sparkdl import ModelRegistry, Store, TorchEstimator
from sparkdl.errors import ConfigError
from sparkdl.estimator.saving.objects import Encoder
from sparkdl.storage import Storage, files, session
from sparkdl.tables.table import Table

ELSEWHERE = "hdfs://127.0.0.1:1"


@pytest.fixture
def default(spark):
    """Set the default filesystem of the running session; as it was, afterwards."""
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    yield lambda uri: conf.set("fs.defaultFS", uri)
    conf.set("fs.defaultFS", before)


def test_what_was_made_under_one_default_filesystem_means_the_same_place_under_another(default, tmp_path):
    path = str(tmp_path)
    store, table, registry = Store.create(path), Table(f"{path}/table"), ModelRegistry(f"{path}/registry")
    default(ELSEWHERE)
    assert Storage.of(path).uri == f"{ELSEWHERE}{path}"
    assert Store.create(path).shards_uri("k") == f"{ELSEWHERE}{path}/shards/k"
    assert pickle.loads(pickle.dumps(store)).checkpoints("r").local_path() == tmp_path / "runs/r/checkpoints"
    assert TorchEstimator(store=store).getStore().shards("k").local_path() == tmp_path / "shards/k"
    assert table._address.root.local_path() == tmp_path / "table"
    assert registry._log.root.local_path() == tmp_path / "registry"
    assert registry._log.artifact("0" * 64).local_path() == tmp_path / "registry/artifacts" / ("0" * 64)


def test_a_saved_store_means_the_same_place_wherever_it_is_loaded(default, tmp_path):
    saved = Encoder().encode(Store.create(str(tmp_path)), "store")["$Store"]
    default(ELSEWHERE)
    loaded = Store(**saved)
    assert loaded.logs("r").local_path() == tmp_path / "runs/r/logs"


@pytest.mark.parametrize("uri", ["file:///", ELSEWHERE])
def test_an_address_resolved_again_is_itself(default, uri, tmp_path, monkeypatch):
    default(uri)
    monkeypatch.chdir(tmp_path)
    for text in ("/a/b", "a", "file:///a/b", "file:/a", "s3://b/k", "hdfs:///x", "hdfs://nn:8020/x", "memory://m"):
        try:
            whole = Storage.of(text).uri
        except ConfigError:  # a relative path, of a filesystem that does not answer
            continue
        assert Storage.of(whole).uri == whole
        assert Storage.of(Storage.of(text).spark_uri).uri == whole


def test_a_fit_and_its_predictions_resolve_the_text_of_the_store_and_no_other(spark, tmp_path, monkeypatch):
    texts = []

    def counted(text):
        texts.append(text)
        return resolve(text)

    resolve = files.resolved_address
    monkeypatch.setattr(files, "resolved_address", counted)
    frame = spark.range(32).selectExpr("CAST(id AS FLOAT) AS x", "CAST(id AS FLOAT) AS y")
    net = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0001),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        num_proc=1,
        verbose=0,
        store=str(tmp_path / "store"),
    )
    estimator.fit(frame).transform(frame).count()
    made = [text for text in texts if "/.sparkdl-bundle-" not in text]  # folders of this machine that nobody named
    assert made == [str(tmp_path / "store")]


def test_the_default_filesystem_is_looked_up_once_and_a_change_is_seen(spark, default):
    hadoop = session._hadoop_of(spark.sparkContext)
    assert hadoop is session._hadoop_of(spark.sparkContext)
    assert (session.default_filesystem(), hadoop.settings()) == (session.LOCAL, {})
    asked = []
    jvm, hadoop._jvm = hadoop._jvm, None  # whoever wants more than the one setting fails
    try:
        asked = [Storage.of("/a").uri for _ in range(3)]
    finally:
        hadoop._jvm = jvm
    assert asked == ["/a"] * 3
    default(ELSEWHERE)
    assert session.default_filesystem() == ELSEWHERE
    assert hadoop.settings()["fs.defaultFS"] == ELSEWHERE


def test_this_machine_is_told_from_others():
    assert session.is_here("localhost")
    assert session.is_here("127.0.0.1")
    assert not session.is_here("192.0.2.1")
    assert not session.is_here("no-such-host.invalid")
