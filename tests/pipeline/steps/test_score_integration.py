"""What the table of predictions says of an output is what estimator, metrics of a training and gate make of it."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest
import torch
from pyspark.sql import functions as F

from sparkdl.errors import SchemaError
from sparkdl.estimator.outputs import OutputModule, OutputSpec
from sparkdl.metrics.measure import confusion
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.steps.score import _columns, _fitted_to
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work.labels import FittedLabel
from sparkdl.tables.table import Table
from sparkdl.train.objective.named_metrics import MetricRule, named_metric


def test_an_even_chance_is_class_0_to_all(spark):
    outputs = [-1e-3, 0.0, 1e-3]
    label = FittedLabel(name="sold", type="binary", classes=("no", "yes"))
    frame = spark.createDataFrame([(value,) for value in outputs], "output float")
    rows = frame.select(*_columns(label, F.col("output"), "")).collect()
    assert [row["prediction"] for row in rows] == ["no", "no", "yes"]

    chosen = OutputModule(torch.nn.Identity(), ["sold"], [OutputSpec("sold", "class", "logit")])
    (classes,) = chosen(torch.tensor(outputs)[:, None])
    assert classes.tolist() == [0.0, 0.0, 1.0]

    assert confusion(Rows.of("binary", [0, 0, 1], [row["probability"] for row in rows])).tolist() == [[2, 0], [0, 1]]
    accuracy = MetricRule(named_metric("accuracy", "sold", torch.nn.BCEWithLogitsLoss()), 1)
    accuracy.update(torch.tensor(outputs)[:, None], torch.tensor([0.0, 0.0, 1.0]))
    assert accuracy.result() == 1.0


def test_predictions_of_another_type_are_refused_with_what_a_file_can_do_about_it(spark, tmp_path):
    table = Table(str(tmp_path / "predictions"))
    own = {WINDOW: ["2026-03-01"], "model_version": [1], "run_id": ["a"], "scored_at": [datetime(2026, 3, 2)]}
    table.append(pa.table({**own, "prediction": ["yes"]}))
    predicted = spark.createDataFrame([(0.5,)], "prediction double")
    with pytest.raises(SchemaError, match=r"'prediction' is double now, and string in .*score\.target"):
        _fitted_to(table, predicted, None)
