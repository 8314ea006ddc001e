import io
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator.store import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
    open_store,
)


def test_everything_lies_below_the_prefix_under_horovods_names(tmp_path):
    store = Store.create(str(tmp_path))
    assert store.get_train_data_path() == f"{tmp_path}/intermediate_train_data"
    assert store.get_val_data_path(2) == f"{tmp_path}/intermediate_val_data.2"
    assert store.get_checkpoint_path("r1") == f"{tmp_path}/runs/r1/checkpoints"
    assert store.get_logs_path("r1") == f"{tmp_path}/runs/r1/logs"
    assert Store.create(str(tmp_path), train_path="/elsewhere").get_train_data_path() == "/elsewhere"


@pytest.mark.parametrize("prefix", ["dbfs:/mnt/x", "dbfs:///mnt/x", "/dbfs/mnt/x"])
def test_databricks_own_paths_are_those_of_its_mount(prefix):
    assert Store.create(prefix).get_runs_path() == "/dbfs/mnt/x/runs"


def test_a_bad_option_or_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no option 'save'"):
        Store.create(str(tmp_path), save=True)
    with pytest.raises(ConfigError, match="not one of"):
        Store.create(str(tmp_path), keep_shards="sometimes")
    with pytest.raises(ConfigError, match="no name for a folder"):
        Store.create(str(tmp_path)).run_uri("../up")


@pytest.mark.parametrize(
    ("policy", "pinned", "stays"),
    [("pinned", False, False), ("pinned", True, True), ("always", False, True), ("never", True, False)],
)
def test_the_policy_decides_which_shards_stay(tmp_path, policy, pinned, stays):
    store = Store.create(str(tmp_path), keep_shards=policy)
    folder = tmp_path / "shards" / "k"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    store.discard_shards(store.shards_uri("k"), pinned=pinned)
    assert folder.exists() == stays


def test_without_a_store_a_temporary_one_serves_only_where_workers_see_it():
    store = open_store(None, shared_disk=True)
    store_path = store.shards_uri("x")
    assert store.temporary
    assert not store.saving_runs()
    store.close()
    assert not store.exists(store_path)
    with pytest.raises(ConfigError, match="give a shared path"):
        open_store(None, shared_disk=False)


def test_the_methods_that_horovods_users_call_do_what_they_did(tmp_path):
    store = Store.create(str(tmp_path), test_path=str(tmp_path / "aside"))
    assert store.get_test_data_path(1) == f"{tmp_path}/aside.1"
    assert Store.create(str(tmp_path)).get_test_data_path() == f"{tmp_path}/intermediate_test_data"
    assert store.get_logs_subdir() == "logs"
    assert store.get_full_path(f"{tmp_path}/x") == store.get_full_path_fn()(f"{tmp_path}/x") == f"file://{tmp_path}/x"
    assert store.get_localized_path(f"file://{tmp_path}/x") == f"{tmp_path}/x"
    store.write_text(f"{tmp_path}/note", "words")
    assert store.read(f"{tmp_path}/note") == b"words"
    assert store.fs.exists(f"{tmp_path}/note")
    with store.get_local_output_dir_fn("r1")() as folder:
        (Path(folder) / "below").mkdir()
        (Path(folder) / "below" / "c.txt").write_text("one")
        sync = store.sync_fn("r1")
        sync(folder)
        (Path(folder) / "below" / "c.txt").write_text("two")
        sync(folder)
    assert (tmp_path / "runs" / "r1" / "below" / "c.txt").read_text() == "two"
    assert not Path(folder).exists()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), tmp_path / "rows.parquet")
    assert store.is_parquet_dataset(f"{tmp_path}/rows.parquet")
    assert store.get_parquet_dataset(f"{tmp_path}/rows.parquet").read().num_rows == 2
    assert not store.is_parquet_dataset(f"{tmp_path}/runs/r1")
    assert store.get_checkpoints("r1") == []
    with pytest.raises(ConfigError, match=r"get_checkpoints\(run_id\) lists them"):
        store.get_checkpoint_filename()
    unsaved = Store.create(str(tmp_path), save_runs=False)
    assert (unsaved.get_checkpoint_path("r1"), unsaved.get_logs_path("r1")) == (None, None)


