"""The whole of a pipeline file as one frozen value."""

from typing import Annotated

from msgspec import field

from sparkdl.features.spec import Feature
from sparkdl.pipeline.spec.base import Column, Name, Section, Text, doc
from sparkdl.pipeline.spec.data import Expectation, Label, Split, Transform
from sparkdl.pipeline.spec.operation import (
    DEFAULT_METRICS,
    Drift,
    Keep,
    Notify,
    Places,
    Publish,
    Report,
    Score,
    SparkSession,
)
from sparkdl.pipeline.spec.source import SourceSection
from sparkdl.pipeline.spec.training import Model, Search, Train


class PipelineSpec(Section, frozen=True, kw_only=True):
    """A pipeline: which rows become which model, when it is good enough, and what it predicts."""

    name: Annotated[Name | None, doc("The pipeline's name; by default that of its file.")] = None
    root: Annotated[Text, doc("Folder or URI below which everything is kept; every worker reaches it.")] = (
        "sparkdl-data"
    )
    places: Annotated[Places, doc("Where parts of it lie instead.")] = field(default_factory=Places)
    show_variables: Annotated[
        tuple[Text, ...],
        doc(
            "Variables of the environment whose values may be seen: what others hold is shown as ${NAME}, "
            "in record, report and messages."
        ),
    ] = ()
    code: Annotated[Text, doc("Folder of the modules that this file names, relative to it.")] = "."
    source: Annotated[SourceSection, doc("The rows.")]
    transform: Annotated[Transform | None, doc("What is made of them first.")] = None
    expect: Annotated[dict[str, Expectation], doc("Conditions on the rows, by name: 'no free rides: amount > 0'.")] = (
        field(default_factory=dict)
    )
    features: Annotated[
        dict[Column, Feature],
        doc(
            "What the model sees, by column: its type, or its type and options. I1..I13 names thirteen "
            "columns, 'a, b' two.",
            min_length=1,
        ),
    ]
    label: Annotated[dict[Column, Label], doc("What it predicts, by column.", min_length=1)]
    weight: Annotated[Column | None, doc("The column with the weight of a row in loss and metrics.")] = None
    split: Annotated[
        Split | None, doc("Which rows train, validate and are scored; by default by time, without one by a hash.")
    ] = None
    model: Annotated[Model, doc("The network; by default one that suits the features.")] = field(default_factory=Model)
    train: Annotated[Train, doc("How it is trained.")] = field(default_factory=Train)
    search: Annotated[Search | None, doc("Several settings instead of one.")] = None
    publish: Annotated[Publish, doc("Where the model goes, and what it must show.")] = field(default_factory=Publish)
    score: Annotated[Score, doc("What the champion predicts, and where that goes.")] = field(default_factory=Score)
    drift: Annotated[Drift, doc("How far new rows may be from those it was trained on.")] = field(default_factory=Drift)
    report: Annotated[Report, doc("What the report shows.")] = field(default_factory=Report)
    keep: Annotated[Keep, doc("How much of earlier runs stays.")] = field(default_factory=Keep)
    notify: Annotated[Notify | None, doc("Who hears of the end of a run.")] = None
    spark: Annotated[SparkSession, doc("The Spark session.")] = field(default_factory=SparkSession)

    @property
    def judged_label(self) -> str:
        """The name of the label that the gate judges by: the first one where the file names none."""
        return self.publish.label or next(iter(self.label))

    @property
    def judged_metric(self) -> str:
        """The metric that the gate judges by: where the file names none, the one for the type of the judged label."""
        return self.publish.metric or DEFAULT_METRICS[self.label[self.judged_label].type]
