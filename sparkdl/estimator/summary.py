"""What a fit tells about itself afterwards: a summary, Horovod's list of epochs, a plot.

Enters: the report of rank 0 and what the driver measured. Leaves: plain values, and a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ConfigError

__all__ = ["TrainingSummary", "epoch_rows", "horovod_history", "plot_epochs"]


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The course of one fit.

    Attributes:
        run_id: name of the run.
        num_proc: number of ranks.
        backend: what carried the gradients: ``"torch"``, ``"horovod"``, or ``"horovod, gradients in shared memory"``.
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
    found = []
    for row in epochs:
        rest = {name: value for name, value in row.items() if name not in passed_over}
        held_out = {name.removeprefix("val_"): value for name, value in rest.items() if name.startswith("val_")}
        training = {name: value for name, value in rest.items() if not name.startswith("val_")}
        one: dict[str, Any] = {
            "epoch": int(row["epoch"]),
            "train": {"loss": row.get("loss"), "all_metrics": [training] if training else []},
        }
        if "val_loss" in row:
            one["validation"] = {"loss": row["val_loss"], "all_metrics": [held_out] if held_out else []}
        found.append(one)
    return found


def epoch_rows(epochs: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return epochs as rows of the epoch table, whether they are such rows or in Horovod's form."""
    return [_row(one) if isinstance(one.get("train"), Mapping) else dict(one) for one in epochs or ()]


def _row(epoch: Mapping[str, Any]) -> dict[str, Any]:
    found = {"epoch": epoch["epoch"]}
    for part, prefix in (("train", ""), ("validation", "val_")):
        values = epoch.get(part, {})
        named = {name: value for group in values.get("all_metrics", ()) for name, value in group.items()}
        found |= {f"{prefix}{name}": value for name, value in {"loss": values.get("loss"), **named}.items()}
    return {name: value for name, value in found.items() if value is not None}


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
