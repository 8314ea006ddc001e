from dataclasses import replace

import pytest
import torch

from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.model_call import ModelInput, probe, signature_of, two_rows
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
FEATURES = (ModelInput("features", "features"),)
COLUMNS = (ModelInput("a", "features", 0), ModelInput("b", "features", 1))


def test_the_two_rows_hold_the_extremes_of_every_column():
    batch = two_rows(SET)
    assert batch["features"].tolist() == [[-1, 0], [1, 5]]
    assert batch["id"].tolist() == [0, 9]
    assert batch["v"].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert batch["id"].dtype == torch.int64


def test_the_shape_of_each_output_is_known_before_training():
    found = probe(torch.nn.Linear(2, 4), FEATURES, COLUMNS, [SET], ["y"])
    assert found.outputs[0].shape == (4,)
    assert found.outputs[0].label == "y"
    assert found.call.style == "positional"


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
def test_a_model_is_called_in_its_own_manner_and_torch_does_not_warn_of_others(model, style, answer, recwarn):
    found = probe(model, FEATURES, COLUMNS, [SET], ["y"])
    assert not recwarn.list
    assert found.call.style == style
    assert found.returned.tolist() == answer


def test_integers_become_floats_only_for_a_model_that_takes_them_no_other_way():
    ids = (ModelInput("id", "id", shape=(-1, 1)),)
    assert probe(torch.nn.Linear(1, 1), ids, ids, [SET], ["y"]).call.inputs[0].dtype == "float32"
    assert probe(torch.nn.Embedding(10, 2), ids, ids, [SET], ["y"]).call.inputs[0].dtype is None


def test_an_id_beyond_the_table_is_a_data_error_that_names_the_column_and_its_range():
    ids = (ModelInput("id", "id"),)
    with pytest.raises(DataError, match=r"id in 0\.\.9"):
        probe(torch.nn.Embedding(9, 2), ids, ids, [SET], ["y"])


def test_wrong_sizes_name_the_inputs_as_the_model_would_get_them():
    with pytest.raises(ConfigError, match=r"Linear cannot be called with features \(-1, 2\) float32"):
        probe(torch.nn.Linear(3, 1), FEATURES, COLUMNS, [SET], ["y"])


