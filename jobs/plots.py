"""The report's figures, each as SVG text that stands in a page by itself.

Enters: the history of a training, residuals, seconds by stage. Leaves: SVG. Every axis has a title and a unit.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobs.record import Quality

__all__ = ["Group", "draw_curves", "draw_groups", "draw_sample", "draw_stages"]

BLUE, ORANGE, GREY, GREEN = "#2563a8", "#d9730d", "#6b7280", "#2f855a"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparkdl",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Residuals (predicted minus true) of the rides of one hour or zone, minutes.

    Attributes:
        name: of the hour or zone.
        rows: rides.
        bias: mean residual; above 0 the model predicts too long.
        rmse: root of the mean squared residual.
    """

    name: str
    rows: int
    bias: float
    rmse: float

    @property
    def margin(self) -> float:
        """Half the width of the 95 % confidence interval of ``bias``, minutes."""
        return 1.96 * math.sqrt(max(self.rmse**2 - self.bias**2, 0.0) / self.rows)


def draw_curves(history: Sequence[Mapping[str, float]], quality: Quality | None, best_epoch: int | None) -> str:
    """Draw training and validation error by epoch, with the noise floor and what 10 % above it is.

    Args:
        history: one row an epoch, with ``loss`` and ``val_loss`` in square minutes.
        quality: for the noise floor.
        best_epoch: whose weights were kept, counted from 1.
    """
    figure, axes = _figure(6.4, 4.0, "Learning curves", "epoch", "RMSE (minutes)")
    epochs = np.arange(1, len(history) + 1)
    training = np.sqrt([row.get("loss", np.nan) for row in history])
    validation = np.sqrt([row.get("val_loss", np.nan) for row in history])
    if quality and quality.floor_rmse:
        floor = quality.floor_rmse
        axes.axhspan(floor, 1.1 * floor, color=GREEN, alpha=0.12, linewidth=0, label="within 10 % of the noise floor")
        axes.axhline(floor, color=GREY, linestyle="--", linewidth=1.3, label=f"noise floor, {floor:.2f} min")
    axes.plot(epochs, training, "o-", color=BLUE, markersize=4, label="training, mean over the epoch")
    axes.plot(epochs, validation, "o-", color=ORANGE, markersize=4, label="validation, after the epoch")
    if best_epoch and best_epoch <= len(history):
        best = validation[best_epoch - 1]
        axes.plot([best_epoch], [best], "o", color="none", markeredgecolor=ORANGE, markersize=11, label="best epoch")
    axes.set_xlim(0.7, len(epochs) + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _zoom(axes, training, [*validation, *training[1:], *_floor_band(quality)])
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def _floor_band(quality: Quality | None) -> list[float]:
    return [quality.floor_rmse, 1.1 * quality.floor_rmse] if quality and quality.floor_rmse else []


def _zoom(axes: Axes, training: npt.NDArray[np.float64], shown: Sequence[float]) -> None:
    """Let the axis show where the curves end; the mean over the first epoch, from random weights on, is far above."""
    finite = [value for value in shown if np.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low) + 1e-3
    axes.set_ylim(low - 3 * room, high + 3 * room)
    if len(training) and training[0] > high + 3 * room:
        axes.annotate(
            f"{training[0]:.1f}",
            xy=(1, high + 3 * room),
            xytext=(1.12, high + 1.2 * room),
            color=BLUE,
            fontsize=9,
            arrowprops={"arrowstyle": "->", "color": BLUE},
        )


def draw_sample(sample: Sequence[Sequence[float]], days: str) -> str:
    """Draw predicted against true duration for a sample of pairs ``(true, predicted)``, minutes."""
    xlabel = f"true duration (minutes), {days}"
    figure, axes = _figure(
        6.4, 4.6, f"{len(sample):,} rides, predicted against true", xlabel, "predicted duration (minutes)"
    )
    true, predicted = np.asarray(sample, dtype=float).T
    end = 1.05 * max(true.max(), predicted.max())
    axes.plot([0, end], [0, end], color=ORANGE, linewidth=1.3, label="predicted = true", zorder=3)
    axes.scatter(true, predicted, s=7, color=BLUE, alpha=0.35, linewidths=0, label="one ride", rasterized=True)
    axes.set_xlim(0, end)
    axes.set_ylim(0, end)
    axes.set_aspect("equal")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return _svg(figure)


def draw_groups(title: str, xlabel: str, groups: Sequence[Group], *, slanted: bool = False) -> str:
    """Draw the bias of each group with its 95 % confidence interval above, its RMSE below."""
    places = np.arange(len(groups))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.15, 1]})
        top.axhline(0, color=GREY, linewidth=1)
        bias, margin = [group.bias for group in groups], [group.margin for group in groups]
        top.errorbar(places, bias, yerr=margin, fmt="o", color=BLUE, markersize=4, capsize=2.5, linewidth=1.2)
        top.set_ylabel("mean residual (min)\nwith 95 % interval")
        top.set_title(f"{title} (predicted minus true)")
        bottom.bar(places, [group.rmse for group in groups], color=BLUE, width=0.7)
        bottom.set_ylabel("RMSE (min)")
        bottom.set_xlabel(xlabel)
        for axes in (top, bottom):
            axes.grid(axis="x", visible=False)
        names = [group.name for group in groups]
        if slanted:
            bottom.set_xticks(places, names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8.5)
        else:
            bottom.set_xticks(places[::2], names[::2])
    return _svg(figure)


def draw_stages(stages: Mapping[str, float]) -> str:
    """Draw the seconds of each stage, in the order in which they ran."""
    figure, axes = _figure(6.4, 0.9 + 0.34 * len(stages), "Time by stage", "seconds", "")
    places = np.arange(len(stages))[::-1]
    axes.barh(places, list(stages.values()), color=BLUE, height=0.62)
    longest = max(stages.values())
    for place, seconds in zip(places, stages.values(), strict=True):
        axes.text(seconds + 0.012 * longest, place, f"{seconds:.1f}", va="center", fontsize=9, color="#374151")
    axes.set_yticks(places, list(stages))
    axes.set_xlim(0, 1.1 * longest)
    axes.grid(axis="y", visible=False)
    return _svg(figure)


def _figure(width: float, height: float, title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
    return figure, axes


def _svg(figure: Figure) -> str:
    target = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(target, format="svg", transparent=True, dpi=160, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    return text[text.index("<svg") :]
