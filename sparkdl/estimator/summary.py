"""The account of a fit: summary, epochs, plot, warnings, and what of them travels in a bundle; no Spark."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.columns.statistics import ColumnStats
from sparkdl.documents.typed import Source, convert
from sparkdl.errors import ConfigError
from sparkdl.models.folder import DOCUMENT, BundleInfo
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.labels import Meaning, label_kind
from sparkdl.train.objective.loss import loss_option


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The course of one fit.

    Attributes:
        run_id: name of the run.
        num_proc: number of ranks.
        backend: what carried the gradients: ``"torch"``, ``"horovod"``, or ``"torch, gradients in shared memory"``.
        epochs: epochs finished.
        steps: optimizer steps.
        rows: rows trained on, over all epochs and ranks.
        training_rows: rows of the training set.
        validation_rows: rows of the validation set; 0 without.
        best_epoch: from 0; None if no epoch was compared.
        metrics: of the epoch that the weights belong to.
        stopped_early: why training ended before its last epoch; None if it did not.
        seconds: wall-clock seconds by span: shards, check, launch (all ranks, start to end), join, open, fit.
        warnings: what looks wrong with the losses, a sentence each; the log has them, too.
    """

    run_id: str = ""
    num_proc: int = 1
    backend: str = ""
    epochs: int = 0
    steps: int = 0
    rows: int = 0
    training_rows: int = 0
    validation_rows: int = 0
    best_epoch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped_early: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Rows trained on per second of the ranks' own training time."""
        spent = self.seconds.get("fit", 0.0)
        return self.rows / spent if spent else 0.0

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        spans = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return (
            f"{self.run_id}: {self.epochs} epochs, {self.steps} steps, {self.rows:,} rows on {self.num_proc} ranks "
            f"({self.backend}), {self.rows_per_second:,.0f} rows/s; {metrics}; {spans}"
        )


def horovod_history(epochs: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the epochs as Horovod's ``getHistory()`` does: ``{"epoch", "train": {...}, "validation": {...}}``."""
    passed_over = {"epoch", "step", "lr", "seconds", "rows", "loss", "val_loss"}
    history = []
    for row in epochs:
        metrics = {name: value for name, value in row.items() if name not in passed_over}
        held_out = {name.removeprefix("val_"): value for name, value in metrics.items() if name.startswith("val_")}
        training = {name: value for name, value in metrics.items() if not name.startswith("val_")}
        entry: dict[str, Any] = {
            "epoch": int(row["epoch"]),
            "train": {"loss": row.get("loss"), "all_metrics": [training] if training else []},
        }
        if "val_loss" in row:
            entry["validation"] = {"loss": row["val_loss"], "all_metrics": [held_out] if held_out else []}
        history.append(entry)
    return history


def epoch_rows(epochs: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return epochs as rows of the epoch table, whether they are such rows or in Horovod's form."""
    return [_row(epoch) if isinstance(epoch.get("train"), Mapping) else dict(epoch) for epoch in epochs or ()]


def _row(epoch: Mapping[str, Any]) -> dict[str, Any]:
    row = {"epoch": epoch["epoch"]}
    for part, prefix in (("train", ""), ("validation", "val_")):
        values = epoch.get(part, {})
        named = {name: value for group in values.get("all_metrics", ()) for name, value in group.items()}
        row |= {f"{prefix}{name}": value for name, value in {"loss": values.get("loss"), **named}.items()}
    return {name: value for name, value in row.items() if value is not None}


def plot_epochs(epochs: Sequence[Mapping[str, float]]) -> Any:
    """Draw losses and metrics over epochs; return the matplotlib figure.

    Raises:
        ConfigError: there is no history, or matplotlib is not installed.
    """
    if not epochs:
        raise ConfigError("there is no history to plot: this model was not fitted, or was saved without one")
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ConfigError("plot_history needs matplotlib, which is not installed: install sparkdl[plots]") from cause
    skipped = {"epoch", "step", "lr", "seconds", "rows"}
    names = sorted({name.removeprefix("val_") for row in epochs for name in row if name not in skipped})
    figure = Figure(figsize=(5 * len(names), 3.5), layout="constrained")
    for position, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), position)
        for column, label in ((name, "training"), (f"val_{name}", "validation")):
            points = [(row["epoch"] + 1, row[column]) for row in epochs if column in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.legend()
    return figure


COLUMNS = ("outputCols", "predictionCol", "probabilityCol", "rawPredictionCol")
TRAINING = "training"
"""The key under which a bundle's preprocessing holds the following."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a training travels in the model's bundle.

    Attributes:
        history: the epochs, without their seconds: the same training makes the same bundle; None is not finite.
        meanings: by label, what its output means.
        columns: names of the prediction columns, by parameter.
    """

    history: tuple[Mapping[str, float | int | None], ...] = ()
    meanings: Mapping[str, Meaning] | None = None
    columns: Mapping[Literal["outputCols", "predictionCol", "probabilityCol", "rawPredictionCol"], str | list[str]] = (
        field(default_factory=dict)
    )


def plain_epochs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float | int | None]]:
    """Epochs as JSON takes them: None for what is not finite."""
    plain = []
    for row in rows:
        numbers = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
        plain.append(
            {
                name: value if not isinstance(value, float) or math.isfinite(value) else None
                for name, value in numbers.items()
                if isinstance(value, float | int | None)
            }
        )
    return plain


def training_of(info: BundleInfo) -> Training:
    """What a bundle says of its training; of one that was saved otherwise, nothing.

    Raises:
        IntegrityError: it holds what no training is.
    """
    source = Source(f"{info.uri}/{DOCUMENT}", "it was altered, or saved by another sparkdl: publish it again")
    return convert(info.preprocessing.get(TRAINING, {}), Training, source, f"$.preprocessing.{TRAINING}")


