import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator.store import Store, open_store


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
