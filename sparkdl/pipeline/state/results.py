"""What training and evaluation came to: values that are kept as results of steps, and shown in the record of a run.

They are documents as they are (``documents.typed``), without Spark and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.documents.typed import Count
from sparkdl.metrics.measure import Measured
from sparkdl.pipeline.judging.baseline import LabelSummary
from sparkdl.pipeline.judging.diagnostics import Diagnostics
from sparkdl.pipeline.judging.drift import Action, Drift
from sparkdl.pipeline.judging.gate import Decision
from sparkdl.pipeline.windows import span


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Shard sets of one pipeline.

    Attributes:
        train: address of the training set.
        validate: address of the validation set.
        train_rows: in the first.
        validate_rows: in the second.
        train_unlabelled: training rows that were left out since they have no label yet.
        validate_unlabelled: likewise.
    """

    train: str
    validate: str
    train_rows: Count
    validate_rows: Count
    train_unlabelled: Count = 0
    validate_unlabelled: Count = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting of a search.

    Attributes:
        settings: by ``train.NAME`` or ``model.ARGUMENT``.
        value: of the metric that trials are compared by; None where it failed.
        epochs: that were trained.
        seconds: of its training, whenever that was.
        failed: why; empty where it did not.
        stopped: whether it was stopped early, since others were better by then.
    """

    settings: Mapping[str, Any]
    value: float | None
    epochs: Count = 0
    seconds: float = 0.0
    failed: str = ""
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that was trained and is not published yet.

    Attributes:
        bundle: address of its folder.
        content_hash: of the bundle.
        history: of the epochs, one row each.
        metrics: of the best epoch, or the last.
        epochs: that were trained.
        best_epoch: from 0; None where none was compared.
        kept_epoch: from 0, the one whose weights the model has; None in results of versions that did not note it.
        steps: of the optimizer.
        rows: that trained it, all epochs together.
        ranks: that trained it.
        backend: that carried gradients between them.
        seconds: by part of the fit.
        origin: parameters, lineage and metrics that the fit has noted, for the registry.
        windows: hash of the rows of each window that it was trained on.
        split: that said which rows of these; empty in results of versions that did not note it.
        columns: the types of the clean rows by their names, in order; likewise.
        trials: of the search that chose it, in order; none without a search.
        chosen: its place among them.
        chosen_by: the column of the history that they were compared by.
        warnings: what looks wrong with its losses, a sentence each.
        labels: of the rows that it was trained on, by column; empty in results of versions that did not note it.
        temperatures: of the labels whose probabilities were calibrated, by column.
        recipe: by name in ``train`` that the file leaves out, what followed from the number of rows.
    """

    bundle: str
    content_hash: str
    history: tuple[Mapping[str, float | int | None], ...]
    metrics: Mapping[str, float]
    epochs: Count
    best_epoch: Count | None
    steps: Count
    rows: Count
    ranks: Count
    backend: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    kept_epoch: Count | None = None
    windows: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    chosen: Count | None = None
    chosen_by: str = ""
    warnings: tuple[str, ...] = ()
    labels: Mapping[str, LabelSummary] = field(default_factory=dict)
    temperatures: Mapping[str, float] = field(default_factory=dict)
    recipe: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the trial that was chosen; empty without a search."""
        return {} if self.chosen is None else self.trials[self.chosen].settings


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one trial came to.

    Attributes:
        trained: its model; None where it failed.
        failed: why, for a reason that another attempt would meet again.
        seconds: it took.
        stopped: whether it was stopped early.
        settings: of a search that draws them as it goes; empty where the file says them.
    """

    trained: Trained | None
    failed: str = ""
    seconds: float = 0.0
    stopped: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Boosted:
    """LightGBM on the columns and the held-out rows of the model; it judges nobody.

    Attributes:
        reason: why it was left out; empty where it was not.
        version: of LightGBM.
        trees: its metrics.
        model: the model's on the same rows, which are fewer than those of the decision where they were too many.
        rounds: of boosting that were kept.
        rows: that it was trained on.
        of_rows: how many there were; of more than the driver holds a share is drawn.
        of_judging: how many held-out rows there were, likewise.
        columns: that it has seen.
        left_out: features that trees cannot take.
        out_of_time: whether the clock ended its training, and not the loss on the validation rows.
        seconds: it took.
    """

    reason: str = ""
    version: str = ""
    trees: Measured | None = None
    model: Measured | None = None
    rounds: Count = 0
    rows: Count = 0
    of_rows: Count = 0
    of_judging: Count = 0
    columns: Count = 0
    left_out: tuple[str, ...] = ()
    out_of_time: bool = False
    seconds: float = 0.0

    def text(self, metric: str) -> str:
        """Its metric beside the model's in one sentence; empty where it was left out.

        Trees learn the middle quantile alone, and so have mae where pinball judges.
        """
        metric = "mae" if metric == "pinball" else metric
        if self.trees is None or self.model is None or metric not in self.trees.values:
            return ""
        trees, model = self.trees.values[metric], self.model.values.get(metric)
        is_sampled = self.trees.rows < self.of_judging
        sampled = f" on {self.trees.rows:,} of {self.of_judging:,} held-out rows" if is_sampled else ""
        beside = "undefined" if model is None else f"{model:.4g}"
        return f"LightGBM has {metric} {trees:.4g}, the model {beside}{sampled}; {self.conditions()}"

    def conditions(self) -> str:
        """How many trees, rows and columns there were."""
        rows = f"{self.rows:,} rows" if self.rows == self.of_rows else f"{self.rows:,} of {self.of_rows:,} rows"
        parts = [f"{self.rounds:,} rounds on {rows}"]
        parts += ["stopped by the clock"] if self.out_of_time else []
        parts += [f"without {', '.join(self.left_out)}, which trees cannot take"] if self.left_out else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Predicted quantiles on held-out rows.

    Attributes:
        levels: of the quantiles, ascending.
        below: the share of labels that are no greater than each.
        coverage: the share of labels from the lowest to the highest quantile.
        width: the mean distance of these two.
        pinball: the mean loss over rows and levels.
    """

    levels: tuple[float, ...]
    below: tuple[float, ...]
    coverage: float
    width: float
    pinball: float

    def text(self) -> str:
        """How many labels lie where they should, in one sentence."""
        levels = ", ".join(f"{level:g}: {share:.3f}" for level, share in zip(self.levels, self.below, strict=True))
        ideal = self.levels[-1] - self.levels[0]
        between = f"{self.coverage:.1%} of labels lie between the outer quantiles, {ideal:.1%} should" if ideal else ""
        return "; ".join(filter(None, [between, f"share of labels below each level, {levels}"]))


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Probabilities on held-out rows, and what they would be without the temperature of the validation rows.

    Attributes:
        temperature: that the logits are divided by.
        before: expected calibration error without it.
        after: with it.
    """

    temperature: float
    before: float
    after: float

    def text(self) -> str:
        """The calibration error with and without the temperature, in one sentence."""
        return f"temperature {self.temperature:.3g}: expected calibration error {self.before:.4f} -> {self.after:.4f}"


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What held-out rows say of a challenger.

    Attributes:
        label: that was judged.
        decision: of the gate.
        slices: the challenger's metrics by column and value.
        champion_slices: the champion's on the same rows.
        values: how many different ones each of these columns has.
        challenger: what there is to see of its predictions.
        champion: likewise; None where there was none.
        part: of the split, ``test`` or ``validate``, that the rows are of.
        windows: of that part.
        of_rows: how many rows of it could judge; the decision knows how many were measured.
        baseline_slices: the metric of the gate of the best guess without a model, by column and value.
        intervals: of the challenger's quantiles; None of another label.
        calibrated: what its temperature does; None where it has none.
        boosted: LightGBM beside it; None where the file leaves it out, or an older version judged.
    """

    label: str
    decision: Decision
    slices: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    champion_slices: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    values: Mapping[str, Count] = field(default_factory=dict)
    challenger: Diagnostics | None = None
    champion: Diagnostics | None = None
    part: str = ""
    windows: tuple[str, ...] = ()
    of_rows: Count = 0
    baseline_slices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    intervals: Intervals | None = None
    calibrated: Calibrated | None = None
    boosted: Boosted | None = None

    def rows_text(self) -> str:
        """The rows that it was measured on: ``1,200 held-out rows of test, 2026-03-08 to 2026-03-09``."""
        rows, windows = self.decision.rows, self.windows
        text = f"{rows:,}{f' of {self.of_rows:,}' if self.of_rows > rows else ''} held-out rows"
        part = f" of the part {self.part}" if self.part else ""
        if not windows or windows == ("all",):
            return f"{text}{part}"
        return f"{text}{part}, {span(windows)}"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What became of a challenger.

    Attributes:
        version: in the registry.
        promoted: whether it became the champion.
        reason: of that.
        against: version that was the champion then.
    """

    version: int
    promoted: bool
    reason: str
    against: int | None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What a table of predictions holds for one window.

    Attributes:
        window: its name.
        target: address of the table.
        content: a hash of the clean rows that were predicted, with their labels where one of these is kept.
        rows: of the window.
        version: of the model.
        artifact: content hash of the model's bundle.
    """

    window: str
    target: str
    content: str
    rows: Count
    version: Count
    artifact: str = ""


@dataclass(frozen=True, kw_only=True)
class Drifted:
    """How windows that the champion was not trained on compare with its training rows.

    Attributes:
        against: version of the champion; None where there was none to compare with.
        action: what was done about it.
        reason: one sentence, also where nothing could be compared.
        windows: by name, the oldest first; those that an earlier run looked at, too.
        looked_at: those of them that this run looked at.
    """

    against: int | None
    action: Action
    reason: str
    windows: Mapping[str, Drift] = field(default_factory=dict)
    looked_at: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LiveError:
    """How good the predictions of one window by one version turned out to be.

    Attributes:
        window: its name.
        version: of the model that predicted it.
        key: of the predictions and the rows that were compared.
        waiting: predicted rows without a label yet; none once these predictions were replaced.
        unknown: predicted rows whose label is none that the version can predict.
        unmatched: predicted rows whose key no clean row has: it has a gap, or the row is gone.
        measured: over the predicted rows with a label; None where there is none.
        trained_on: whether the version was trained on this very window, so that its error is too low.
        baseline: the metric of the gate of the best guess by the version's training labels; None where these are not
            known.
    """

    window: str
    version: Count
    key: str
    waiting: Count
    unknown: Count = 0
    unmatched: Count = 0
    measured: Measured | None = None
    trained_on: bool = False
    baseline: float | None = None

    def value(self, metric: str) -> float | None:
        """The metric over the rows with a label; None where it has no value."""
        return None if self.measured is None else self.measured.values.get(metric)


@dataclass(frozen=True, kw_only=True)
class Live:
    """Errors of predictions whose labels arrived, over time.

    Attributes:
        label: that was compared.
        metric: that the gate judges by.
        windows: by window and version, in order; the newest ones.
        reason: why there are none, or some are missing; empty where nothing is.
        rows: hash of the rows of each window with predictions when these were last compared.
    """

    label: str
    metric: str
    windows: tuple[LiveError, ...] = ()
    reason: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)
