"""Places that cannot be written are found before work starts, all at once, and trying them leaves nothing."""

import os

import pytest
import torch

from sparkdl import Store, TorchEstimator, run_on_dataframe, write_shards
from sparkdl.errors import StorageError
from sparkdl.storage import Storage, check_places
from sparkdl.tables.table import Table


@pytest.fixture
def blocked(tmp_path):
    """A place below a file, which nobody can write to."""
    (tmp_path / "file").write_bytes(b"")
    return f"{tmp_path}/file/below"


@pytest.fixture
def unread(spark):
    """Rows that cannot be computed: whoever starts the work before he looks at its target fails otherwise."""
    return spark.range(10).selectExpr("CAST(raise_error('the rows were computed') AS DOUBLE) x", "CAST(id AS DOUBLE) y")


def test_trying_a_place_leaves_nothing(tmp_path):
    check_places({"store": Storage.of(tmp_path / "new/deep/store"), "runs": Storage.of(tmp_path)})
    assert os.listdir(tmp_path) == []
    check_places({"memory": Storage.of("memory://places/new")})
    assert Storage.of("memory://places/new").list() == []


def test_trying_a_place_of_an_object_store_leaves_nothing(s3_root):
    check_places({"store": s3_root.child("new")})
    assert s3_root.list() == []


@pytest.mark.slow
def test_trying_a_place_on_hdfs_makes_no_folder(hdfs):
    check_places({"store": Storage.of(f"{hdfs}/places/new/deep")})
    assert Storage.of(f"{hdfs}/places").list() == []
    file = Storage.of(f"{hdfs}/places-file")
    file.write_atomic(b"")
    with pytest.raises(StorageError, match=r"store: cannot write .*/places-file/below"):
        check_places({"store": file.child("below")})


def test_every_place_that_fails_is_named_in_a_sentence(blocked, tmp_path, s3_root):
    places = {
        "store": Storage.of(blocked),
        "logs": Storage.of(tmp_path),
        "registry": Storage.of("s3://no-such-bucket-here/registry", s3_root.options),
    }
    with pytest.raises(StorageError) as caught:
        check_places(places)
    first, second = str(caught.value).split("; ")
    assert first.startswith(f"store: cannot write {blocked}: a file stands where a directory is needed")
    assert second.startswith("registry: cannot write s3://no-such-bucket-here/registry: ")
    assert "\n" not in str(caught.value)


def test_a_fit_names_store_and_runs_before_it_computes_a_row(unread, blocked, tmp_path):
    (tmp_path / "runs").write_bytes(b"")
    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        num_proc=1,
        store=Store.create(blocked, runs_path=str(tmp_path / "runs/below")),
    )
    with pytest.raises(StorageError, match=rf"store: cannot write {blocked}.*; checkpoints: cannot write .*; logs: "):
        estimator.fit(unread)


def test_shards_tables_and_functions_look_at_their_target_before_the_rows(unread, blocked):
    with pytest.raises(StorageError, match=f"cannot write {blocked}"):
        write_shards(unread, blocked, columns=["x"], labels=["y"])
    with pytest.raises(StorageError, match=f"store: cannot write {blocked}"):
        run_on_dataframe(print, unread, num_proc=1, store=blocked)
    with pytest.raises(StorageError, match=blocked):
        Table(blocked).write(unread)
