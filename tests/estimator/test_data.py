"""Which shards of a pinned table version a fit finds again."""

import functools
import importlib
import sys

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.estimator import Store, TorchEstimator
from sparkdl.estimator.data import _spark_type, _stem
from sparkdl.estimator.fit_spec import resolve
from sparkdl.shards.manifest import Source


@pytest.fixture
def spec(tmp_path):
    def make(**params):
        net = nn.Linear(1, 1)
        given = {"model": net, "optimizer": torch.optim.SGD(net.parameters()), "loss": nn.MSELoss()}
        return resolve(TorchEstimator(**given, **params), store=Store.create(str(tmp_path)), num_proc=2)

    return make


def test_shards_of_a_table_version_are_not_taken_for_those_of_another_transformation(spec):
    def stem(function, **more):
        fields = {"transformation_edit_fields": [("features", "float32", (), False)]}
        return _stem(Source(uri="/table", version="3"), spec(transformation_fn=function, **fields, **more))

    def double(rows):
        return rows * 2

    doubled = stem(double)
    assert doubled == stem(double)
    assert doubled != stem(lambda rows: rows * 3)
    assert doubled != stem(double, random_seed=5)


@pytest.mark.parametrize("wrapped", [lambda function: function, functools.partial])
def test_shards_are_not_taken_for_those_of_a_module_whose_constants_were_others(spec, tmp_path, monkeypatch, wrapped):
    monkeypatch.syspath_prepend(tmp_path)

    def stem(scale):
        code = f"SCALE = {scale}\n\n\ndef scaled(rows):\n    return rows * SCALE\n"
        (tmp_path / "module_of_scaled.py").write_text(code)
        monkeypatch.delitem(sys.modules, "module_of_scaled", raising=False)
        function = wrapped(importlib.import_module("module_of_scaled").scaled)
        return _stem(Source(uri="/table", version="3"), spec(transformation_fn=function))

    assert stem(1) == stem(1) != stem(100)


@pytest.mark.parametrize("dtype", [torch.float32, "string", "varchar(3)", str, "uint64"])
def test_a_dtype_of_a_transformed_column_that_no_shard_holds_is_one_sentence(dtype):
    with pytest.raises(ConfigError, match=r"^transformation_edit_fields gives 'z' the dtype .*: choose among \['bool'"):
        _spark_type("z", dtype, ())


def test_shards_of_a_table_are_not_those_of_another_one_at_its_address(spec):
    made, again = (_stem(Source(uri="/t", version="0", table_id=text), spec()) for text in ("a", "b"))
    assert made != again
