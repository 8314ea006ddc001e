"""The gate that a file asks for."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.work.evaluate import gate_of
from sparkdl.pipeline.work.labels import FittedLabel

FILE = """
source: {kind: csv, path: wine.csv}
features: {alcohol: number}
label: {quality: regression}
"""


@pytest.mark.parametrize("confidence", [0.6, 0.95, 0.99, 0.999])
def test_every_confidence_that_a_file_may_ask_for_makes_a_gate(confidence):
    spec = loads(FILE, [f"publish.gate.confidence={confidence}"]).spec
    gate = gate_of(spec)
    assert gate.confidence == confidence
    assert gate.metric == "rmse"


def test_many_classes_are_measured_on_fewer_rows():
    most = [
        FittedLabel(name="a", type="multiclass", classes=tuple(map(str, range(count)))).most_measured
        for count in (3, 100, 10_000)
    ]
    assert most == [781_250, 59_523, 10_000]
    assert FittedLabel(name="a", type="binary", classes=("0", "1")).most_measured == 1_041_666
