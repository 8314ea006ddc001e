import pytest
import torch

from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.fit.probe import probe, two_rows
from sparkdl.estimator.fit.views import InputView
from sparkdl.shards.manifest import Manifest


def manifest(*tensors, **stats):
    return Manifest(rows=10, bytes=10, shards=(), tensors=tensors, statistics=stats)


SET = manifest(
    TensorSpec(name="features", dtype="float32", shape=(2,), columns=("a", "b")),
    TensorSpec(name="id", dtype="int64", columns=("id",)),
    TensorSpec(name="v", dtype="float32", shape=(3,), columns=("v",)),
    TensorSpec(name="y", dtype="int64", columns=("y",), role="label"),
    a=ColumnStats(count=10, min=-1.0, max=1.0),
    b=ColumnStats(count=10, min=0.0, max=5.0),
    id=ColumnStats(count=10, min=0, max=9),
    v=ColumnStats(count=30, min=0.0, max=2.0),
    y=ColumnStats(count=10, min=0, max=2),
)
FEATURES = (InputView("features", "features"),)
COLUMNS = (InputView("a", "features", 0), InputView("b", "features", 1))


def test_the_two_rows_hold_the_extremes_of_every_column():
    batch = two_rows(SET)
    assert batch["features"].tolist() == [[-1, 0], [1, 5]]
    assert batch["id"].tolist() == [0, 9]
    assert batch["v"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert batch["id"].dtype == torch.int64


def test_the_shape_of_each_output_is_known_before_training():
    found = probe(torch.nn.Linear(2, 4), FEATURES, COLUMNS, SET, ["y"])
    assert found.outputs[0].shape == (4,)
    assert found.outputs[0].label == "y"
    assert found.views.style == "positional"


class ByName(torch.nn.Module):
    def forward(self, b, a):
        return a - b


class ByDict(torch.nn.Module):
    def forward(self, row):
        return row["a"] * row["b"]


class Typed(torch.nn.Module):
    def forward(self, columns: dict[str, torch.Tensor]):
        return columns["b"] + len(columns)


@pytest.mark.parametrize(
    ("model", "style", "answer"),
    [(ByName(), "keywords", [-1, -4]), (ByDict(), "dict", [0, 5]), (Typed(), "dict", [2, 7])],
)
def test_a_model_is_called_in_its_own_manner(model, style, answer):
    found = probe(model, FEATURES, COLUMNS, SET, ["y"])
    assert found.views.style == style
    assert found.returned.tolist() == answer


def test_integers_become_floats_only_for_a_model_that_takes_them_no_other_way():
    ids = (InputView("id", "id", shape=(-1, 1)),)
    assert probe(torch.nn.Linear(1, 1), ids, ids, SET, ["y"]).views.inputs[0].dtype == "float32"
    assert probe(torch.nn.Embedding(10, 2), ids, ids, SET, ["y"]).views.inputs[0].dtype is None


def test_an_id_beyond_the_table_is_a_data_error_that_names_the_column_and_its_range():
    ids = (InputView("id", "id"),)
    with pytest.raises(DataError, match=r"id in 0\.\.9"):
        probe(torch.nn.Embedding(9, 2), ids, ids, SET, ["y"])


def test_wrong_sizes_name_the_inputs_as_the_model_would_get_them():
    with pytest.raises(ConfigError, match=r"Linear cannot be called with features \(-1, 2\) float32"):
        probe(torch.nn.Linear(3, 1), FEATURES, COLUMNS, SET, ["y"])


def test_a_model_that_loses_rows_or_outputs_is_refused():
    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean()

    with pytest.raises(ConfigError, match="for 2 rows"):
        probe(Mean(), FEATURES, COLUMNS, SET, ["y"])
    with pytest.raises(ConfigError, match="1 outputs for 2 labels"):
        probe(torch.nn.Linear(2, 1), FEATURES, COLUMNS, SET, ["y", "z"])


def test_probing_leaves_model_and_random_state_untouched():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    probe(model, FEATURES, COLUMNS, SET, ["y"])
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
