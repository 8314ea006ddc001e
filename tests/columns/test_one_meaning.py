"""The tensor that training saw is the tensor that scoring sees, for every type of the type table.

The same Arrow column goes both ways: through a shard set and a loader, and through the function of a scoring task with
a model that returns its input.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.decode import decode
from sparkdl.columns.layout import Layout
from sparkdl.columns.matrices import matrix_of
from sparkdl.config import ScoreConfig
from sparkdl.errors import DataError, SchemaError
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.inputs import InputPlan, Part
from sparkdl.scoring.models import ModuleSource
from sparkdl.scoring.worker import Scorer
from sparkdl.shards.files import write_table_shards

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
DENSE = {"type": 1, "size": None, "indices": None, "values": [1.0, 0.0, -2.5]}
SPARSE = {"type": 0, "size": 3, "indices": [2], "values": [7.25]}
DAY, HALF_A_SECOND = dt.date(1969, 12, 30), dt.timedelta(microseconds=500_001)
INSTANT = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999)

COLUMNS = {
    **{f"int{n}": pa.array([-3, 0, 2 ** (n - 1) - 1], f"int{n}") for n in (8, 16, 32, 64)},
    "uint8": pa.array([0, 1, 255], pa.uint8()),
    "half": pa.array(np.array([1.5, -0.25, 65504.0], np.float16)),
    "float": pa.array([1.1, float("nan"), float("inf")], pa.float32()),
    "double": pa.array([1.1, -1e300, 5e-324], pa.float64()),
    "bool": pa.array([True, False, True]),
    "decimal": pa.array([Decimal("1.25"), Decimal("-0.07"), Decimal("99999999.99")], pa.decimal128(10, 2)),
    "large_decimal": pa.array([Decimal("0.1"), Decimal(12345678901234567890), Decimal("-1.5")], pa.decimal128(38, 18)),
    "date32": pa.array([DAY, dt.date(1970, 1, 1), dt.date(2024, 2, 29)]),
    "date64": pa.array([DAY, dt.date(1970, 1, 1), dt.date(2024, 2, 29)], pa.date64()),
    "instant": pa.array([INSTANT, INSTANT + HALF_A_SECOND, INSTANT], pa.timestamp("us", "America/New_York")),
    "wall_clock": pa.array([INSTANT, INSTANT + HALF_A_SECOND, INSTANT], pa.timestamp("us")),
    "milliseconds": pa.array([-1, 0, 1_700_000_000_123], pa.timestamp("ms", "UTC")),
    "nanoseconds": pa.array([-1000, 0, 1_700_000_000_123_456_000], pa.timestamp("ns")),
    "bytes": pa.array([b"\x00\xff", b"ab", b"zz"]),
    "fixed_list": pa.array([[1.5, 2.0], [0.0, -1.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    "even_list": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16())),
    "bool_list": pa.array([[True, False], [False, False], [True, True]]),
    "decimal_list": pa.array([[Decimal("1.25")], [Decimal("0.07")], [Decimal("-3.50")]], pa.list_(pa.decimal128(5, 2))),
    "nested": pa.array([[[1, 2, 3], [4, 5, 6]]] * 3, pa.list_(pa.list_(pa.int32()))),
    "dense_vector": pa.array([DENSE] * 3, VECTOR),
    "sparse_vector": pa.array([SPARSE] * 3, VECTOR),
    "mixed_vector": pa.array([SPARSE, DENSE, SPARSE], VECTOR),
}


class Echo(torch.nn.Module):
    """Keeps what it was given."""

    seen: torch.Tensor

    def forward(self, x):
        Echo.seen = x.clone()
        return torch.zeros(len(x))


def trained_on(folder, column, **layout):
    """The tensor of a batch that a loader reads from the shards of one column, rows in the order of the column."""
    table = pa.table({"id": np.arange(len(column)), "c": column})
    manifest = write_table_shards(table, folder, labels=["id"], layout=Layout(**layout))
    dataset = ShardedDataset(folder)
    [batch] = list(dataset.loader(batch_size=len(column), shuffle=False))
    order = torch.argsort(batch["id"])
    return manifest.tensor("c"), {name: tensor[order] for name, tensor in batch.items()}


def scored_on(column, spec, nulls="error"):
    """The tensor that the model of a scoring task is given for one column."""
    field = TensorField(
        name="x",
        dtype="uint8" if spec.dtype == "binary" else spec.dtype,
        shape=(None,) if spec.ragged else (len(column[0].as_py()),) if spec.dtype == "binary" else spec.shape,
        columns=("c",),
    )
    payload = cloudpickle.dumps(Echo())
    scorer = Scorer(
        source=ModuleSource(payload, str(hash(payload))),
        signature=Signature(inputs=(field,), outputs=(TensorField(name="y"),)),
        inputs=(InputPlan(field, (Part("c", None, ("c",)),)),),
        columns=("y",),
        kept=(),
        config=ScoreConfig(nulls=nulls),
    )
    list(scorer(iter([pa.record_batch({"c": column})])))
    return Echo.seen


@pytest.mark.parametrize("name", COLUMNS)
def test_training_and_scoring_see_one_tensor(name, tmp_path):
    spec, batch = trained_on(tmp_path, COLUMNS[name])
    seen = scored_on(COLUMNS[name], spec)
    assert (seen.dtype, seen.shape) == (batch["c"].dtype, batch["c"].shape)
    assert torch.equal(seen.nan_to_num(nan=-1.0), batch["c"].nan_to_num(nan=-1.0))
    assert torch.equal(seen.isnan(), batch["c"].isnan())


@pytest.mark.parametrize("name", COLUMNS)
def test_a_slice_of_a_column_is_its_rows(name):
    """Arrow hands over views that begin anywhere in a buffer."""
    whole, part = decode(name, COLUMNS[name]), decode(name, COLUMNS[name][1:])
    here, there = (found.dense(found.elements, found.shape, 0) for found in (part, whole))
    np.testing.assert_array_equal(here, there[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "bool"])
def test_a_dtype_of_ones_own_is_cast_alike(tmp_path, dtype):
    column = pa.array([0, 1, 1], pa.int64()) if dtype == "bool" else pa.array([1.0, -7.0, 2049.0], pa.float64())
    spec, batch = trained_on(tmp_path, column, dtypes={"c": dtype})
    assert torch.equal(scored_on(column, spec), batch["c"])


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (pa.array([1.5]), "int64"),
        (pa.array([300]), "uint8"),
        (pa.array([2.0**63]), "int64"),
        (pa.array([1e39]), "float32"),
        (pa.array([65535], pa.uint16()), "float16"),
        (pa.array([2]), "bool"),
    ],
)
def test_what_training_refuses_scoring_refuses(tmp_path, column, dtype):
    with pytest.raises(DataError, match=f"'c' holds .*, which {dtype} cannot hold"):
        trained_on(tmp_path, column, dtypes={"c": dtype})
    spec, _ = trained_on(tmp_path, pa.array([1.0]), dtypes={"c": dtype})
    with pytest.raises(DataError, match=f"'c' holds .*, which {dtype} cannot hold"):
        scored_on(column, spec)


def test_ragged_rows_have_one_tensor_and_one_mask(tmp_path):
    for column in (
        pa.array([[1, 2, 3], [], [0]], pa.list_(pa.int64())),
        pa.array([b"abc", b"", b"\x00"], pa.binary()),
    ):
        _, batch = trained_on(tmp_path / str(column.type), column)
        found = matrix_of("c", column, ragged=True)
        assert torch.equal(torch.from_numpy(found.values), batch["c"])
        assert torch.equal(torch.from_numpy(found.valid), batch["c__valid"])


NULLS = {
    "double": pa.array([1.5, None, 2.5]),
    "bool": pa.array([True, None, False]),
    "decimal": pa.array([Decimal("1.25"), None, Decimal("2.50")], pa.decimal128(5, 2)),
    "instant": pa.array([INSTANT, None, INSTANT], pa.timestamp("us", "UTC")),
    "list": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float64(), 2)),
    "holes": pa.array([[1.0, None], [0.0, 0.0], None], pa.list_(pa.float64(), 2)),
    "vector": pa.array([DENSE, None, SPARSE], VECTOR),
}


@pytest.mark.parametrize("name", NULLS)
def test_nulls_are_where_both_say_they_are(name, tmp_path):
    column = NULLS[name]
    spec, batch = trained_on(tmp_path, column, nulls={"c": "mask"})
    found = matrix_of("c", column)
    width = found.values.shape[1]
    assert np.array_equal(~found.holes, batch["c__mask"].reshape(-1, width).numpy())
    assert np.array_equal(found.values.astype(batch["c"].numpy().dtype), batch["c"].reshape(-1, width).numpy())
    with pytest.raises(DataError, match="null"):
        trained_on(tmp_path / "again", column)
    with pytest.raises(DataError, match="null"):
        scored_on(column, spec)


@pytest.mark.parametrize("encoded", [False, True])
def test_strings_have_the_codes_of_training_and_no_other(tmp_path, encoded):
    spec, batch = trained_on(tmp_path, pa.array(["b", "a", "c"]))
    codes = {value: code for code, value in enumerate(spec.dictionary)}
    column = pa.array(["c", "new", None, "a"])
    found = decode("c", column.dictionary_encode() if encoded else column, codes=codes)
    assert batch["c"].tolist() == [1, 0, 2]
    assert found.dense(found.elements, (), -1).tolist() == [2, -1, -1, 0]
    assert found.missing.tolist() == [False, True, True, False]  # an unseen string is a null, never another's code
    with pytest.raises(SchemaError, match="'c' has the type string, which no tensor can hold"):
        scored_on(column, spec)


@settings(deadline=None, max_examples=200)
@given(
    precision=st.integers(1, 38),
    data=st.data(),
)
def test_a_decimal_is_the_nearest_double(precision, data):
    scale = data.draw(st.integers(0, precision))
    numbers = data.draw(st.lists(st.integers(-(10**precision) + 1, 10**precision - 1), min_size=1, max_size=20))
    values = [Decimal(f"{number}E-{scale}") for number in numbers]
    found = decode("c", pa.array(values, pa.decimal128(precision, scale)))
    assert found.elements.tolist() == [float(value) for value in values]


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (pa.array([1], pa.timestamp("ns")), "finer than microseconds .* round them first"),
        (pa.array([2**62], pa.timestamp("s")), "that microseconds since 1970 cannot hold .* leave these out"),
    ],
)
def test_times_that_microseconds_cannot_hold_are_refused_by_what_is_wrong_with_them(times, reason):
    with pytest.raises(DataError, match=f"column 'at' has times {reason}"):
        decode("at", times)


def test_a_null_in_a_dictionary_is_missing_and_no_value_that_training_never_saw():
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2, 3]), pa.array(["a", "b", None, "new"]))
    decoded = decode("town", column, codes={"a": 0, "b": 1})
    assert decoded.missing.tolist() == [False, False, True, True, True]
    assert decoded.unseen == 1
