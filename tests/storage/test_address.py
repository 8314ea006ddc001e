"""Text that a user gives becomes an address once: what stays, what is completed, what is refused."""

import pickle
from pathlib import Path

import pytest

from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator import Store, TorchEstimator
from sparkdl.estimator.saving.objects import Encoder
from sparkdl.models.registry import ModelRegistry
from sparkdl.storage import Storage, connect
from sparkdl.tables.table import Table


@pytest.fixture(params=["/data/set", "file:///data/set", "file:/data/set", "local:///data/set", "/data//x/../set/"])
def local_text(request):
    return request.param


def test_every_spelling_of_a_local_path_is_one_address(local_text):
    storage = Storage.of(local_text)
    assert storage.uri == "/data/set"
    assert storage.local_path() == Path("/data/set")
    assert storage.spark_uri == "file:///data/set"


def test_a_relative_path_becomes_absolute_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [Storage.of("sets/a"), Storage.of(Store.create("sets").prefix_path), Storage.of(Table("sets/t").uri)]
    made.append(Storage.of(ModelRegistry("registry").uri))
    monkeypatch.chdir("/")
    places = [one.local_path() for one in made]
    assert places == [tmp_path / "sets/a", tmp_path / "sets", tmp_path / "sets/t", tmp_path / "registry"]


@pytest.mark.parametrize("uri", ["s3://bucket/a", "hdfs://nn:8020/a", "hdfs:///a", "memory://m/a"])
def test_a_scheme_stays(uri):
    for storage in (Storage.of(uri), Storage.of(f"{uri}/"), pickle.loads(pickle.dumps(Storage.of(uri)))):
        assert storage.uri == uri
        assert storage.spark_uri == uri.replace("s3:", "s3a:")  # Spark has no other client for it
    assert Storage.of(uri).child("b").uri == f"{uri}/b"
    assert Storage.of(uri).sibling("b").uri == f"{uri[:-1]}b"


@pytest.mark.parametrize("uri", ["s3://", "s3:///", "gs://", "hdfs://", "memory://"])
def test_a_scheme_alone_is_no_folder_of_this_machine(uri):
    with pytest.raises(ConfigError, match=f"^{uri} names no bucket, host or path: write the whole address"):
        Storage.of(uri)


def test_one_slash_behind_a_scheme_is_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"one slash behind its scheme: write s3://bucket/a, or \./s3:/bucket/a"):
        Storage.of("s3:/bucket/a")
    assert Storage.of("./s3:/bucket/a").local_path() == tmp_path / "s3:/bucket/a"
    assert Storage.of("hdfs:/data/a").uri == "hdfs:///data/a"


def test_a_mounted_path_of_databricks_is_local():
    assert Storage.of("dbfs:/a/b").local_path() == Path("/dbfs/a/b")
    assert Store.create("dbfs:/a/b").prefix_path == "/dbfs/a/b"


@pytest.mark.parametrize("name", ["main.sales.orders", "a.b.c"])
def test_a_name_of_a_catalog_is_no_path_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (Storage.of, Store.create, ModelRegistry):
        with pytest.raises(ConfigError, match=rf"{name} looks like the name of a table in a catalog"):
            make(name)
    assert Storage.of(f"./{name}").local_path() == tmp_path / name
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_a_schema_is_no_folder():
    with pytest.raises(ConfigError, match=r"'sales\.orders' is neither an address.*nor a name catalog\.schema\.table"):
        Table("sales.orders")
    assert Storage.of("model.bin").local_path() == Path("model.bin").absolute()


def test_a_file_of_another_host_is_refused():
    with pytest.raises(ConfigError, match="names a file of the host 'data': write file:///data/set"):
        Storage.of("file://data/set")
    assert Storage.of("file://localhost/data").local_path() == Path("/data")


@pytest.mark.parametrize(("uri", "extra"), [("hdfs://nn/a", r"sparkdl\[hdfs\]"), ("s3://b/a", r"sparkdl\[s3\]")])
def test_a_missing_package_is_named_with_its_extra(uri, extra, monkeypatch):
    monkeypatch.setattr(connect, "find_spec", lambda name: None)
    with pytest.raises(StorageError, match=f"needs the package .* not installed here: pip install '{extra}'$"):
        Storage.of(uri).read_bytes()


@pytest.mark.parametrize("name", ["a?b", "a#b"])
def test_a_name_that_the_client_of_hdfs_would_cut_is_refused(name):
    with pytest.raises(StorageError, match="holds a"):
        Storage.of("hdfs://nn/a").child(name).read_bytes()


def test_secrets_are_in_no_repr():
    options = {"AWS_SECRET_ACCESS_KEY": "hidden"}
    store = Store.create(Storage.of("s3://b/store", {"secret": "hidden"}))
    for made in (Table("s3://b/t", options), ModelRegistry("s3://b/r", options), store, TorchEstimator(store=store)):
        assert "hidden" not in f"{made!r} {made}"
    assert "hidden" not in str(Encoder().encode(store, "store"))


def test_a_store_reaches_all_its_places_with_the_rights_that_it_was_given():
    options = {"key": "own", "secret": "hidden"}
    store = TorchEstimator(store=Storage.of("s3://b/store", options)).getStore()
    for place in (store.shards("k"), store.checkpoints("r"), store.logs("r"), store.parquet("train_path", 1)):
        assert place.uri.startswith("s3://b/store/")
        assert place.options == options
    assert store.get_train_data_path(1) == "s3://b/store/intermediate_train_data.1"
