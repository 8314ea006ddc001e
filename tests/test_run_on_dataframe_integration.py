"""A DataFrame to a function on every rank, without an estimator."""

import os
import sys

import cloudpickle
import numpy as np
import pytest
import torch

from sparkdl.errors import ConfigError, SchemaError, StorageError
from sparkdl.estimator import Store
from sparkdl.runner import run_on_dataframe

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def seen(loader, epochs=1, shift=0):
    rows = [int(value) + shift for _ in range(epochs) for batch in loader for value in batch["id"].tolist()]
    return int(os.environ["RANK"]), len(loader), rows


@pytest.mark.parametrize("num_proc", [2, pytest.param(-2, marks=pytest.mark.slow)])
def test_every_row_reaches_one_rank_in_equal_steps(spark, num_proc):
    df = spark.range(0, 101, 1, 3).selectExpr("id", "cast(id as float) as x", "cast(2 * id as float) as z")
    results = run_on_dataframe(seen, df, num_proc=num_proc, batch_size=8, labels=["id"], kwargs={"shift": 1})
    assert [rank for rank, _, _ in results] == [0, 1]
    assert {steps for _, steps, _ in results} == {7}
    assert sorted(results[0][2] + results[1][2]) == list(range(1, 102))


def test_a_function_may_open_its_own_group_and_train_on_its_loader(spark):
    def train(loader):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.zeros(1)
        for batch in loader:
            total += batch["features"].sum()
        dist.all_reduce(total)
        return total.item()

    df = spark.range(100).selectExpr("cast(id as float) as a", "cast(1 as float) as b")
    assert run_on_dataframe(train, df, num_proc=2, batch_size=np.int64(10)) == [5050.0, 5050.0]


def test_wrong_keywords_and_columns_are_refused(spark, tmp_path):
    df = spark.range(10)
    with pytest.raises(ConfigError, match="no keyword epochs"):
        run_on_dataframe(seen, df, epochs=2)
    with pytest.raises(ConfigError, match="batch_size='8' is no number of rows"):
        run_on_dataframe(seen, df, batch_size="8")
    for wrong in (np.int64(0), 2.0, True):
        with pytest.raises(ConfigError, match=r"batch_size=.* is no number of rows"):
            run_on_dataframe(seen, df, batch_size=wrong)
    with pytest.raises(ConfigError, match="store=3 is a int"):
        run_on_dataframe(seen, df, store=3)
    with pytest.raises(ConfigError, match="layout=3 is a int"):
        run_on_dataframe(seen, df, layout=3)
    with pytest.raises(ConfigError, match="labels='id' is one string"):
        run_on_dataframe(seen, df, labels="id")
    with pytest.raises(ConfigError, match="shuffle='no' is a str"):
        run_on_dataframe(seen, df, shuffle="no")
    with pytest.raises(SchemaError, match="'label' is missing"):
        run_on_dataframe(seen, df, labels=["label"], store=str(tmp_path))
    assert not list(tmp_path.rglob("*.arrow"))


class Held(Store):
    """A store whose shards nobody may delete."""

    def discard_shards(self, uri, *, pinned):
        raise StorageError(f"{uri} cannot be deleted")


def test_shards_that_cannot_be_removed_cost_no_value_of_the_ranks(spark, tmp_path, caplog):
    df = spark.range(0, 10, 1, 1)
    assert run_on_dataframe(seen, df, num_proc=1, store=Held(prefix_path=str(tmp_path)))[0][1] == 1
    assert "intermediate shards were not removed" in caplog.text
