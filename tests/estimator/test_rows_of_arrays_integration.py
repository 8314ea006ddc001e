"""Columns of arrays of arrays whose rows hold different numbers of these: time series of several features."""

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import TorchEstimator

LENGTHS = (3, 1, 4, 2, 5, 1, 3, 2)


class LastState(nn.Module):
    """An LSTM over the steps of a series that are there."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, series, series_lengths):
        packed = nn.utils.rnn.pack_padded_sequence(series, series_lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 1)

    def forward(self, series):
        return self.out(series.sum(1))


def rows(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, 2, generator=generator) for length in lengths]


@pytest.fixture
def frame(spark):
    def made(series):
        table = [(number, one.tolist(), float(one.sum())) for number, one in enumerate(series)]
        return spark.createDataFrame(table, "id int, series array<array<float>>, y float").repartition(2)

    return made


def estimator(model, ranks=2, **given):
    settings = {"feature_cols": ["series"], "label_cols": ["y"], "epochs": 2, "verbose": 0, "num_proc": ranks}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings |= {"model": model, "optimizer": optimizer, "loss": nn.MSELoss(), "batch_size": 4 // ranks}
    return TorchEstimator(**settings, **given)


def made(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("given", [{}, {"input_shapes": [[-1, -1]]}])
def test_a_model_that_asks_for_lengths_sees_each_series_as_long_as_it_is(frame, given):
    series = rows()
    df = frame(series)
    fitted = estimator(made(LastState), **given).fit(df)
    model = fitted.getModel()
    with torch.no_grad():
        wanted = [float(model(one[None], torch.tensor([len(one)]))) for one in series]
    found = {row["id"]: row["y__output"] for row in fitted.transform(df).collect()}
    assert [found[number] for number in range(len(series))] == pytest.approx(wanted, abs=1e-6)


def test_two_ranks_train_what_one_trains(frame):
    df = frame(rows())
    both, alone = (estimator(made(LastState), ranks).fit(df).getModel() for ranks in (2, 1))
    for one, other in zip(both.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_series_of_one_length_need_no_lengths_and_others_are_refused(frame):
    series = rows((3,) * 8)
    df = frame(series)
    fitted = estimator(made(Sum)).fit(df)
    with torch.no_grad():
        wanted = fitted.getModel()(torch.stack(series))[:, 0].tolist()
    assert [row["y__output"] for row in fitted.transform(df).orderBy("id").collect()] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(
        ConfigError, match=r"rows of 'series' have 1 to 5 elements, and forward.series. of Sum cannot tell"
    ):
        estimator(made(Sum)).fit(frame(rows()))


def test_arrays_inside_the_rows_have_one_length_in_training_and_scoring(frame):
    wider = [torch.ones(2, 3), *rows()[1:]]
    with pytest.raises(DataError, match=r"column 'series' has arrays .*of 2 and of 3"):
        estimator(made(LastState)).fit(frame(wider).coalesce(1))
    fitted = estimator(made(LastState)).fit(frame(rows()))
    with pytest.raises(DataError, match=r"'series' has 3 numbers in each element of its rows, and the model .* with 2"):
        fitted.transform(frame([torch.ones(2, 3)] * 2)).collect()