class Faulty(torch.nn.Module):
    """Fails as told; its shapes and dtypes fit."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.layer = fault, torch.nn.Linear(2, 1)

    def forward(self, x):
        self.fault(self, x)
        return self.layer(x)


def refuse(*_):
    raise ValueError("no weights were loaded")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda *_: undefined_name, "NameError: name 'undefined_name' is not defined"),  # noqa: F821
        (lambda model, _: model.lair, "AttributeError: 'Faulty' object has no attribute 'lair'"),
        (lambda *_: {}["key"], "KeyError: 'key'"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
        (refuse, "ValueError: no weights were loaded"),
    ],
)
def test_a_fault_of_forward_is_named_with_its_line_and_blamed_on_no_shape(fault, told):
    with pytest.raises(ConfigError) as caught:
        probe(Faulty(fault), FEATURES, COLUMNS, [SET], ["y"])
    message = str(caught.value)
    assert message.startswith(f"forward of Faulty raised {told} at {__file__}:")
    assert message.endswith("called with features (-1, 2) float32: correct it there")
    assert "input_shapes" not in message


def test_too_many_inputs_and_wrong_sizes_are_told_apart_from_faults():
    class One(torch.nn.Module):
        def forward(self, x):
            return x @ torch.ones(3)

    two = (ModelInput("a", "features", 0, shape=(-1, 1)), ModelInput("b", "features", 1, shape=(-1, 1)))
    hint = "set input_shapes, feature_dtypes or feature_cols$"
    with pytest.raises(ConfigError, match=f"takes 2 positional arguments but 3 were given.*{hint}"):
        probe(torch.nn.Sequential(torch.nn.Linear(2, 1)), two, COLUMNS, [SET], ["y"])
    with pytest.raises(ConfigError, match=f"RuntimeError: size mismatch.*{hint}"):
        probe(One(), FEATURES, COLUMNS, [SET], ["y"])
    with pytest.raises(ConfigError, match=r"set input_shapes or feature_cols$"):  # dtypes of written shards stay
        probe(One(), FEATURES, COLUMNS, [SET], ["y"], written=False)


def test_an_index_error_of_forward_is_no_id_beyond_a_table():
    class Last(torch.nn.Module):
        def forward(self, ids):
            return [ids.float()][1]

    ids = (ModelInput("id", "id"),)
    with pytest.raises(ConfigError, match="list index out of range"):
        probe(Last(), ids, ids, [SET], ["y"])


def test_a_model_that_loses_rows_or_outputs_is_refused():
    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean()

    with pytest.raises(ConfigError, match="for 2 rows"):
        probe(Mean(), FEATURES, COLUMNS, [SET], ["y"])
    with pytest.raises(ConfigError, match="1 outputs for 2 labels"):
        probe(torch.nn.Linear(2, 1), FEATURES, COLUMNS, [SET], ["y", "z"])


def test_probing_leaves_model_and_random_state_untouched():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    probe(model, FEATURES, COLUMNS, [SET], ["y"])
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


RAGGED = manifest(
    TensorSpec(name="tokens", dtype="int64", ragged=True, columns=("tokens",)),
    TensorSpec(name="features", dtype="float32", shape=(2,), columns=("a", "b")),
    TensorSpec(name="y", dtype="float32", columns=("y",), role="label"),
    tokens=ColumnStats(count=30, min=0, max=9, min_length=1, max_length=4),
    a=ColumnStats(count=10, min=-1.0, max=1.0),
    b=ColumnStats(count=10, min=0.0, max=5.0),
)
TOKENS = (ModelInput("tokens", "tokens"),)


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 3)

    def mean(self, tokens, mask):
        return (self.table(tokens) * mask[:, :, None]).sum((1, 2)) / mask.sum(1).clamp(min=1)


class Mask(Masked):
    def forward(self, tokens, tokens_mask):
        return self.mean(tokens, tokens_mask)


class HuggingFace(Masked):
    def forward(self, input_ids, scale=1.0, attention_mask=None):
        return self.mean(input_ids, attention_mask) * scale


class PaddingMask(Masked):
    def forward(self, ids, *, key_padding_mask):
        return self.mean(ids, ~key_padding_mask)


class Lengths(Masked):
    def forward(self, ids, lengths):
        return self.mean(ids, torch.arange(ids.shape[1]) < lengths[:, None])


class Offsets(Masked):
    def forward(self, text, offsets):
        return torch.nn.functional.embedding_bag(text, self.table.weight, offsets).sum(1)


class Jagged(Masked):
    def forward(self, tokens_jagged):
        return torch.stack([self.table(row).mean(0).sum() for row in tokens_jagged.unbind()])


class InADict(Masked):
    def forward(self, row: dict):
        return self.mean(row["tokens"], row["tokens_mask"]) + row["tokens_lengths"] * 0


class Rest(Masked):
    def forward(self, *columns, mask):
        return self.mean(columns[0], mask)


@pytest.mark.parametrize("kind", [Mask, HuggingFace, PaddingMask, Lengths, Offsets, Jagged, InADict, Rest])
def test_a_model_gets_rows_of_varying_length_in_the_form_it_asks_for(kind):
    torch.manual_seed(0)
    model = kind()
    found = probe(model, TOKENS, TOKENS, [RAGGED], ["y"])
    rows = [torch.full((1,), 9), torch.zeros(4, dtype=torch.int64)]
    expected = [model.table(row).mean(0).sum().item() for row in rows]
    assert found.returned.tolist() == pytest.approx(expected, rel=1e-5)


class Beside(Masked):
    def forward(self, numbers, tokens_mask, tokens):
        return self.mean(tokens, tokens_mask) + numbers.sum(1)


def test_other_inputs_keep_their_places_beside_a_mask():
    inputs = (ModelInput("features", "features"), *TOKENS)
    torch.manual_seed(0)
    model = Beside()
    found = probe(model, inputs, (*COLUMNS, *TOKENS), [RAGGED], ["y"])
    batch = two_rows(RAGGED)
    assert found.call.style == "keywords"
    expected = model.mean(batch["tokens"], batch["tokens__valid"]) + batch["features"].sum(1)
    assert torch.allclose(found.returned, expected)


class Predictors(Masked):
    def forward(self, predictors):
        return self.table(predictors).mean((1, 2))


@pytest.mark.parametrize(
    "model", [torch.nn.Sequential(torch.nn.Embedding(10, 2), torch.nn.Flatten()), ByName(), Predictors()]
)
def test_a_model_that_cannot_tell_elements_from_padding_is_refused(model):
    with pytest.raises(ConfigError, match=r"'tokens' have 1 to 4 elements.*tokens_mask, tokens_lengths.*input_shapes"):
        probe(model, TOKENS, TOKENS, [RAGGED], ["y"])


class Ignores(Masked):
    def forward(self, tokens, mask):
        return self.table(tokens).mean((1, 2))


def test_a_model_that_ignores_its_mask_is_refused_with_both_answers():
    with pytest.raises(ConfigError, match=r"Ignores answers a row with .* and with .* when a longer row is beside it"):
        probe(Ignores(), TOKENS, TOKENS, [RAGGED], ["y"])


class EachToken(Masked):
    def forward(self, tokens, mask):
        return self.table(tokens).sum(2) * mask


def test_an_output_as_long_as_the_longest_row_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(1,\) for a row of 'y', and \(4,\) when a longer row"):
        probe(EachToken(), TOKENS, TOKENS, [RAGGED], ["y"])


def arrays(least, most, rows=10):
    held = manifest(
        TensorSpec(name="v", dtype="float32", ragged=True, columns=("v",)),
        TensorSpec(name="y", dtype="float32", columns=("y",), role="label"),
        v=ColumnStats(count=rows * most, min=-1.0, max=1.0, min_length=least, max_length=most),
    )
    return replace(held, rows=rows)


ARRAY = (ModelInput("v", "v"),)


def test_rows_that_all_have_one_length_are_fixed_at_it():
    found = probe(torch.nn.Linear(64, 10), ARRAY, ARRAY, [arrays(64, 64), arrays(64, 64)], ["y"])
    assert found.call.inputs == (ModelInput("v", "v", shape=(-1, 64)),)
    (field,) = signature_of(found, arrays(64, 64)).inputs
    assert field.shape == (64,)


@pytest.mark.parametrize("other", [arrays(1, 1), arrays(1, 2), arrays(3, 3)])
def test_rows_of_another_length_in_the_validation_set_are_refused(other):
    least, most = min(2, other.statistics["v"].min_length), max(2, other.statistics["v"].max_length)
    with pytest.raises(ConfigError, match=rf"'v' have {least} to {most} elements, and forward\(input\) of Linear"):
        probe(torch.nn.Linear(2, 1), ARRAY, ARRAY, [arrays(2, 2), other], ["y"])
    empty = Manifest(rows=0, bytes=0, shards=(), tensors=())
    assert probe(torch.nn.Linear(2, 1), ARRAY, ARRAY, [arrays(2, 2), empty], ["y"]).call.inputs[0].shape == (-1, 2)


def test_rows_whose_lengths_nobody_counted_are_not_taken_for_even():
    held = replace(arrays(2, 2), statistics={})
    with pytest.raises(ConfigError, match="'v' may differ in length"):
        probe(torch.nn.Linear(2, 1), ARRAY, ARRAY, [held], ["y"])


class SumsItsDict(torch.nn.Module):
    def forward(self, row: dict):
        return row["v"] @ torch.ones(3, 1)


class MeanByMask(torch.nn.Module):
    def forward(self, v, v_mask):
        return (v * v_mask).sum(1) / v_mask.sum(1).clamp(min=1)


def test_a_dict_that_is_read_without_its_mask_is_fixed_and_a_mask_keeps_other_lengths_open():
    assert probe(SumsItsDict(), ARRAY, ARRAY, [arrays(3, 3)], ["y"]).call.inputs[0].shape == (-1, 3)
    with pytest.raises(ConfigError):
        probe(SumsItsDict(), ARRAY, ARRAY, [arrays(2, 3)], ["y"])
    open_row, mask = probe(MeanByMask(), ARRAY, ARRAY, [arrays(3, 3)], ["y"]).call.inputs
    assert (open_row.shape, open_row.form, mask.form) == (None, "padded", "mask")


class Centred(torch.nn.Module):
    """Subtracts the mean of the batch, as no evaluation may."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)

    def forward(self, rows):
        hidden = self.first(rows)
        return self.last(hidden - hidden.mean(0))


