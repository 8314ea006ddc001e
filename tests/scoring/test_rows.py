"""Rows in memory that no model can take are refused in one sentence, of a type that can be caught."""

from __future__ import annotations

from fractions import Fraction

import pandas as pd
import pyarrow as pa
import pytest
from torch import nn

from sparkdl.errors import SchemaError
from sparkdl.models.signature import Signature, TensorField
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
