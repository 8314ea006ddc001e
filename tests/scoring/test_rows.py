"""Rows in memory that no model can take are refused in one sentence; a module in memory scores as it is by now."""

from __future__ import annotations

import datetime
from dataclasses import replace
from fractions import Fraction

import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.models import HeldModule
from sparkdl.scoring.rows import score_rows

SIGNATURE = Signature(
    inputs=(TensorField(name="x", shape=(1,), columns=("a",)),), outputs=(TensorField(name="y"),)
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pd.DataFrame([[1.0, 2.0]], columns=["a", "a"]), r"the columns \['a'\] more than once"),
        (pa.table([[1.0], [2.0]], names=["a", "a"]), r"the columns \['a'\] more than once"),
        (pd.DataFrame({"a": [1j]}), "of a type that Arrow has not"),
        (pd.DataFrame({"a": [Fraction(1, 3)]}), "a column of the rows"),
        (pd.DataFrame({"a": [1.0, "x"]}), "mixes types"),
        (pd.DataFrame({"b": [1.0]}), r"needs the columns \['a'\]"),
    ],
)
def test_rows_that_no_model_can_take(rows, message):
    with pytest.raises(SchemaError, match=message):
        score_rows(nn.Linear(1, 1), rows, signature=SIGNATURE)


def test_another_column_may_be_there_twice():
    rows = pd.DataFrame([[1.0, 2.0, 3.0]], columns=["a", "b", "b"])
    assert score_rows(nn.Linear(1, 1), rows, signature=SIGNATURE).num_rows == 1


def test_a_module_that_was_trained_further_scores_with_its_new_weights():
    model, rows = nn.Linear(1, 1), pd.DataFrame({"a": [2.0]})
    for weight in (1.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(weight)
            model.bias.zero_()
        assert score_rows(model, rows, signature=SIGNATURE)["y"].to_pylist() == [2 * weight]


def test_a_module_in_training_is_asked_in_evaluation_mode_and_trains_on_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), nn.BatchNorm1d(1))
    model[0].eval()
    with torch.no_grad():
        model[2].running_mean.fill_(3.0)
    wanted = nn.Sequential(*model).eval()(torch.tensor([[1.0], [2.0]])).flatten().tolist()
    model.train()
    model[0].eval()
    rows, threads = pd.DataFrame({"a": [1.0, 2.0]}), torch.get_num_threads()
    one_thread = ScoreConfig(threads=1 if threads > 1 else 2)
    assert score_rows(model, rows, signature=SIGNATURE, config=one_thread)["y"].to_pylist() == wanted
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert model[2].num_batches_tracked == 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("dtype", "answer", "message"),
    [
        ("int64", lambda x: x / 3, "returns float32 as output 'y', which its signature says is int64"),
        ("float32", lambda x: x.long() + 2**24, "returns int64 as output 'y', which its signature says is float32"),
        ("float32", lambda x: x.to(torch.complex64), "returns complex64 as output 'y'"),
    ],
)
def test_an_answer_that_is_no_number_of_the_signature_is_refused(dtype, answer, message, shape):
    class Model(nn.Module):
        def forward(self, x):
            return answer(x)

    signature = replace(SIGNATURE, outputs=(TensorField(name="y", dtype=dtype, shape=shape),))
    with pytest.raises(SchemaError, match=f"the model {message}"):
        score_rows(Model(), pd.DataFrame({"a": [1.0]}), signature=signature)


@pytest.mark.parametrize("device", ["gpu", ""])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match=f"^device='{device}' cannot be used here "):
        score_rows(nn.Linear(1, 1), pd.DataFrame({"a": [1.0]}), signature=SIGNATURE, config=ScoreConfig(device=device))


def test_a_module_is_copied_to_another_device_and_stays_where_it_was():
    model = nn.BatchNorm1d(3)
    assert HeldModule(model).load("cpu") is model
    copied = HeldModule(model).load("meta")  # a device that every machine has
    assert copied.running_mean.is_meta
    assert copied.weight.is_meta
    assert model.running_mean.is_cpu
    assert model.weight.is_cpu


def test_dates_are_not_taken_for_moments_nor_numbers_for_dates():
    dates = Signature(
        inputs=(TensorField(name="a", dtype="int32", shape=(1,), columns=("day",), logical="date"),),
        outputs=(TensorField(name="y", dtype="int32", shape=(1,)),),
    )
    day = datetime.date(1970, 1, 11)
    assert score_rows(nn.Identity(), pd.DataFrame({"day": [day]}), signature=dates)["y"].to_pylist() == [[10]]
    for other in (pd.to_datetime([day]), [10]):
        with pytest.raises(SchemaError, match=r"column 'day' is of type .* and the model was trained on dates: cast"):
            score_rows(nn.Identity(), pd.DataFrame({"day": other}), signature=dates)
