"""The sections of a pipeline file about a model that is trained: publish and its gate, score, drift, report, notify."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, field

from sparkdl.errors import ConfigError
from sparkdl.metrics.names import HIGHER_IS_BETTER, METRIC_NAMES, OF_VALUES, check_metric_name
from sparkdl.pipeline.spec.base import (
    Columns,
    Count,
    Fraction,
    Name,
    Positive,
    Secret,
    Section,
    Text,
    Wrong,
    doc,
)
from sparkdl.pipeline.spec.source import Scalar, TableOrPath, half_a_name, tells_who

_Metric = Literal[
    "mse", "rmse", "mae", "mape", "r2", "pinball", "accuracy", "precision", "recall", "f1", "auc", "average_precision",
    "log_loss"
]  # fmt: skip
DEFAULT_METRICS = {"regression": "rmse", "quantiles": "mae", "binary": "auc", "multiclass": "accuracy"}
"""What judges a model, by the type of the label that it is judged by."""


def metrics_of(label_type: str) -> tuple[str, ...]:
    """The metrics that can be computed of a label of this type."""
    values = label_type in ("regression", "quantiles")
    names = tuple(name for name in METRIC_NAMES if (name in OF_VALUES) == values)
    return (*names, "pinball") if label_type == "quantiles" else names


MIN_GROUPS, RESAMPLES = 5, 2000
"""What a gate asks for if it is not told; a high confidence needs more of both."""


def least_groups(confidence: float) -> int:
    """The fewest groups that can show anything: a coin wins fewer of them in a row too often."""
    return math.ceil(math.log2(1 / (1 - confidence)))


def least_resamples(confidence: float) -> int:
    """The fewest draws of which twenty or so lie beyond the bound."""
    return math.ceil(round(20 / (1 - confidence), 6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """What a metric must reach whatever the champion does, ``"auc >= 0.7"``.

    Attributes:
        metric: its name.
        relation: ``>=`` where higher is better, ``<=`` where lower is.
        bound: the number.
    """

    metric: str
    relation: str
    bound: float

    @staticmethod
    def parse(text: str) -> "Floor":
        """Read a floor that has the form of ``publish.gate.floors``.

        Raises:
            ConfigError: its metric is unknown, or it limits the metric on its good side.
        """
        metric, relation, bound = text.split()
        check_metric_name(metric, HIGHER_IS_BETTER)
        if HIGHER_IS_BETTER[metric] != (relation == ">="):
            side, turned = ("higher", ">=") if HIGHER_IS_BETTER[metric] else ("lower", "<=")
            raise ConfigError(f"the floor {text!r} refuses good models: {metric} is better when {side}, write {turned}")
        return Floor(metric=metric, relation=relation, bound=float(bound))

    def holds(self, value: float) -> bool:
        """Whether a value of the metric reaches it."""
        return value >= self.bound if self.relation == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.bound:g}"


_Floor = Annotated[
    str, Meta(pattern=r"^[a-z_0-9]+ (>=|<=) -?(\d+\.?\d*|\.\d+)(e-?\d+)?$", examples=["auc >= 0.7", "rmse <= 4.5"])
]


class Gate(Section, frozen=True, kw_only=True):
    """Whether the challenger replaces the champion: both are scored on the same held-out rows."""

    rule: Annotated[
        Literal["better", "not_worse"],
        doc("better by at least margin, or not worse by more than margin, with the given confidence."),
    ] = "better"
    margin: Annotated[float, doc("Of the metric, in its own units.", ge=0)] = 0.0
    confidence: Annotated[float, doc("Of the bootstrap's one-sided lower bound of the gain.", gt=0.5, le=0.999)] = 0.95
    over: Annotated[
        Literal["window", "key"] | None,
        doc(
            "What the bootstrap draws: whole windows, or keys; by default windows where the split is by "
            "time and holds out eight or more of them."
        ),
    ] = None
    min_rows: Annotated[
        int, doc("Fewer held-out rows decide nothing: the champion stays, and floors are not reached.", ge=1)
    ] = 100
    floors: Annotated[
        tuple[_Floor, ...], doc("Values that a model must reach whatever the champion does: 'auc >= 0.7'.")
    ] = ()
    baseline: Annotated[
        Literal["first", "always", "never"],
        doc(
            "Who must beat a guess without a model (the mean or median of the training labels, their "
            "shares, the commonest class): the first champion, every challenger, or nobody. It is said of every model, "
            "beside the last value of the same key, and refuses nobody by fewer than min_rows held-out rows."
        ),
    ] = "first"

    def _misfits(self) -> Iterator[Wrong]:
        if self.rule == "not_worse" and not self.margin:
            yield "margin", "=0 with rule 'not_worse' can never be shown: give a margin above 0"
        for text in self.floors:
            try:
                Floor.parse(text)
            except ConfigError as refused:
                yield "floors", f": {refused}"


class Publish(Section, frozen=True, kw_only=True):
    """Where the model goes, and what it must show."""

    registry: Annotated[Text | None, doc("The registry, as path or URI; by default below root.")] = None
    name: Annotated[Name | None, doc("The model's name there; by default the pipeline's.")] = None
    alias: Annotated[
        str, Meta(pattern=r"^(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["champion"],
                  description="The alias that the gate moves, and that is scored with.")
    ] = "champion"  # fmt: skip
    metric: Annotated[
        _Metric | None,
        doc(
            "What judges a model on the held-out rows: by default rmse of a regression, mae of the middle "
            "quantile, auc of a binary label, accuracy of classes; pinball judges all quantiles."
        ),
    ] = None
    label: Annotated[Text | None, doc("The label that metric and floors are of; the first if left out.")] = None
    direction: Annotated[
        Literal["min", "max"] | None,
        doc("Whether less or more of the metric is better; known of each metric, and checked if it is said."),
    ] = None
    gate: Annotated[Gate, doc("When the challenger replaces the champion.")] = field(default_factory=Gate)
    mlflow: Annotated[
        Text | None,
        doc(
            "An MLflow server or store, such as http://host:5000 or sqlite:////data/mlflow.db, that every "
            "version is mirrored to, with the alias. Its experiment, and another registry, are for "
            "MLFLOW_EXPERIMENT_NAME and MLFLOW_REGISTRY_URI to say."
        ),
    ] = None

    def _misfits(self) -> Iterator[Wrong]:
        if self.metric and self.direction and (self.direction == "max") != HIGHER_IS_BETTER[self.metric]:
            right = "max" if HIGHER_IS_BETTER[self.metric] else "min"
            yield (
                "direction",
                f"={self.direction!r} is wrong for metric {self.metric!r}: write {right}, or leave it out",
            )
        if tells_who(self.mlflow or "") and not isinstance(self.mlflow, Secret):
            yield (
                "mlflow",
                " holds a user or a password, and would stand in the run's record: set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or write a variable such as ${MLFLOW_PASSWORD} there",
            )


class Score(Section, frozen=True, kw_only=True):
    """What the champion predicts, and where that goes."""

    window: Annotated[
        Literal["score", "validate", "all"],
        doc("The rows: those of the split's score part, of its validate part, or all of the source."),
    ] = "score"
    keep: Annotated[Columns, doc("Columns of the source that predictions carry, besides the key.")] = ()
    target: Annotated[TableOrPath | None, doc("The Delta table of predictions; by default below root.")] = None

    def _misfits(self) -> Iterator[Wrong]:
        yield from half_a_name("target", self.target or "")


_Distance = Annotated[float, Meta(gt=0, le=1)]
_Threshold = "alarm above the larger of this and what chance alone gives; null looks away."


class Drift(Section, frozen=True, kw_only=True):
    """How far new windows may be from what the champion was trained on, feature by feature."""

    action: Annotated[
        Literal["warn", "retrain", "fail"],
        doc(
            "warn says so; retrain trains although nothing else is due, with all windows up to the newest "
            "instead of holding those to score back; fail ends the run before it trains or scores."
        ),
    ] = "warn"
    after: Annotated[Count, doc("Windows with an alarm, of the last `of`, before the action.")] = 1
    of: Annotated[Count, doc("Windows that are looked back upon.")] = 1
    psi: Annotated[Positive | None, doc(f"Population stability index: {_Threshold}")] = 0.25
    js: Annotated[_Distance | None, doc(f"Jensen-Shannon distance: {_Threshold}")] = None
    ks: Annotated[_Distance | None, doc(f"Kolmogorov-Smirnov distance of numbers: {_Threshold}")] = None
    missing: Annotated[Fraction | None, doc(f"Change of the share of missing values: {_Threshold}")] = 0.05
    unseen: Annotated[Fraction | None, doc(f"Share of values that training never saw: {_Threshold}")] = 0.05
    ignore: Annotated[Columns, doc("Features that may drift.")] = ()

    def _misfits(self) -> Iterator[Wrong]:
        if self.after > self.of:
            yield "after", f"={self.after} windows cannot be among the last of={self.of}: raise of, or lower after"


class Keep(Section, frozen=True, kw_only=True):
    """How much of earlier runs stays. What was published stays in the registry, predictions in their table."""

    trainings: Annotated[
        Count | None,
        doc(
            "The newest trainings whose shards and unpublished models stay; what is older is deleted after "
            "a training. null keeps all."
        ),
    ] = 3
    days: Annotated[
        Count | None, doc("Days for which earlier versions of the pipeline's own tables can be read; null: for ever.")
    ] = 30


class Report(Section, frozen=True, kw_only=True):
    """What the report shows besides what every report shows."""

    slices: Annotated[Columns, doc("Columns whose values the error is broken down by.")] = ()


_Outcome = Literal["promoted", "scored", "stopped", "not_promoted", "nothing_new", "refused", "lost", "failed"]


class Notify(Section, frozen=True, kw_only=True):
    """Who hears of the end of a run: the run's record, as JSON, goes to a command's input or to a webhook."""

    command: Annotated[
        Text | None,
        doc(
            "A command and its words; no shell is involved. It has a minute, and the variables "
            "SPARKDL_OUTCOME, _EXIT_CODE, _MESSAGE, _PIPELINE, _RUN_ID, _RECORD, _REPORT."
        ),
    ] = None
    webhook: Annotated[
        Text | None,
        doc(
            "An http or https address that takes a POST; a redirect is not followed. Nothing of it but the "
            "host is shown anywhere."
        ),
    ] = None
    when: Annotated[
        tuple[_Outcome, ...],
        doc(
            "After which outcomes. The gate refuses with not_promoted; refused is a file or data that will not do.",
            min_length=1,
        ),
    ] = ("promoted", "not_promoted", "refused", "failed")

    def _misfits(self) -> Iterator[Wrong]:
        if self.command is None and self.webhook is None:
            yield "", " has neither command nor webhook: write one of them"
        try:
            shlex.split(self.command or "")
        except ValueError:
            yield "command", f"={self.command!r} has a quotation mark that is not closed: close it"
        if self.webhook is not None and not _is_web_address(self.webhook):
            yield (
                "webhook",
                " is no http or https address, or has a user before its host: write it like 'https://host/path'",
            )


def _is_web_address(text: str) -> bool:
    try:
        parsed = urlsplit(text)
        named = parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0 and "@" not in parsed.netloc
    except ValueError:  # brackets that are no IPv6 address, a port that is none
        return False
    return bool(named) and text.isprintable() and " " not in text


class SparkSession(Section, frozen=True, kw_only=True):
    """The session that `run` opens; a session that is there already is taken as it is."""

    master: Annotated[Text | None, doc("local[4], yarn, k8s://..., by default what spark-submit says.")] = None
    conf: Annotated[dict[str, Scalar], doc("Spark's own settings, by their names; secrets as ${NAME}.")] = field(
        default_factory=dict
    )


class Places(Section, frozen=True, kw_only=True):
    """Where a part of what is kept lies, if not below root."""

    tables: Annotated[Text | None, doc("Clean rows, quarantine, runs, predictions.")] = None
    shards: Annotated[Text | None, doc("Training shards; every worker reads them.")] = None
    registry: Annotated[Text | None, doc("Published models.")] = None
    runs: Annotated[Text | None, doc("Records, reports, checkpoints, leases.")] = None
