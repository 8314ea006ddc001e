"""What a pipeline file may hold, section by section, as frozen values.

Enters: what a user wrote, as values. Leaves: ``PipelineSpec``, or ``Refused`` with every field that does not fit. No
Spark, no torch. Start at ``whole.py``; ``base.py`` says how a section is checked.
"""

from sparkdl.pipeline.spec.data import (
    ColumnSplit,
    Expectation,
    HashSplit,
    Label,
    Split,
    TimeSplit,
    Transform,
    prediction_columns,
    quantile_column,
)
from sparkdl.pipeline.spec.operation import Drift, Gate, Notify, Places, Publish, Report, Score, SparkSession
from sparkdl.pipeline.spec.source import SourceSection
from sparkdl.pipeline.spec.training import Model, Range, Search, Train
from sparkdl.pipeline.spec.whole import PipelineSpec

__all__ = [
    "ColumnSplit",
    "Drift",
    "Expectation",
    "Gate",
    "HashSplit",
    "Label",
    "Model",
    "Notify",
    "PipelineSpec",
    "Places",
    "Publish",
    "Range",
    "Report",
    "Score",
    "Search",
    "SourceSection",
    "SparkSession",
    "Split",
    "TimeSplit",
    "Train",
    "Transform",
    "prediction_columns",
    "quantile_column",
]
