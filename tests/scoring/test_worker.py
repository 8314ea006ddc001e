"""The worker's part of scoring, without Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError
from sparkdl.models.bundle import Signature, TensorField
from sparkdl.scoring import models
from sparkdl.scoring.inputs import InputPlan, Part
from sparkdl.scoring.outputs import Kept
from sparkdl.scoring.worker import Scorer


class Counted:
    """A source that counts how often it is asked."""

    key = "counted"

    def __init__(self):
        self.loads = 0

    def load(self, device):
        self.loads += 1
        return nn.ReLU(inplace=True)


@pytest.fixture
def scorer(monkeypatch):
    monkeypatch.setattr(models, "_models", type(models._models)())
    field = TensorField(name="x", shape=(2,), columns=("a", "b"))
    signature = Signature(inputs=(field,), outputs=(TensorField(name="y", shape=(2,)),))
    plan = InputPlan(field, (Part("pack", None, ("a", "b")),))
    return Scorer(
        source=Counted(),
        signature=signature,
        inputs=(plan,),
        columns=("y",),
        kept=(Kept("b", "pack", 1), Kept("pack", "pack")),
        config=ScoreConfig(batch_rows=2, device="cpu", threads=1),
    )


def pack(rows):
    return pa.RecordBatch.from_pydict({"pack": pa.array(rows, pa.list_(pa.float32()))})


def test_a_model_that_writes_into_its_input_does_not_change_what_is_kept(scorer):
    out = list(scorer(iter([pack([[-1.0, 2.0], [3.0, -4.0]])])))
    assert out[0].column("pack").to_pylist() == [[-1.0, 2.0], [3.0, -4.0]]
    assert out[0].column("b").to_pylist() == [2.0, -4.0]
    assert out[0].column("y").to_pylist() == [[0.0, 2.0], [3.0, 0.0]]


def test_the_model_is_loaded_once_a_process_and_not_at_all_without_rows(scorer):
    assert list(scorer(iter([]))) == []
    assert scorer.source.loads == 0
    for _ in range(3):
        assert sum(batch.num_rows for batch in scorer(iter([pack([[1.0, 1.0]] * 5)]))) == 5
    assert scorer.source.loads == 1


def test_threads_are_those_asked_for(scorer):
    before = torch.get_num_threads()
    try:
        list(scorer(iter([pack([[1.0, 1.0]])])))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


class Attention(nn.Module):
    """Attends over the elements of a row, and normalises what comes out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.attention = nn.Embedding(10, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.norm.running_mean.fill_(0.3)

    def head(self, tokens, padding):
        hidden = self.table(tokens)
        seen = padding & ~padding.all(1, keepdim=True)  # a row without elements attends to its padding
        hidden = self.attention(hidden, hidden, hidden, key_padding_mask=seen, need_weights=False)[0]
        return self.out(self.norm((hidden * ~padding[:, :, None]).sum(1)))


class ByMask(Attention):
    def forward(self, tokens, tokens_mask):
        return self.head(tokens, ~tokens_mask)


class ByLengths(Attention):
    def forward(self, tokens, tokens_lengths):
        return self.head(tokens, torch.arange(tokens.shape[1]) >= tokens_lengths[:, None])


class ByOffsets(Attention):
    def forward(self, tokens, tokens_offsets):
        bags = nn.functional.embedding_bag(tokens, self.table.weight, tokens_offsets)
        return self.out(self.norm(bags))


class Jagged(Attention):
    def forward(self, tokens_jagged):
        sums = torch.stack([self.table(row).sum(0) for row in tokens_jagged.unbind()])
        return self.out(self.norm(sums))


class Ready:
    """A source of a model that is there already."""

    def __init__(self, model):
        self.model, self.key = model, str(id(model))

    def load(self, device):
        return self.model


def ragged_scorer(model, beside, form, batch_rows):
    name = "tokens_jagged" if form == "jagged" else "tokens"
    fields = [TensorField(name=name, dtype="int64", shape=(None,), columns=("tokens",), form=form)]
    if beside:
        shape, dtype = ((None,), "bool") if beside == "mask" else ((), "int64")
        fields.append(TensorField(name=f"tokens_{beside}", dtype=dtype, shape=shape, form=beside, of="tokens"))
    signature = Signature(inputs=tuple(fields), outputs=(TensorField(name="y"),), call="keywords")
    plans = [InputPlan(fields[0], (Part("tokens", None, ("tokens",)),))]
    plans += [InputPlan(field, (), of="tokens") for field in fields[1:]]
    config = ScoreConfig(batch_rows=batch_rows, device="cpu", threads=1)
    source = Ready(model.eval())
    return Scorer(source=source, signature=signature, inputs=tuple(plans), columns=("y",), kept=(), config=config)


def column(rows):
    return pa.RecordBatch.from_pydict({"tokens": pa.array(rows, pa.list_(pa.int64()))})


@pytest.mark.parametrize(
    ("kind", "beside", "form"),
    [
        (ByMask, "mask", "padded"),
        (ByLengths, "lengths", "padded"),
        (ByOffsets, "offsets", "flat"),
        (Jagged, "", "jagged"),
    ],
)
def test_a_prediction_never_depends_on_the_rows_that_share_its_batch(kind, beside, form):
    model = kind()
    rows_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=7), min_size=1, max_size=12)

    @settings(deadline=None, max_examples=40)
    @given(rows_of_ids, st.integers(1, 13), st.randoms())
    def check(rows, batch_rows, random):
        singly = {str(row): ragged_scorer(model, beside, form, 1)(iter([column([row])])) for row in rows}
        alone = {row: next(scored)["y"][0] for row, scored in singly.items()}
        random.shuffle(rows)
        found = [y for out in ragged_scorer(model, beside, form, batch_rows)(iter([column(rows)])) for y in out["y"]]
        for row, y in zip(rows, found, strict=True):
            assert y.as_py() == pytest.approx(alone[str(row)].as_py(), abs=1e-6)

    check()


class Sums(nn.Module):
    """The sum of each row."""

    def forward(self, x):
        return x.flatten(1).sum(1)


VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def wide(kind):
    return {"type": 1, "values": [1.0, 2.0, 3.0]} if kind == VECTOR else [1.0, 2.0, 3.0]


@pytest.mark.parametrize("batch_rows", [1, 2, 4])
@pytest.mark.parametrize("columns", [("v",), ("v", "n")])
@pytest.mark.parametrize("kind", [VECTOR, pa.list_(pa.float32()), pa.list_(pa.float32(), 3)], ids=str)
def test_a_row_without_its_vector_has_no_prediction_whatever_its_neighbours_have(kind, columns, batch_rows):
    field = TensorField(name="x", shape=(len(columns) + 2,), columns=columns)
    scorer = Scorer(
        source=Ready(Sums()),
        signature=Signature(inputs=(field,), outputs=(TensorField(name="y"),)),
        inputs=(InputPlan(field, tuple(Part(name, None, (name,)) for name in columns)),),
        columns=("y",),
        kept=(),
        config=ScoreConfig(batch_rows=batch_rows, nulls="null", device="cpu", threads=1),
    )
    rows = {"v": pa.array([None, None, wide(kind), None], kind), "n": pa.array([0.0] * 4)}
    found = [y for out in scorer(iter([pa.RecordBatch.from_pydict(rows)])) for y in out["y"].to_pylist()]
    assert found == [None, None, 6.0, None]


def test_settings_are_checked():
    for wrong in ({"batch_rows": 0}, {"nulls": "drop"}, {"threads": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ScoreConfig(**wrong)
