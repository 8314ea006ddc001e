"""A training that starts from the champion keeps its features and labels, if they mean what the file says."""

from __future__ import annotations

import pyarrow as pa
import pytest
from torch import nn

from sparkdl.documents.typed import encode
from sparkdl.errors import ConfigError
from sparkdl.features.fitted import fit
from sparkdl.features.statistics import statistics_of
from sparkdl.models.bundle import save_bundle
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.features import FeaturesStep, features_of
from sparkdl.pipeline.steps.learning import parts_to_learn
from sparkdl.pipeline.work.labels import FittedLabel

ROWS = WindowReceipt(
    window="all", fingerprint="", rules="", read=9, kept=9, quarantined=0, duplicates=0, content="rows"
)
PAID = FittedLabel(name="paid", type="binary", classes=("no", "yes"))
FLAG = FittedLabel(name="flag", type="binary", classes=("1", "0"))
KIND = FittedLabel(name="kind", type="multiclass", classes=("1", "2", "3"))


@pytest.mark.parametrize(
    ("label", "said", "fits"),
    [
        (PAID, "{type: binary, positive: 'yes'}", True),
        (PAID, "binary", True),
        (PAID, "{type: binary, positive: 'no'}", False),
        (PAID, "{type: multiclass}", False),
        (FLAG, "{type: binary, positive: 0}", True),
        (FLAG, "binary", False),
        (KIND, "multiclass", True),
        (KIND, "{type: multiclass, classes: [1, 2, 3]}", True),
        (KIND, "{type: multiclass, classes: [1, 2, 3, 4]}", False),
        (KIND, "{type: multiclass, classes: [3, 2, 1]}", False),
    ],
)
def test_labels_of_the_champion_are_taken_where_they_mean_what_the_file_says(tmp_path, label, said, fits):
    text = f"""
    name: shop
    root: {tmp_path}
    source: {{kind: parquet, path: {tmp_path}/rows, key: id}}
    features: {{x: number}}
    label: {{{label.name}: {said}}}
    train: {{start: champion}}
    """
    run = Run(Project(loads(text)))
    features = fit(run.project.spec.features, statistics_of(pa.table({"x": [1.0, 2.0]}), run.project.spec.features))
    save_bundle(nn.Linear(1, 1), f"{tmp_path}/bundle", preprocessing=preprocessing_of(features, labels=[vars(label)]))
    run.registry.publish("shop", f"{tmp_path}/bundle")
    run.registry.set_alias("shop", "champion", 1, expected=None)
    run.receipts.write([Receipt(step="ingest", partition="all", key="made", facts=encode(ROWS).decode())])
    step, (parts, _) = FeaturesStep(), parts_to_learn(run)
    if fits:
        step.make(run, None, stale_of(step, run))
        assert not stale_of(step, run)
        taken, labels, start = features_of(run, parts)
        assert (taken.to_json(), labels.labels) == (features.to_json(), (label,))
        assert start == run.champion().uri
        return
    with pytest.raises(
        ConfigError, match=rf"other features or labels.*\(label {label.name}\): train from scratch once"
    ):
        step.make(run, None, stale_of(step, run))
