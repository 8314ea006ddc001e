"""The sections as values: what holds where no file is read."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.spec import SPECS
from sparkdl.metrics.names import METRIC_NAMES
from sparkdl.pipeline.spec import HashSplit, Label, Train
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS, metrics_of
from sparkdl.pipeline.spec.training import ESTIMATOR_NAMES

# What the estimator takes and `train` leaves to other sections, to the steps, or to a program.
ELSEWHERE = {
    *("model", "optimizer", "loss", "loss_constructors", "loss_weights", "callbacks", "train_minibatch_fn"),
    *("lr_scheduler", "feature_cols", "label_cols", "sample_weight_col", "continuous_cols", "categorical_cols"),
    *("input_shapes", "label_shapes", "validation", "feature_dtypes", "transformation_fn"),
    *("transformation_edit_fields", "transformation_removed_fields", "featuresCol", "labelCol", "weightCol"),
    *("validationIndicatorCol", "predictionCol", "probabilityCol", "rawPredictionCol", "outputCols", "store"),
    *("run_id", "resume", "compress_sparse_cols", "reader_pool_type", "inmemory_cache_all", "mp_start_method"),
    *("data_module", "backward_passes_per_step", "monitor_mode"),  # metrics of a file are names, which say it
}


def test_train_has_every_parameter_of_the_estimator_that_is_not_said_elsewhere():
    assert {spec.name for spec in SPECS} - ELSEWHERE == set(ESTIMATOR_NAMES)


def test_train_hands_the_estimator_what_it_takes():
    table = {spec.name: spec for spec in SPECS}
    for name, value in Train(metrics=("auc",), compile="max-autotune", timeout=5).parameters().items():
        assert table[name].converter(name, value) == value
    assert Train(metrics=("auc",)).parameters()["metrics"] == ["auc"]
    assert all(value == table[name].default for name, value in Train().parameters().items()), (
        "a default differs from the estimator's"
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Train(epochs=0), "epochs=0 is below 1: give at least 1"),
        (lambda: Train(learning_rate=0.0), "learning_rate=0.0 is not above 0: give a greater number"),
        (lambda: Train(learning_rate=float("nan")), "learning_rate=nan is no finite number: give one that is"),
        (lambda: HashSplit(train=2.0), "train=2.0 is above 1: give at most 1"),
        (lambda: Label(type="binary", classes=("a", "b", "c")), "classes=['a', 'b', 'c'] belongs to type 'multiclass'"),
    ],
)
def test_a_program_is_told_as_a_file_is(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)


def test_metrics_by_type_of_label_are_those_that_can_be_named():
    assert {*metrics_of("regression"), *metrics_of("binary")} == {*METRIC_NAMES}
    for kind, metric in DEFAULT_METRICS.items():
        assert metric in metrics_of(kind)
