"""A training that starts from the champion keeps its features and labels, if they mean what the file says."""

from __future__ import annotations

import pyarrow as pa
import pytest
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.features.fitted import fit
from sparkdl.features.statistics import statistics_of
from sparkdl.models.bundle import save_bundle
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.work.labels import FittedLabel
from sparkdl.pipeline.work.prepare import fit_features

PARTS = Parts(train=("all",), validate=("all",), score=("all",))
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
    context = Context(loads(text))
    features = fit(context.spec.features, statistics_of(pa.table({"x": [1.0, 2.0]}), context.spec.features))
    save_bundle(nn.Linear(1, 1), f"{tmp_path}/bundle", preprocessing=preprocessing_of(features, labels=[vars(label)]))
    context.registry.publish("shop", f"{tmp_path}/bundle")
    context.registry.set_alias("shop", "champion", 1, expected=None)
    if fits:
        assert fit_features(context, None, (PARTS, {"all": "rows"})).labels.labels == (label,)
        return
    with pytest.raises(
        ConfigError, match=rf"other features or labels.*\(label {label.name}\): train from scratch once"
    ):
        fit_features(context, None, (PARTS, {"all": "rows"}))
