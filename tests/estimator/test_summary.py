import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchModel
from sparkdl.estimator.fit import _plain
from sparkdl.estimator.summary import TrainingSummary, epoch_rows, horovod_history, plot_epochs

ROWS = [
    {
        "epoch": 0,
        "step": 4,
        "loss": 2.0,
        "val_loss": 3.0,
        "mae": 1.0,
        "val_mae": 1.5,
        "lr": 0.1,
        "seconds": 1.0,
        "rows": 10,
    },
    {
        "epoch": 1,
        "step": 8,
        "loss": 1.0,
        "val_loss": 2.0,
        "mae": 0.5,
        "val_mae": 0.7,
        "lr": 0.1,
        "seconds": 1.0,
        "rows": 10,
    },
]


def test_horovods_form_of_the_history():
    assert horovod_history(ROWS)[1] == {
        "epoch": 1,
        "train": {"loss": 1.0, "all_metrics": [{"mae": 0.5}]},
        "validation": {"loss": 2.0, "all_metrics": [{"mae": 0.7}]},
    }


def test_a_history_in_horovods_form_is_the_same_history():
    taken = epoch_rows(horovod_history(ROWS))
    kept = ("epoch", "loss", "val_loss", "mae", "val_mae")
    assert taken == [{name: row[name] for name in kept} for row in ROWS]
    assert epoch_rows(ROWS) == ROWS
    assert horovod_history(taken) == horovod_history(ROWS)
    plain = [{"epoch": 0, "loss": 1.0}]
    assert epoch_rows(horovod_history(plain)) == plain


@pytest.mark.parametrize(
    "give", [lambda epochs: TorchModel(history=epochs), lambda epochs: TorchModel().setHistory(epochs)]
)
def test_a_model_made_of_anothers_getters_has_its_history_and_publishes_it(give):
    first = TorchModel(history=ROWS)
    second = give(first.getHistory())
    assert second.getHistory() == first.getHistory()
    published = [model._training()["history"] for model in (first, second)]
    kept = ("epoch", "loss", "val_loss", "mae", "val_mae")
    assert published[1] == [{name: row[name] for name in kept} for row in published[0]]
    assert [axes.get_ylabel() for axes in second.plot_history().axes] == ["loss", "mae"]


def test_the_plot_shows_every_metric_of_both_sets():
    figure = plot_epochs(ROWS)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "mae"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["training", "validation"]
    with pytest.raises(ConfigError, match="no history"):
        plot_epochs([])


def test_a_summary_reads_in_one_line():
    summary = TrainingSummary(run_id="r", num_proc=2, backend="torch", epochs=2, steps=8, rows=20, seconds={"fit": 2.0})
    assert summary.rows_per_second == 10
    assert str(summary).startswith("r: 2 epochs, 8 steps, 20 rows on 2 ranks (torch), 10 rows/s")


def test_a_file_name_that_is_no_text_is_noted_so_that_a_registry_takes_it():
    assert _plain({"caf\udce9": ["caf\udce9.csv", 1]}) == {"caf\\udce9": ["caf\\udce9.csv", 1]}
