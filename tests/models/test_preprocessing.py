"""What travels with a model besides its weights: features, and the types of the columns that it reads."""

from __future__ import annotations

import pyarrow as pa
import pytest
from torch import nn

from sparkdl.errors import IntegrityError
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, Text
from sparkdl.features.statistics import statistics_of
from sparkdl.models.bundle import save_bundle
from sparkdl.models.preprocessing import column_types, features_of, preprocessing_of

FEATURES = {"city": Category(min_count=1), "note": Text(min_count=1, tokens="unknown_module:cut")}


@pytest.fixture
def features():
    rows = pa.table({"city": ["Rio", "Oslo"], "note": ["a b", "b"]})
    cut = {"unknown_module:cut": str.split}
    return fit(FEATURES, statistics_of(rows, FEATURES, cut), cut)


def bundle(tmp_path, **preprocessing):
    return save_bundle(nn.Linear(2, 1), str(tmp_path / "bundle"), preprocessing=preprocessing)


def test_types_are_kept_of_the_columns_that_are_read(tmp_path, features):
    info = bundle(tmp_path, **preprocessing_of(features, {"city": "string", "other": "int"}, labels=["y"]))
    assert column_types(info) == {"city": "string"}
    assert info.preprocessing["labels"] == ["y"]
    assert preprocessing_of(None, {"a": "bigint"})["column_types"] == {"a": "bigint"}
    assert preprocessing_of(None) == preprocessing_of(None, {}) == {}


def test_features_can_be_looked_at_without_the_functions_that_they_name(tmp_path, features):
    info = bundle(tmp_path, **preprocessing_of(features))
    found = features_of(info, functions=False)
    assert (found, column_types(info)) == (features, {})


def test_types_that_are_none_are_refused(tmp_path):
    with pytest.raises(IntegrityError, match=r"preprocessing\.column_types"):
        column_types(bundle(tmp_path, column_types={"a": 3}))