def test_a_model_that_answers_a_row_by_its_neighbours_is_refused_with_the_layer():
    with pytest.raises(ConfigError, match=r"Centred answers a row with .* first in last \(Linear\)"):
        probe(Centred(), FEATURES, COLUMNS, [SET], ["y"])
    norms = torch.nn.BatchNorm1d(2), torch.nn.Dropout(), torch.nn.Linear(2, 1)
    assert probe(torch.nn.Sequential(*norms), FEATURES, COLUMNS, [SET], ["y"])
    huge = replace(SET, statistics={n: replace(s, min=-1e12, max=3e15) for n, s in SET.statistics.items()})
    assert probe(
        torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.Linear(300, 1)), FEATURES, COLUMNS, [huge], ["y"]
    )


def test_batch_norm_without_running_statistics_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, track_running_stats=False), torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"the layer 0 \(BatchNorm1d\) keeps no running statistics"):
        probe(model, FEATURES, COLUMNS, [SET], ["y"])
    with pytest.raises(ConfigError, match=r"the layer 0 \(BatchNorm1d\)"):
        TorchModel(model=model)
    apart = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 2)), torch.nn.InstanceNorm1d(1), torch.nn.Flatten())
    assert probe(apart, FEATURES, COLUMNS, [SET], ["y"])