def test_a_store_reaches_all_of_its_bucket_by_its_own_options(s3_root, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    bucket = s3_root.parent().uri
    store = Store.create(s3_root.uri, storage_options=s3_root.options, train_path=f"{bucket}/rows")
    note = f"{store.get_run_path('r1')}/note"
    assert not store.exists(note)
    store.write_text(note, "words")
    assert store.exists(note.replace("s3://", "s3a://"))
    assert store.read(note) == b"words"
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), buffer)
    store.parquet("train_path").child("rows.parquet").write_atomic(buffer.getvalue())
    assert store.get_parquet_dataset(store.get_train_data_path()).read().num_rows == 2


def test_horovods_stores_lie_where_their_names_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for local in (LocalStore, FilesystemStore):
        assert local("s").prefix_path == local(f"file://{tmp_path}/s").prefix_path == f"{tmp_path}/s"
        assert local(str(tmp_path / "s"), save_runs=False).saving_runs() is False
    for path in ("dbfs:/mnt/x", "/dbfs/mnt/x", "file:/dbfs/mnt/x", "file:///dbfs/mnt/x"):
        assert DBFSLocalStore(path).get_runs_path() == "/dbfs/mnt/x/runs"
    for path in ("dbfs://mnt/x", "/mnt/x", "s3://dbfs/x"):
        with pytest.raises(ConfigError, match="DBFSLocalStore takes no"):
            DBFSLocalStore(path)
    with pytest.raises(ConfigError, match="FilesystemStore takes no option 'save'"):
        LocalStore("s", save=True)
    options = {"endpoint_url": "http://localhost:1", "key": "k", "secret": "s"}
    assert Store.create("s3://bucket/x", storage_options=options).root.options["key"] == "k"


def test_a_store_on_hdfs_keeps_its_host_for_all_that_is_named_without_one(monkeypatch):
    pytest.importorskip("hdfs_native")
    store = HDFSStore("hdfs://namenode01:8020/user/test", train_path="/user/train", val_path="hdfs://other/val")
    assert store.get_train_data_path() == "hdfs://namenode01:8020/user/train"
    assert store.get_val_data_path() == "hdfs://other/val"
    assert store.get_test_data_path() == "hdfs://namenode01:8020/user/test/intermediate_test_data"
    assert store.get_full_path("/output") == "hdfs://namenode01:8020/output"
    assert store.get_localized_path("hdfs://namenode01:8020/user/test/output") == "/user/test/output"
    assert HDFSStore("/user/test", host="namenode01", port=8020).prefix_path == "hdfs://namenode01:8020/user/test"
    assert HDFSStore("hdfs:///user/test").get_localized_path("/user/test/output") == "/user/test/output"
    configured = HDFSStore("hdfs://ha/x", extra_conf={"dfs.nameservices": "ha"})
    assert configured.root.options["dfs.nameservices"] == "ha"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefix_path": "file:///x"}, "HDFSStore takes no 'file:///x': give hdfs://host:port/path"),
        ({"prefix_path": "hdfs://one/x", "host": "two"}, "name the host once"),
        ({"prefix_path": "hdfs://one"}, "and a path below it"),
        ({"prefix_path": "/x", "port": 8020}, "port=8020 of HDFSStore has no host"),
        ({"prefix_path": "/x", "user": "me"}, "user='me' of HDFSStore has no effect: set HADOOP_USER_NAME"),
        ({"prefix_path": "/x", "kerb_ticket": "t"}, "set KRB5CCNAME"),
        ({"prefix_path": "/x", "driver": "libhdfs3"}, "driver='libhdfs3' of HDFSStore has no effect"),
    ],
)
def test_a_store_on_hdfs_refuses_what_it_cannot_mean(arguments, words):
    with pytest.raises(ConfigError, match=words):
        HDFSStore(**arguments)
