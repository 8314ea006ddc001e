"""Which shards of a pinned table version a fit finds again."""

import torch
from torch import nn

from sparkdl.estimator import TorchEstimator
from sparkdl.estimator.fit.data import _stem
from sparkdl.shards.manifest import Source


def estimator(**params):
    net = nn.Linear(1, 1)
    return TorchEstimator(model=net, optimizer=torch.optim.SGD(net.parameters()), loss=nn.MSELoss(), **params)


def test_shards_of_a_table_version_are_not_taken_for_those_of_another_transformation():
    def stem(function, **more):
        fields = {"transformation_edit_fields": [("features", "float32", (), False)]}
        return _stem(Source(uri="/table", version="3"), estimator(transformation_fn=function, **fields, **more), 2, "f")

    def double(rows):
        return rows * 2

    doubled = stem(double)
    assert doubled == stem(double)
    assert doubled != stem(lambda rows: rows * 3)
    assert doubled != stem(double, random_seed=5)


def test_shards_of_a_table_are_not_those_of_another_one_at_its_address():
    made, again = (_stem(Source(uri="/t", version="0", table_id=text), estimator(), 2, "f") for text in ("a", "b"))
    assert made != again