def test_bytes_of_other_lengths_than_declared_are_refused():
    images = manifest(
        TensorSpec(name="img", dtype="binary", columns=("img",)),
        TensorSpec(name="y", dtype="float32", columns=("y",), role="label"),
        img=ColumnStats(count=10, min=3, max=4),
    )
    view = (ModelInput("img", "img", shape=(-1, 2, 2)),)
    with pytest.raises(ConfigError, match="3 to 4 bytes: 4 bytes a row"):
        probe(torch.nn.Flatten(), view, view, [images], ["y"])


class TwoTables(torch.nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(size, 1) for size in sizes)

    def forward(self, ids):
        return sum(table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True))


def test_a_vector_of_ids_may_hold_in_each_place_those_of_a_table_of_its_own():
    ids = manifest(
        TensorSpec(name="ids", dtype="int64", shape=(2,), columns=("ids",)),
        TensorSpec(name="y", dtype="float32", columns=("y",), role="label"),
        ids=ColumnStats(count=20, min=1, max=7),
        y=ColumnStats(count=10, min=0.0, max=2.0),
    )
    view = (ModelInput("ids", "ids"),)
    assert probe(TwoTables(4, 8), view, view, [ids], ["y"]).outputs[0].label == "y"
    with pytest.raises(DataError, match=r"beyond the model's table .* ids in 1\.\.7"):
        probe(TwoTables(4, 1), view, view, [ids], ["y"])