_LEAST_ROWS = 500
"""The rows from which losses are compared: of fewer, chance alone tells them apart."""
_LEAST_STEPS = 50
"""The steps of an epoch from which losses are compared; after fewer, batch normalization has seen too little to
validate with, and the gap is its."""
_FAR, _OF_GUESS = 1.5, 0.1
"""A validation loss so many times the training loss, and so much of a guess's loss above it, is far above it."""


def guess_loss(loss: Any, train: ColumnStats, rows: ColumnStats) -> tuple[str, float] | None:
    """A guess without a model, in words, and what it costs; None where statistics do not tell.

    Args:
        loss: of torch, or the user's own.
        train: of the labels to train on.
        rows: of the labels to predict.

    Returns:
        for a squared error or two classes exactly what the mean of the training labels costs, for an absolute error at
        most that; for more classes what it costs to call all alike.
    """
    while isinstance(loss, functools.partial):
        if loss.args or loss.keywords:
            return None
        loss = loss.func
    changed = [loss_option(loss, name, None) is not None for name in ("weight", "pos_weight")]
    smoothed = loss_option(loss, "label_smoothing", 0.0) != 0.0
    if label_kind(loss) == "own" or loss_option(loss, "reduction", "mean") != "mean" or smoothed or any(changed):
        return None
    if train.mean is None or train.min is None or train.max is None or train.null_count:
        return None
    if rows.mean is None or rows.variance is None or rows.min is None or rows.max is None or rows.null_count:
        return None
    words = f"always the mean of the training labels, {train.mean:.4g},"
    low, high = min(train.min, rows.min), max(train.max, rows.max)
    spread = rows.variance + (rows.mean - train.mean) ** 2
    match getattr(loss, "__name__", type(loss).__name__):
        case "MSELoss" | "mse_loss":
            return words, spread
        case "L1Loss" | "l1_loss":
            return words, math.sqrt(spread)
        case "BCEWithLogitsLoss" | "binary_cross_entropy_with_logits" | "BCELoss" | "binary_cross_entropy":
            return (words, _entropy(train.mean, rows.mean)) if low >= 0 and high <= 1 else None
        case "CrossEntropyLoss" | "cross_entropy" | "NLLLoss" | "nll_loss":
            if low < 0 or high < 1 or low <= loss_option(loss, "ignore_index", -100) <= high:
                return None
            if high == 1:
                return words, _entropy(train.mean, rows.mean)
            return f"all {high + 1:g} classes alike", math.log(high + 1)
    return None


def _entropy(share: float, rows: float) -> float:
    """Log loss of predicting ``share`` where ``rows`` is the share of ones."""
    terms = [(rows, share), (1 - rows, 1 - share)]
    return -sum(weight * math.log(chance) if chance > 0 else math.inf for weight, chance in terms if weight > 0)


def loss_warnings(
    epochs: Sequence[Mapping[str, float]],
    kept: Mapping[str, float],
    losses: Mapping[str, Any],
    train: Manifest,
    validation: Manifest | None,
    *,
    weighted: bool = False,
) -> list[str]:
    """Say what looks wrong, one sentence each.

    Args:
        epochs: the history's rows; all rows of a set count in each.
        kept: that of the epoch whose weights are kept.
        losses: by label.
        train: the set to train on.
        validation: the set to validate on.
        weighted: whether rows have weights, of which the statistics know nothing.
    """
    rows = train if validation is None else validation
    if rows.rows < _LEAST_ROWS or train.rows < _LEAST_ROWS or not epochs:
        return []
    guesses = {}
    for label, loss in losses.items():
        stats = [manifest.statistics.get(label, ColumnStats()) for manifest in (train, rows)]
        classes = label_kind(loss) == "classes"
        if not (classes and stats[1].count != rows.rows):  # one row's labels are chances, or a sequence
            guesses[label] = guess_loss(loss, *stats)
    sentences = []
    prefix = "" if validation is None else "val_"
    if not weighted and (validation is not None or len(epochs) > 1):  # the first epoch's mean begins at random weights
        for label, guess in guesses.items():
            name = f"{prefix}{label}_loss" if len(losses) > 1 else f"{prefix}loss"
            value = kept.get(name)
            if guess is not None and value is not None and value >= guess[1] * (1 - 1e-6) > 0:
                sentences.append(
                    f"beats the baseline: no. {name} is {value:.4g} over {rows.rows:,} rows, and {guess[0]} costs "
                    f"{guess[1]:.4g}: the model has learned nothing that helps, or its training went wrong"
                )
    costs = [guess[1] for guess in guesses.values() if guess is not None]
    if validation is not None and len(costs) == len(losses) == 1 and epochs[0].get("step", 0) >= _LEAST_STEPS:
        first, last = ((row.get("loss", math.nan), row.get("val_loss", math.nan)) for row in (epochs[0], kept))
        if all(
            val_loss > _FAR * train_loss > 0 and val_loss - train_loss > _OF_GUESS * costs[0]
            for train_loss, val_loss in (first, last)
        ):
            sentences.append(
                f"the training loss lies far below the validation loss from the first epoch on ({first[0]:.4g} against "
                f"{first[1]:.4g}): rows may train in an order that the optimizer follows (shuffle them), a feature may "
                "know the label of training rows alone (a leak), validation rows may be of another kind (a later time, "
                "other keys), or the network learns rows by heart (a smaller one, weight_decay, fewer epochs)"
            )
    return sentences
