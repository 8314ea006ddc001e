"""Metrics by name are what sklearn computes over all rows, at any batch size and number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.errors import ConfigError, DataError
from sparkdl.metrics.names import METRIC_NAMES
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.objective.named_metrics import named_metric
from sparkdl.world import SOLO

ROWS = 53
VALUES = ("mse", "rmse", "mae", "mape", "r2")
CLASSES = ("accuracy", "precision", "recall", "f1", "auc", "average_precision", "log_loss")
BATCHES = (1, 20, ROWS)


def cases():
    """By name: loss, output and label; logits between 0 and 1 are where guessing from a batch goes wrong."""
    generator = torch.Generator().manual_seed(5)
    value = 50 + torch.randn(ROWS, generator=generator)
    noise = torch.randn(ROWS, generator=generator)
    logit = 3 * torch.randn(ROWS, generator=generator)
    binary = (logit + 2 * noise > 0).float()
    scores = 2 * torch.randn(ROWS, 4, generator=generator)
    classes = (scores + torch.randn(ROWS, 4, generator=generator)).argmax(1)
    return {
        "value": (torch.nn.MSELoss(), (value + noise)[:, None], value),
        "rate": (torch.nn.PoissonNLLLoss(), (value + noise).log(), value),
        "vector": (torch.nn.L1Loss(), torch.stack([value + noise, noise], 1), torch.stack([value, logit], 1)),
        "logit": (torch.nn.BCEWithLogitsLoss(), logit[:, None], binary),
        "small logit": (torch.nn.BCEWithLogitsLoss(), torch.sigmoid(logit), binary),
        "probability": (torch.nn.BCELoss(), torch.sigmoid(logit), binary),
        "two classes": (torch.nn.CrossEntropyLoss(), torch.stack([-logit, noise], 1), binary),
        "classes": (torch.nn.CrossEntropyLoss(), scores, classes),
        "log-probabilities": (torch.nn.NLLLoss(), scores.log_softmax(1), classes.double()),
        "ignored": (torch.nn.CrossEntropyLoss(ignore_index=9), scores, classes.masked_fill(noise > 0.5, 9)),
        "absent class": (torch.nn.CrossEntropyLoss(), scores, classes.clamp(max=2)),
    }


def names_of(loss):
    return VALUES if isinstance(loss, torch.nn.MSELoss | torch.nn.L1Loss | torch.nn.PoissonNLLLoss) else CLASSES


def computed(world, backend="torch"):
    """Values by case and batch size; the first rank has most rows, and for batches of one the second has none."""
    collective = open_collective(world, backend=backend)
    found = {}
    for case, (loss, output, label) in cases().items():
        for size in BATCHES:
            metrics = MetricSet({name: named_metric(name, "y", loss) for name in names_of(loss)}, ("y",), SOLO.device)
            source = TensorSource({"o": output, "y": label}, global_batch_rows=size, shuffle=False)
            for index, batch in enumerate(source):
                if size == 1 or index % 3 == 0 if world.rank == 0 else size > 1 and index % 3:
                    metrics.update(batch["o"], batch)
            if world.size > 1 or size in (1, ROWS):
                found[case, size] = metrics.compute(collective, world.size)
            if world.size == 1 and size not in (1, ROWS):  # a run that is resumed in the middle of an epoch
                state = metrics.state()
                metrics.compute(collective, 1)
                metrics.load_state([state])
                for index, batch in enumerate(source):
                    if index % 3:
                        metrics.update(batch["o"], batch)
                found[case, size] = metrics.compute(collective, 1)
    collective.close()
    return found


def wanted(loss, output, label):
    from sklearn import metrics as sk

    if names_of(loss) is VALUES:
        output = output.double().exp() if isinstance(loss, torch.nn.PoissonNLLLoss) else output.double()
        output, label = output.reshape(label.shape).numpy(), label.double().numpy()
        return {
            "mse": sk.mean_squared_error(label, output),
            "rmse": sk.mean_squared_error(label, output) ** 0.5,
            "mae": sk.mean_absolute_error(label, output),
            "mape": sk.mean_absolute_percentage_error(label, output),
            "r2": sk.r2_score(label, output),
        }
    chances = output.double()
    if isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
        chances, label = chances[label != loss.ignore_index], label[label != loss.ignore_index]
        chances = chances.softmax(1)
    else:
        chances = chances.reshape(-1)
        chances = chances.sigmoid() if isinstance(loss, torch.nn.BCEWithLogitsLoss) else chances
        chances = torch.stack([1 - chances, chances], 1)
    chances, label, width = chances.numpy(), label.long().numpy(), chances.shape[1]
    found, average = chances.argmax(1), "macro" if width > 2 else "binary"
    there = np.unique(label)
    ranked = there if width > 2 else [1]
    return {
        "accuracy": sk.accuracy_score(label, found),
        "precision": sk.precision_score(label, found, average=average, zero_division=0),
        "recall": sk.recall_score(label, found, average=average, zero_division=0),
        "f1": sk.f1_score(label, found, average=average, zero_division=0),
        "auc": np.mean([sk.roc_auc_score(label == one, chances[:, one]) for one in ranked]),
        "average_precision": np.mean([sk.average_precision_score(label == one, chances[:, one]) for one in ranked]),
        "log_loss": sk.log_loss(label, chances, labels=list(range(width))),
    }


@pytest.fixture(scope="module")
def by_ranks(ranks):
    return {1: [computed(SOLO, "solo")], 2: ranks.together(computed, 2, "torch")}


def test_every_name_is_tested():
    assert set(METRIC_NAMES) == {*VALUES, *CLASSES}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", cases())
def test_a_named_metric_is_sklearns_over_all_rows(by_ranks, world_size, case):
    expected = wanted(*cases()[case])
    for found in by_ranks[world_size]:
        for size in BATCHES:
            assert found[case, size] == pytest.approx(expected, rel=1e-6), size


def updated(name, loss, output, label):
    metrics = MetricSet({"m": named_metric(name, "y", loss)}, ("y",), SOLO.device)
    metrics.update(output, next(iter(TensorSource({"y": label}, global_batch_rows=len(label), shuffle=False))))
    return metrics.compute(open_collective(SOLO, backend="solo"), 1)["m"]


def test_what_nothing_defines_is_not_a_number():
    loss = torch.nn.BCEWithLogitsLoss()
    assert np.isnan(updated("auc", loss, torch.randn(5, 1), torch.ones(5)))
    assert np.isnan(updated("average_precision", loss, torch.randn(5, 1), torch.zeros(5)))


def test_labels_and_outputs_that_do_not_fit_are_refused():
    logit, classes = torch.nn.BCEWithLogitsLoss(), torch.nn.CrossEntropyLoss()
    with pytest.raises(DataError, match="a label is not a whole number"):
        updated("f1", logit, torch.randn(3, 1), torch.tensor([0.0, 0.5, 1.0]))
    with pytest.raises(DataError, match=r"takes classes 0\.\.2, and a label is 3"):
        updated("f1", classes, torch.randn(3, 3), torch.tensor([0, 1, 3]))
    with pytest.raises(ConfigError, match="Multilabel metrics"):
        updated("f1", logit, torch.randn(3, 4), torch.ones(3, 4))
    with pytest.raises(ConfigError, match="there are 9 labels for 3 rows"):
        updated("f1", classes, torch.randn(3, 3), torch.rand(3, 3))
    with pytest.raises(ConfigError, match="HingeEmbeddingLoss does not say what its outputs are"):
        named_metric("rmse", "y", torch.nn.HingeEmbeddingLoss())
    with pytest.raises(ConfigError, match="'rmse' of 'y' does not fit outputs of CrossEntropyLoss, which are classes"):
        named_metric("rmse", "y", classes)


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ConfigError, match="there is no metric 'RSME': did you mean 'rmse'\\? There are mse, rmse, "):
        named_metric("RSME", "y", torch.nn.MSELoss())


def test_probabilities_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr("sparkdl.train.objective.metrics.MOST_BYTES", 100)
    assert updated("accuracy", torch.nn.BCELoss(), torch.rand(9), torch.ones(9)) >= 0
    with pytest.raises(ConfigError, match="'auc' keeps the probability and label of each row"):
        updated("auc", torch.nn.BCELoss(), torch.rand(9), torch.ones(9))


def test_more_of_a_column_is_better_where_its_metric_says_so():
    from torchmetrics.classification import MulticlassHingeLoss, MulticlassRecall

    metrics = {"recall": MulticlassRecall(3, average=None), "recall_hinge": MulticlassHingeLoss(3), "own": max}
    metric_set = MetricSet(metrics, ("y",), SOLO.device)
    columns = ("recall", "recall_0", "recall_hinge", "recall_hinge_0", "own", "loss")
    assert [metric_set.higher_is_better(name) for name in columns] == [True, True, False, False, None, None]


@pytest.mark.parametrize("names", [["loss"], ["epoch"], ["rows"], ["val_loss"], ["own", "val_own"]])
def test_a_metric_that_would_stand_in_the_column_of_another_number_is_refused(names):
    with pytest.raises(ConfigError, match=f"metric '{names[-1]}' has the name of another column"):
        MetricSet(dict.fromkeys(names, max), ("y",), SOLO.device)


def test_a_metric_of_one_of_several_labels_is_not_that_labels_loss():
    assert MetricSet({"y_loss": max}, ("y",), SOLO.device).names == ["y_loss"]
    with pytest.raises(ConfigError, match="metric 'y_loss' has the name of another column"):
        MetricSet({"y": {"loss": max}}, ("y", "z"), SOLO.device)
